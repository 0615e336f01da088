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


def test_what_was_held_for_an_earlier_step_is_no_fragmentation() -> None:
    """A smaller step finds the largest one's memory held."""
    misses = Misses()
    assert misses.held(4000, 4200, 4000)
    assert misses.kept_free_bytes == 200
    assert not misses.held(400, 4200, 4000)
    assert misses.kept_free_bytes == 200
    assert misses.held(400, 4300, 4000)
    assert misses.kept_free_bytes == 300


def test_a_step_that_fills_the_budget_has_more_fragmentation_than_the_first_ones() -> None:
    """It is reckoned with in proportion until there was one, within reason, and then as it was."""
    misses = Misses()
    assert misses.held(2000, 2100, 4000)
    assert misses.kept_free_bytes == 150
    assert misses.held(3600, 3620, 4000), "much less is reckoned with: plans are made anew"
    assert misses.kept_free_bytes == 22
    assert misses.held(3500, 3800, 4000)
    assert misses.kept_free_bytes == 222
    assert not misses.held(3600, 3700, 4000), "what was seen once is believed for long"
    assert not misses.held(3700, 3710, 4000), "a step that is hardly larger says no more about it"
    assert 210 <= misses.kept_free_bytes <= 222


def test_gaps_that_others_have_left_do_not_take_the_budget_away() -> None:
    """A first, small step finds those of an evaluation, which the next ones fill."""
    misses = Misses()
    assert misses.held(100, 3000, 4000)
    assert misses.kept_free_bytes == 0.15 * 4000
    assert misses.held(3000, 3010, 4000)
    assert misses.kept_free_bytes == 10 * 4000 // 3000


def test_what_an_allocator_could_not_use_when_it_failed_is_kept_free() -> None:
    """More than that, as long as no step has filled the budget."""
    misses = Misses()
    misses.held(1000, 1010, 4000)
    misses.ran_out(3200, 3600, 4000)
    assert misses.kept_free_bytes == 400 * 4000 // 3200
    misses.ran_out(3200, 3300, 4000)
    assert misses.kept_free_bytes == 400 * 4000 // 3200


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


def test_what_comes_back_after_predictions_had_held_is_remembered_for_longer() -> None:
    """What is in a batch may decide over what it needs, now and then: no size tells of it."""
    misses = Misses()
    misses.compare(1000, 1100)
    for _ in range(30):
        misses.compare(1000, 1000)
    assert misses.kept_free_bytes < 10
    for _ in range(2):
        misses.compare(1000, 1100)
        misses.compare(1000, 1100)  # at once: no relapse of its own
        for _ in range(30):
            misses.compare(1000, 1000)
    assert misses.kept_free_bytes > 50


def test_a_step_that_came_out_as_predicted_did_without_what_was_kept_free() -> None:
    """Also where it was a little above: that much is kept free."""
    misses = Misses()
    misses.out_of_memory(10_000)
    for _ in range(60):
        misses.compare(8000, 8020)
    assert misses.kept_free_bytes == 20


def test_an_allocator_that_failed_has_shown_how_fragmented_it_is() -> None:
    """What it held in steps that went well may be left from others, and is believed up to a bound only."""
    misses = Misses()
    misses.held(8000, 11_000, 10_000)
    assert misses.kept_free_bytes == 1500
    misses.ran_out(8000, 10_000, 10_000)
    assert misses.kept_free_bytes == 2000
    misses.ran_out(2000, 10_000, 10_000)
    assert misses.kept_free_bytes == 3000


def test_what_fades_stays_as_large_as_the_latest_small_misses() -> None:
    """Else it would be news each time, and all plans made anew for it."""
    misses = Misses()
    kept = []
    for step in range(60):
        misses.compare(10_000, 10_070 if step % 10 == 0 else 10_010)
        kept.append(misses.kept_free_bytes)
    assert kept == [70] * 60
    for _ in range(60):
        misses.compare(10_000, 10_010)
    assert misses.kept_free_bytes == 10
