"""Bounds: where no fit is to be trusted, and the budget is ample."""

from __future__ import annotations

from lightning_mimose.predict.ample import PATIENCE_STEPS, SAFETY, Bounds, growth


def seen(*steps: tuple[dict[str, int], int | None, int]) -> Bounds:
    """Bounds from these steps, and as many more that say nothing as it takes for them to be used."""
    bounds = Bounds()
    for dims, kept_bytes, calls in steps:
        bounds.add(dims, kept_bytes, calls=calls)
    for _ in range(PATIENCE_STEPS - len(steps)):
        bounds.add({"other": 1}, None, calls=0)
    return bounds


def test_bounds_are_not_used_before_fits_had_their_time() -> None:
    """Most runs never need them."""
    bounds = Bounds()
    for _ in range(PATIENCE_STEPS - 1):
        bounds.add({"batch": 4}, 1000, calls=1)
        assert bounds.of({"batch": 4}) is None
    bounds.add({"batch": 4}, 900, calls=1)
    assert bounds.of({"batch": 4}) == int(SAFETY * 1000)


def test_larger_batches_are_taken_to_need_quadratically_more() -> None:
    """From whichever that was seen the least follows; a smaller one may need as much."""
    bounds = seen(({"n": 10}, 1000, 1), ({"n": 20}, 1500, 1))
    assert bounds.of({"n": 40}) == int(SAFETY * 4 * 1500)
    assert bounds.of({"n": 5}) == int(SAFETY * 1000)
    assert growth({"n": 30, "m": 30}, {"n": 10, "m": 20}) == 9 * 2.25


def test_a_step_that_leaves_out_calls_says_nothing_of_one_that_does_not() -> None:
    """Layers that are dropped at random."""
    assert seen(({"n": 10}, 500, 3), ({"n": 10}, 1000, 4), ({"n": 10}, 600, 3)).of({"n": 10}) == int(SAFETY * 1000)
    assert seen(({"n": 10}, 500, 3), ({"n": 10}, None, 4)).of({"n": 10}) is None


def test_what_was_refuted_is_believed_no_more() -> None:
    """The device ran out of memory."""
    bounds = seen(({"n": 10}, 1000, 1))
    bounds.refute()
    assert bounds.of({"n": 10}) is None


def test_few_sizes_are_remembered() -> None:
    """The latest."""
    bounds = seen(*(({"n": n}, n, 1) for n in range(1, 100)))
    assert bounds.of({"n": 99}) == int(SAFETY * 99)
    assert bounds.of({"m": 99}) is None
