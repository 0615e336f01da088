"""Inputs that only options hold: a moment that is high both before and after they are let go of."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_mimose.predict.assemble import assemble
from lightning_mimose.predict.loose import Gone, Places, gone, highest_twice
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.rows import kept_timeline
from lightning_mimose.predict.shapes import CallShape, LooseShape, Position, Resident
from lightning_mimose.predict.structure import Structure

BEFORE, AFTER, X, MASK = 105, 90, 40, 10
"""The level as the block has returned, then without what it was given, and what that was."""
OWN = {"saved": 30, "working": 35, "before_backward": 60, "flops": 1, "besides": 0, "tensors": 3, "given": 50}
OWN |= {"returned": 20, "entry": 0, "lean": 20}
"""What is known of the block."""


def structure(ending: tuple[int, int]) -> tuple[Structure, NDArray[np.float64]]:
    """A block that was given a tensor and a mask, both let go of as it returned; and the columns of its step."""
    columns = {name: column for column, name in enumerate(OWN)}
    call = CallShape("block", "block", region=True, in_time=1, out_time=2, backward_time=4, held_until=4, **columns)
    values = [float(value) for value in OWN.values()]
    positions = []
    for label, time, backward, level in (
        ("in block", 1, False, 90),
        ("out block", 2, False, max(BEFORE, AFTER + X + MASK)),
        ("backward step", 3, True, 95),
        ("backward block", 4, True, 80),
    ):
        positions.append(Position(label, time, backward, len(values), -1, 0, 0))
        values.append(float(level))
    loose = []
    for size, end in zip((X, MASK), ending, strict=True):
        loose.append(LooseShape(len(values), (0,), 4, len(values) + 1, since_time=3, lasts_until=4, given=(0,)))
        values += [float(size), float(end)]
    batch = len(values)
    values.append(0.0)
    made = Structure(("block",), (-1,), (call,), tuple(positions), tuple(loose), batch, len(values))
    return made, np.array(values)


RESIDENT = Resident(0, 0, zeroes_gradients=True, update_bytes=0)
PARTLY = (35, 0)
"""By how much it is lower without either, one after the other: before that it is at 105, afterwards at 90 to 140."""
BETWEEN = (40, 0)
"""Likewise, where it is highest when the first one is gone and the second is not."""


@pytest.mark.parametrize(("ending", "times"), [(PARTLY, [2]), (BETWEEN, []), ((0, 0), []), ((X, MASK), [])])
def test_a_time_is_looked_at_twice_if_it_is_known_to_be_high_twice(ending: tuple[int, int], times: list[int]) -> None:
    """Where letting go of each changes nothing, or all of it, one position tells everything."""
    made, values = structure(ending)
    assert highest_twice(made, np.rint(values).astype(np.int64)) == times


def test_who_holds_both_pays_for_them_after_the_moment_and_not_before() -> None:
    """Kept, the block has no more than its own; recomputed, it holds what it was given from then on."""
    made, values = structure(PARTLY)
    kept = kept_timeline(made, values, RESIDENT)
    assert kept.base_bytes[1] == BEFORE
    timeline = assemble(made, values, RESIDENT, rates=Rates(1e-9), minimum_share=0.0)
    first, second = (i for i, label in enumerate(timeline.labels) if label == "out block")
    assert (timeline.base_bytes[first], timeline.base_bytes[second]) == (BEFORE, AFTER)
    level = timeline.level_bytes(timeline.chosen({"block": "recompute"}))
    assert (level[first], level[second]) == (BEFORE - 30, AFTER + X + MASK - 30)


def test_who_holds_what_is_gone_where_it_is_highest_pays_for_it_there() -> None:
    """Although something else is let go of after that, in the same interval."""
    made, values = structure(BETWEEN)
    assert kept_timeline(made, values, RESIDENT).base_bytes[1] == AFTER + MASK
    timeline = assemble(made, values, RESIDENT, rates=Rates(1e-9), minimum_share=0.0)
    (only,) = (i for i, label in enumerate(timeline.labels) if label == "out block")
    assert timeline.base_bytes[only] == AFTER + MASK
    assert timeline.level_bytes(timeline.chosen({"block": "recompute"}))[only] == AFTER + X + MASK - 30


def test_what_is_gone_is_told_once_for_each_position() -> None:
    """A second position has neither; the first is lower by what letting go has changed there, whoever holds them."""
    made, values = structure(PARTLY)
    when, second = np.array([1, 2, 3, 4, 2]), np.array([False, False, False, False, True])
    places = Places(when, np.array([False, False, True, True, False]), second)
    found: list[Gone] = list(gone(made, np.rint(values).astype(np.int64), places))
    assert [(each.number, each.nbytes, each.where.tolist(), each.counts) for each in found] == [
        (0, X, [False, False, True, True, True], True),
        (0, PARTLY[0], [False, True, False, False, False], False),
        (1, MASK, [False, False, True, True, True], True),
        (1, PARTLY[1], [False, True, False, False, False], False),
    ]


def test_a_fit_that_says_that_more_than_all_of_it_goes_says_that_all_does() -> None:
    """Polynomials do not follow what is the whole size in some sizes and less in others."""
    whole, values = structure((X, MASK))
    more, above = structure((X + 1, MASK + 2))
    block = {"block": "recompute"}
    expected, found = (
        assemble(made, columns, RESIDENT, rates=Rates(1e-9), minimum_share=0.0)
        for made, columns in ((whole, values), (more, above))
    )
    assert found.base_bytes.tolist() == expected.base_bytes.tolist()
    assert found.level_bytes(found.chosen(block)).tolist() == expected.level_bytes(expected.chosen(block)).tolist()
