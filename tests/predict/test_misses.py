"""What plans keep free because of what was measured."""

from __future__ import annotations

from lightning_mimose.predict.misses import Misses


def test_what_was_missing_is_kept_free_and_fades_with_steps_that_do_without() -> None:
    """The largest counts, however many smaller ones come after it."""
    misses = Misses()
    misses.compare(1000, 1100)
    misses.compare(1000, 1050)
    assert misses.kept_free_bytes == 100
    for _ in range(3):
        misses.compare(1000, 1000)
    assert misses.kept_free_bytes == 72
    misses.fade()
    assert misses.kept_free_bytes == 64


def test_predictions_that_hold_are_counted_until_one_does_not() -> None:
    """One that is far too high neither counts nor begins anew."""
    misses = Misses()
    for measured in (1000, 1004, 900):
        misses.compare(1000, measured)
    assert misses.verified == 3
    misses.compare(1000, 700)
    assert misses.verified == 3
    misses.compare(1000, 1009)
    assert misses.verified == 0


def test_after_the_device_was_out_of_memory_a_share_of_the_budget_is_free() -> None:
    """Not less than before."""
    misses = Misses()
    misses.out_of_memory(10_000)
    assert misses.kept_free_bytes == 500
    misses.compare(1000, 1600)
    misses.out_of_memory(10_000)
    assert misses.kept_free_bytes == 600


def test_what_was_reserved_for_an_earlier_step_is_no_fragmentation() -> None:
    """A smaller step finds the largest one's memory reserved."""
    misses = Misses()
    assert misses.reserved(1000, 1200)
    assert misses.kept_free_bytes == 200
    assert not misses.reserved(400, 1200)
    assert misses.kept_free_bytes == 200
    assert misses.reserved(400, 1300)
    assert misses.kept_free_bytes == 300


def test_what_all_plans_leave_free_is_the_least_since_they_were_forgotten() -> None:
    """Plans are made from what is kept free at the time, which falls; those made before it rose leave less."""
    misses = Misses()
    misses.compare(1000, 1100)
    assert misses.left_free_bytes == 0
    misses.plans_forgotten()
    assert misses.left_free_bytes == 100
    misses.compare(1000, 1000)
    misses.compare(1000, 1200)
    assert (misses.kept_free_bytes, misses.left_free_bytes) == (200, 90)
