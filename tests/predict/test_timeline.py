"""The timeline: peaks of plans on a walk that is written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_mimose.menu import KEEP
from lightning_mimose.predict.rows import whole_bytes
from lightning_mimose.predict.timeline import Option, SharedHold, Timeline


def timeline(shared: tuple[SharedHold, ...] = ()) -> Timeline:
    """Two units, the first with a part; the last one gains nothing, since the peak is at its backward."""
    return Timeline(
        units=("a", "a.part", "b"),
        parents=(-1, 0, -1),
        options=(
            Option(0, "recompute", 3.0),
            Option(0, "lean", 1.0),
            Option(1, "recompute", 2.0),
            Option(2, "recompute", 4.0),
        ),
        base_bytes=np.array([10, 60, 100, 70], dtype=np.int64),
        relief_bytes=np.array([[0, 40, 40, -5], [0, 15, 15, 0], [0, 20, 20, 0], [0, 0, 0, 0]], dtype=np.int64),
        shared=shared,
        labels=("start", "forward b", "backward b", "backward a"),
    )


@pytest.mark.parametrize(
    ("actions", "peak", "where"),
    [
        ({}, 100, "backward b"),
        ({"a": "recompute"}, 75, "backward a"),
        ({"a": "lean"}, 85, "backward b"),
        ({"a.part": "recompute"}, 80, "backward b"),
        ({"b": "recompute"}, 100, "backward b"),
        ({"a": "recompute", "b": "recompute"}, 75, "backward a"),
        ({"a": KEEP, "b": KEEP}, 100, "backward b"),
    ],
)
def test_the_peak_of_a_plan_is_the_maximum_over_the_walk(actions: dict[str, str], peak: int, where: str) -> None:
    """Relief is taken off where it applies; a recomputation's working set is added where it exists."""
    assert timeline().peak_bytes(actions) == peak
    assert timeline().peak_position(actions) == where


def test_units_that_are_not_named_are_kept() -> None:
    """And saying so changes nothing."""
    full = {"a": "recompute", "a.part": KEEP, "b": KEEP}
    assert timeline().peak_bytes(full) == timeline().peak_bytes({"a": "recompute"})


@pytest.mark.parametrize("actions", [{"c": "recompute"}, {"b": "lean"}])
def test_unknown_units_and_actions_are_errors(actions: dict[str, str]) -> None:
    """A plan for another model is not silently ignored."""
    with pytest.raises(KeyError):
        timeline().peak_bytes(actions)


def test_added_seconds_add_up() -> None:
    """Over what is chosen."""
    assert timeline().added_seconds({"a": "lean", "b": "recompute"}) == 5.0
    assert timeline().added_seconds({}) == 0.0


def shared(*rows: list[int]) -> SharedHold:
    """A storage of 7 bytes that a (longest) and b hold when recomputed."""
    return SharedHold(7, (0, 3), np.array(rows, dtype=np.bool_))


def test_what_several_recomputed_units_hold_is_counted_once() -> None:
    """As long as the one that holds it longest."""
    held = timeline((shared([0, 0, 1, 1], [0, 0, 1, 0]),))
    assert held.level_bytes(held.chosen({})).tolist() == [10, 60, 100, 70]
    assert held.level_bytes(held.chosen({"b": "recompute"})).tolist() == [10, 60, 107, 70]
    assert held.level_bytes(held.chosen({"a": "recompute"})).tolist() == [10, 20, 67, 82]
    assert held.level_bytes(held.chosen({"a": "recompute", "b": "recompute"})).tolist() == [10, 20, 67, 82]


def test_several_shared_storages_add_up() -> None:
    """Each by itself."""
    held = timeline((shared([0, 0, 1, 1], [0, 0, 1, 0]), shared([0, 0, 1, 1], [0, 0, 1, 0])))
    assert held.peak_bytes({"b": "recompute"}) == 114


def test_a_plan_with_another_action_of_the_holder_holds_nothing() -> None:
    """Only the options named hold it."""
    held = timeline((shared([0, 0, 1, 1], [0, 0, 1, 0]),))
    assert held.peak_bytes({"a": "lean"}) == 85


def test_a_timeline_is_left_unchanged_by_questions() -> None:
    """Its arrays are read, never written."""
    held = timeline((shared([0, 0, 1, 1], [0, 0, 1, 0]),))
    before = held.base_bytes.copy(), held.relief_bytes.copy()
    held.peak_bytes({"a": "recompute", "b": "recompute"})
    assert (held.base_bytes == before[0]).all()
    assert (held.relief_bytes == before[1]).all()


def test_what_a_fit_says_of_sizes_without_end_can_be_added_up() -> None:
    """A thousand of them, without overflow; nothing is less than nothing."""
    whole = whole_bytes(np.array([2.4, -3.0, 1e30] + 999 * [1e19]))
    assert whole[:2].tolist() == [2, 0]
    assert whole[2:].sum() > 1 << 59
