"""What lean saves spare, read off pieces of a recorded step."""

from __future__ import annotations

from lightning_mimose.measure.call import Call, LeanItem
from lightning_mimose.measure.interval import Interval
from lightning_mimose.measure.savings import Savings, savings
from lightning_mimose.measure.trace import DIES, IS_USED, Mark, Piece, StepTrace


def peaks(found: Savings) -> dict[int, float]:
    """The largest of the local maxima of every interval."""
    return {mark: max(map(max, tops)) for mark, tops in found.tops.items()}


def test_a_mask_s_bits_are_made_while_its_tensor_is_still_there() -> None:
    """So the peak before it goes is higher by them; afterwards what is spared is the tensor without them.

    And they still are when it is made again, until the operation that uses it is done.
    """
    marks = (Mark("block", "again", 0, 0), Mark("block", "again_out", 0, 0))
    pieces = (
        Piece(0, 10, 100),
        Piece(0, 90, 95, ("block", DIES, 0)),
        Piece(1, 90, 92),
        Piece(1, 90, 94, ("block", IS_USED, 0)),
    )
    step = StepTrace((), marks, (Interval(10, 100), Interval(90, 94)), pieces=pieces)
    mask = LeanItem(5, 31, 2, 7.0, temporary_bytes=3, held_bytes=1)
    call = Call("block", 0, None, "recompute", marks={"again": 0, "again_out": 1}, items=(mask,))
    step = StepTrace((call,), marks, step.intervals, pieces=pieces)
    without, with_masks = savings(step, call, set(), set(), 2)
    assert (without.gain_bytes, peaks(without)) == (0, {0: 100, 1: 94})
    assert (with_masks.gain_bytes, peaks(with_masks)) == (31, {0: 100 + 1, 1: 94 + 1})
    assert savings(step, call, set(), {5}, 2)[1].lent_bytes == 31
