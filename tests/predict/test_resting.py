"""Sheltered steps that are not learnt from: which ones."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.predict.resting import BEYOND, KNOWN, LEARNT_STEPS, LEAST_SHARE, Resting

SIZE = [("batch", 4), ("tokens", 100)]


def learnt(steps: int) -> list[int]:
    """Which of so many sheltered steps in a row are learnt from."""
    resting, found = Resting(), []
    for step in range(steps):
        if not resting.rests("way"):
            found.append(step)
        resting.ran("way", SIZE, sheltered=True)
    return found


def rested(steps: int, *, way: str = "way") -> Resting:
    """After so many sheltered steps in a row."""
    resting = Resting()
    for _ in range(steps):
        resting.ran(way, SIZE, sheltered=True)
    return resting


def learns_all(resting: Resting, steps: int, size: list[tuple[str, int]]) -> bool:
    """Whether all of so many further steps of a size are learnt from."""
    found = []
    for _ in range(steps):
        found.append(not resting.rests("way"))
        resting.ran("way", size, sheltered=True)
    return all(found)


def test_the_first_are_all_learnt_from_and_then_fewer() -> None:
    """Never none: what is learnt late must still be found out. Of the 40 after the first about 20 * ln 2 are."""
    found = learnt(2000)
    assert found[:LEARNT_STEPS] == list(range(LEARNT_STEPS))
    assert 0.3 * LEARNT_STEPS < sum(LEARNT_STEPS <= step < 2 * LEARNT_STEPS for step in found) < 0.5 * LEARNT_STEPS
    late = [step for step in found if step >= 1000]
    assert abs(len(late) / 1000 - LEAST_SHARE) < 0.01
    assert max(b - a for a, b in pairwise(late)) < 3 / LEAST_SHARE


@given(st.integers(2, 12), st.data())
def test_what_comes_in_every_so_many_steps_is_met(period: int, data: st.DataObject) -> None:
    """The first batch of an accumulation must not be all that is measured, or all that is not."""
    phase = data.draw(st.integers(0, period - 1))
    met = [step for step in learnt(1000) if step >= 200 and step % period == phase]
    assert len(met) > 0.5 * LEAST_SHARE * 800 / period


def test_a_planned_step_begins_anew_and_ways_are_apart() -> None:
    """One mode of the modules that is never learnt leaves another alone; however many there are."""
    resting = rested(500, way="one")
    assert not learns_all(rested(500), LEARNT_STEPS, SIZE)
    assert not resting.rests("other")
    resting.ran("one", SIZE, sheltered=False)
    for way in range(3 * KNOWN):
        resting.ran(way, SIZE, sheltered=True)
    assert not resting.rests("one")


def test_other_sizes_begin_anew() -> None:
    """Whoever goes on with longer texts, or smaller batches, or other inputs, waits for nothing: one step is missed."""
    for other in ([("batch", 4), ("tokens", 200)], [("batch", 2), ("tokens", 100)], [*SIZE, ("width", 1)]):
        resting = rested(500)
        resting.ran("way", other, sheltered=True)
        assert learns_all(resting, LEARNT_STEPS, other)
        assert not learns_all(resting, LEARNT_STEPS, SIZE)


def test_sizes_like_those_before_and_unknown_ones_do_not_begin_anew() -> None:
    for alike in ([("batch", 4), ("tokens", int(100 * BEYOND))], [("tokens", 81)], []):
        resting = rested(500)
        resting.ran("way", alike, sheltered=True)
        assert not learns_all(resting, LEARNT_STEPS, SIZE)


def test_what_is_largest_in_all_dimensions_together_is_learnt_from_at_once() -> None:
    """Many short texts and one long text were met; many long ones take more than both, which nobody has measured."""
    resting = Resting()
    for i in range(400):
        resting.ran("way", [("batch", 64 if i % 2 else 1), ("tokens", 16 if i % 2 else 1024)], sheltered=True)
    while not resting.rests("way"):
        resting.ran("way", [("batch", 1), ("tokens", 1024)], sheltered=True)
    assert resting.rests("way", [("batch", 32), ("tokens", 16)])
    assert not resting.rests("way", [("batch", 64), ("tokens", 1024)])
    resting.ran("way", [("batch", 64), ("tokens", 1024)], sheltered=True)
    assert learns_all(resting, LEARNT_STEPS, [("batch", 64), ("tokens", 1024)])
