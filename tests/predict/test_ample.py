"""Bounds: where no fit is to be trusted, and the budget is ample."""

from __future__ import annotations

from lightning_mimose.predict.ample import LEAST_SAFETY, PATIENCE_STEPS, Bounds


def seen(*steps: tuple[dict[str, int], int]) -> Bounds:
    """Bounds from these steps, and as many others as it takes for them to be used."""
    bounds = Bounds()
    for dims, kept_bytes in steps:
        bounds.add(dims, kept_bytes)
    for _ in range(PATIENCE_STEPS - len(steps)):
        bounds.add({"other": 1}, 1)
    return bounds


def test_bounds_are_not_used_before_fits_had_their_time() -> None:
    """Most runs never need them."""
    bounds = Bounds()
    for _ in range(PATIENCE_STEPS - 1):
        bounds.add({"batch": 4}, 1000)
        assert bounds.of({"batch": 4}) is None
    bounds.add({"batch": 4}, 900)
    assert bounds.of({"batch": 4}) == 2 * 1000


def test_the_most_that_any_batch_needed_counts_for_all_up_to_the_largest() -> None:
    """Two packed texts of the same length need not have the same attention."""
    bounds = seen(({"n": 1000, "m": 3}, 3000), ({"n": 1024, "m": 2}, 1000))
    assert bounds.of({"n": 1024, "m": 3}) == bounds.of({"n": 10, "m": 1}) == 2 * 3000
    assert bounds.of({"n": 10}) is None  # batches of another kind


def test_beyond_the_largest_a_step_may_grow_with_the_cube_of_its_size() -> None:
    """Far beyond it nothing is known."""
    bounds = seen(({"n": 100, "m": 10}, 3000), ({"n": 50, "m": 0}, 1000))
    assert bounds.of({"n": 110, "m": 10}) == int(2 * 1.1**3 * 3000)
    assert bounds.of({"n": 110, "m": 12}) == int(2 * (1.1 * 1.2) ** 3 * 3000)
    assert bounds.of({"n": 151, "m": 1}) is bounds.of({"n": 130, "m": 12}) is None
    assert seen(({"n": 0}, 10)).of({"n": 1}) is None


def test_batches_of_another_kind_say_nothing_of_how_far_one_may_be_above_the_others() -> None:
    """Sixty of one kind, and one of another."""
    bounds = Bounds()
    for _ in range(60):
        bounds.add({"a": 4}, 1000)
    bounds.add({"b": 4}, 1000)
    assert bounds.of({"a": 4}) == int(LEAST_SAFETY * 1000)
    assert bounds.of({"b": 4}) == 2 * 1000


def test_the_more_steps_were_seen_the_less_the_next_one_may_be_above_them() -> None:
    """But always somewhat."""
    bounds, before = Bounds(), 10_000
    for count in range(1, 200):
        bounds.add({"n": 10}, 1000)
        bound = bounds.of({"n": 10})
        if count >= PATIENCE_STEPS:
            assert bound is not None
            assert int(LEAST_SAFETY * 1000) <= bound <= before
            before = bound
    assert before == int(LEAST_SAFETY * 1000)


def test_what_was_refuted_is_believed_no_more() -> None:
    """By a step that took more, or a device that ran out of memory."""
    bounds = seen(({"n": 10}, 1000))
    bounds.refute()
    assert bounds.of({"n": 10}) is None
