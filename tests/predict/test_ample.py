"""Bounds: where no fit is to be trusted, and the budget is ample."""

from __future__ import annotations

from lightning_mimose.predict.ample import PATIENCE_STEPS, SAFETY, Bounds


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
    assert bounds.of({"batch": 4}) == int(SAFETY * 1000)


def test_the_most_that_any_batch_needed_counts_for_all_up_to_the_largest() -> None:
    """Two packed texts of the same length need not have the same attention; beyond the largest nothing is known."""
    bounds = seen(({"n": 1000, "m": 3}, 3000), ({"n": 1024, "m": 2}, 1000))
    assert bounds.of({"n": 1024, "m": 3}) == bounds.of({"n": 10, "m": 1}) == int(SAFETY * 3000)
    assert bounds.of({"n": 1025, "m": 3}) is bounds.of({"n": 10, "m": 4}) is None
    assert bounds.of({"n": 10}) is None  # batches of another kind


def test_what_was_refuted_is_believed_no_more() -> None:
    """By a step that took more, or a device that ran out of memory."""
    bounds = seen(({"n": 10}, 1000))
    bounds.refute()
    assert bounds.of({"n": 10}) is None
