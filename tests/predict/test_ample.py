"""Bounds: where no fit is to be trusted, and the budget is ample."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.predict.ample import LEAST_SAFETY, PATIENCE_STEPS, Bounds, Spared


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


@given(
    sheltered=st.integers(0, 10**6),
    units=st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 10**6), st.floats(0, 1)), min_size=1, max_size=8
    ),
    room=st.integers(0, 10**7),
    steps=st.integers(PATIENCE_STEPS, 80),
)
def test_what_is_kept_for_sure_leaves_room_for_more_than_was_seen(
    sheltered: int, units: dict[str, tuple[int, float]], room: int, steps: int
) -> None:
    """What those kept have saved comes on top of the highest sheltered step, a fifth more at least; no more fit."""
    bounds = Bounds()
    spared = {unit: Spared(*each) for unit, each in units.items()}
    for _ in range(steps):
        bounds.add({"ids:1": 60}, sheltered + sum(each.nbytes for each in spared.values()), sheltered, spared)
    found = bounds.within({"ids:1": 60}, room)
    everything = bounds.of({"ids:1": 60})
    assert everything is not None
    if found is None:
        assert everything > room
        return
    kept, bound_bytes = found
    most = sheltered + sum(spared[unit].nbytes for unit in kept)
    assert kept
    assert kept <= units.keys()
    assert int(LEAST_SAFETY * most) <= bound_bytes <= room
    assert all(2 * (most + spared[unit].nbytes) > room for unit in units.keys() - kept)
    assert (kept == units.keys()) == (everything <= room)


def test_nothing_is_kept_for_sure_of_sizes_that_were_not_seen() -> None:
    """Nor before enough steps were, nor once a bound was broken."""
    bounds = Bounds()
    for step in range(PATIENCE_STEPS):
        assert bounds.within({"ids:1": 60}, 10**9) is None, step
        bounds.add({"ids:1": 60}, 1000, 600, {"a": Spared(400, 1.0)})
    assert bounds.within({"ids:1": 60}, 10**9) == (frozenset("a"), 2000)
    assert bounds.within({"ids:1": 600}, 10**9) is None
    assert bounds.within({"pixels:2": 60}, 10**9) is None
    bounds.refute()
    assert bounds.within({"ids:1": 60}, 10**9) is None
