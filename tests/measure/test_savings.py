"""What lean saves spare, read off pieces of a recorded step."""

from __future__ import annotations

from lightning_mimose.measure.call import Call, LeanItem
from lightning_mimose.measure.interval import Interval
from lightning_mimose.measure.savings import Savings, savings
from lightning_mimose.measure.trace import DIES, GOES, IS_USED, Mark, Piece, StepTrace


def peaks(found: Savings) -> dict[int, float]:
    """The largest of the local maxima of every interval."""
    return {mark: max(map(max, tops)) for mark, tops in found.tops.items()}


def step_of(items: tuple[LeanItem, ...], *pieces: Piece) -> tuple[StepTrace, Call]:
    """A step of one region that runs again and goes backward."""
    marks = (Mark("block", "again", 0, 0), Mark("block", "again_out", 0, 0))
    first, backward = ([piece for piece in pieces if piece.mark == mark] for mark in (0, 1))
    intervals = (
        Interval(first[0].level_bytes, max(piece.peak_bytes for piece in first)),
        Interval(backward[0].level_bytes, max(piece.peak_bytes for piece in backward)),
    )
    call = Call("block", 0, None, "recompute", marks={"again": 0, "again_out": 1}, items=items)
    return StepTrace((call,), marks, intervals, pieces=pieces), call


def test_a_mask_s_bits_are_made_while_its_tensor_is_still_there() -> None:
    """So the peak before it goes is higher by them; afterwards what is spared is the tensor without them.

    And they still are when it is made again, until the operation that uses it is done.
    """
    step, call = step_of(
        (LeanItem(5, 31, 2, 7.0, temporary_bytes=3, held_bytes=1),),
        Piece(0, 10, 100),
        Piece(0, 90, 95, ("block", DIES, 0)),
        Piece(1, 90, 92),
        Piece(1, 90, 94, ("block", IS_USED, 0)),
    )
    without, with_masks = savings(step, call, set(), set(), 2)
    assert (without.gain_bytes, peaks(without)) == (0, {0: 100, 1: 94})
    assert (with_masks.gain_bytes, peaks(with_masks)) == (31, {0: 100 + 1, 1: 94 + 1})
    assert savings(step, call, set(), {5}, 2)[1].lent_bytes == 31


def test_a_source_is_there_until_what_is_rebuilt_from_it_is() -> None:
    """From when its own operation is done, and beside it while that is made."""
    step, call = step_of(
        (LeanItem(5, 16, 1, 7.0, sources=((1, 48),)), LeanItem(6, 0, 0, 0.0)),
        Piece(0, 10, 120),
        Piece(0, 110, 115, ("block", DIES, 0)),
        Piece(1, 110, 112),
        Piece(1, 62, 70, ("block", GOES, 1)),
        Piece(1, 62, 66, ("block", IS_USED, 0)),
    )
    (found,) = savings(step, call, set(), set(), 1)
    assert found.tops[1] == ((112 - 16, 110 - 16), (70 - 16 + 48, 62 - 16 + 48), (66, 62 + 48))
