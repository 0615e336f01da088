"""What is counted once, though a call saves it and somebody else holds it."""

from __future__ import annotations

from dataclasses import replace

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.interval import Interval
from lightning_mimose.measure.lent import Lent, SavedBy, lent, peaks_beside, pieces_beside
from lightning_mimose.measure.trace import IS_GONE, Mark, Piece, StepTrace
from lightning_mimose.predict.shapes import END_OF

MARKS = tuple(Mark("step", f"{i}", 0, 0) for i in range(3))


def trace(pieces: tuple[Piece, ...]) -> StepTrace:
    """Three intervals, cut."""
    peaks = [max(piece.peak_bytes for piece in pieces if piece.mark == mark) for mark in range(3)]
    return StepTrace((), MARKS, tuple(Interval(0, peak) for peak in peaks), pieces=pieces)


def returning() -> Call:
    """A region that returned storages 1 and 2, of which its recomputation saved the second, as 12."""
    return Call("block", 0, None, "recompute", returned=[1, 2], outputs=[11, 12], gone={2: 1}, saved={12: 50, 13: 7})


def test_what_a_call_returned_is_lent_until_it_is_gone() -> None:
    """To the moment within its last interval, if that is known, and else to the start of it."""
    saved = SavedBy(57, {12: 50, 13: 7}, {12: 50, 13: 7}, set())
    gone = ("block", IS_GONE, 2)
    cut = trace((Piece(0, 0, 80), Piece(1, 60, 90), Piece(1, 20, 70, gone), Piece(2, 20, 60)))
    assert lent(cut, returning(), saved) == Lent(True, 50, 2, frozenset({12}), ((gone, 50),))
    whole = trace((Piece(0, 0, 80), Piece(1, 60, 90), Piece(2, 20, 60)))
    assert lent(whole, returning(), saved) == Lent(True, 50, 1, frozenset({12}))


def test_each_of_several_results_is_lent_until_it_is_gone() -> None:
    """Of those that end in one interval; of others only those that end last, which is where steps are highest."""
    saved = SavedBy(57, {12: 50, 13: 7}, {12: 50, 13: 7}, set())
    both = Call("block", 0, None, "recompute", returned=[2, 3], outputs=[12, 13], gone={2: 1, 3: 1})
    first, second = ("block", IS_GONE, 3), ("block", IS_GONE, 2)
    cut = trace((Piece(0, 0, 80), Piece(1, 60, 90), Piece(1, 60, 70, first), Piece(1, 53, 60, second), Piece(2, 3, 60)))
    assert lent(cut, both, saved) == Lent(True, 57, 2, frozenset({12, 13}), ((first, 7), (second, 50)))
    apart = replace(both, gone={2: 1, 3: 2})
    whole = trace((Piece(0, 0, 80), Piece(1, 60, 90), Piece(2, 20, 60)))
    assert lent(whole, apart, saved) == Lent(True, 7, 2, frozenset({13}))
    told = replace(whole, marks=(*MARKS[:2], Mark("a result", END_OF, 0, 0)))
    assert lent(told, apart, saved) == Lent(True, 57, 1, frozenset({12, 13}))


def test_what_goes_when_an_interval_begins_is_lent_until_then() -> None:
    """Whatever else of the call goes within it: that is counted as spared too early, and not too late."""
    ended = replace(trace((Piece(0, 0, 80), Piece(1, 20, 70), Piece(2, 20, 60))), ended={1: 2})
    saved = SavedBy(57, {12: 50, 13: 7}, {12: 50, 13: 7}, set())
    assert lent(ended, returning(), saved) == Lent(True, 50, 1, frozenset({12}))
    both = Call("block", 0, None, "recompute", returned=[2, 3], outputs=[12, 13], gone={2: 1, 3: 1})
    cut = (Piece(0, 0, 80), Piece(1, 20, 70), Piece(1, 20, 60, ("block", IS_GONE, 3)), Piece(2, 20, 60))
    found = lent(replace(trace(cut), ended={1: 2}), both, saved)
    assert found == Lent(True, 57, 1, frozenset({12, 13}))
    inner = Call("block.part", 0, both, "keep", returned=[2], outputs=[12], gone={2: 1})
    assert lent(ended, inner, saved).until == 1
    another = replace(ended, ended={1: 9})
    assert lent(another, inner, saved).until == 2


def test_what_somebody_else_holds_until_backward_is_not_lent() -> None:
    """It is no part of what the call alone saves; that there can be such a thing is part of the step's shape."""
    step = trace((Piece(0, 0, 80), Piece(1, 60, 90), Piece(2, 20, 60)))
    held = SavedBy(7, {13: 7}, {12: 50, 13: 7}, {12})
    assert lent(step, returning(), held)[:2] == (True, 0)


def beside(step: StepTrace, lends: list[Lent]) -> dict[int, int]:
    """The peaks of the intervals in which they end."""
    return peaks_beside(step, lends, pieces_beside(step, lends))


def test_what_two_calls_lent_ends_in_one_interval() -> None:
    """Its peak counts as if both were there to its end, so that both can be taken off it."""
    one, other = ("a", IS_GONE, 1), ("b", IS_GONE, 2)
    pieces = (Piece(0, 0, 80), Piece(1, 60, 100), Piece(1, 60, 70, one), Piece(1, 60, 65, other), Piece(2, 20, 60))
    lends = [Lent(True, 20, 2, frozenset({1}), ((one, 20),)), Lent(True, 30, 2, frozenset({2}), ((other, 30),))]
    assert beside(trace(pieces), lends) == {1: max(100, 70 + 20, 65 + 20 + 30)}
    assert beside(trace(pieces), []) == {}


def test_what_is_told_right_before_it_goes_is_not_there_twice() -> None:
    """The piece that its end opens begins with it; what is reached in that piece afterwards is without it."""
    one = ("a", IS_GONE, 1)
    lends = [Lent(True, 30, 2, frozenset({1}), ((one, 30),))]
    seen = (Piece(0, 0, 80), Piece(1, 60, 60), Piece(1, 60, 60, one, rest_bytes=45), Piece(2, 20, 60))
    assert beside(trace(seen), lends) == {1: 45 + 30}
    unseen = (Piece(0, 0, 80), Piece(1, 60, 60), Piece(1, 60, 60, one), Piece(2, 30, 60))
    assert beside(trace(unseen), lends) == {1: 60}
