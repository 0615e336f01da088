"""Loops in a step: calls of units that come again and again in one order, and their backward the other way round."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.shapes import END_OF, NEVER, CallShape
from lightning_mimose.predict.structure import Structure

FEWEST_ROUNDS = 3
"""Of a loop that is folded: the first and the last two."""
LONGEST_ROUND = 128
"""Calls of which a round may consist, beside one another."""
TOLERANCE = 1e-3
"""Share of the step's peak by which a round in between may be above the others."""


def has_loops(structure: Structure) -> bool:
    """Whether a unit is called so often that there may be something to fold."""
    return max(Counter(call.unit for call in structure.calls).values(), default=0) >= FEWEST_ROUNDS


def rounds_of(structure: Structure) -> list[list[list[int]]]:
    """Of every loop that has none inside it: the calls of its rounds, those inside others included.

    Rounds around such loops are alike only once these are folded, each of which may be of another length.

    Args:
        structure: A step's shape.
    """
    return _Tree(structure).loops()


class _Tree:
    """Which calls are inside which others, and which of them are alike."""

    def __init__(self, structure: Structure) -> None:
        calls = structure.calls
        self.children: dict[int, list[int]] = {-1: []}
        around: list[int] = []
        order = self.order = sorted(range(len(calls)), key=lambda i: calls[i].in_time)
        for i in order:
            while around and calls[around[-1]].out_time < calls[i].in_time:
                around.pop()
            self.children.setdefault(around[-1] if around else -1, []).append(i)
            self.children.setdefault(i, [])
            around.append(i)
        lean: dict[int, list[str]] = {}
        for shape in structure.lean:
            lean.setdefault(shape.call, []).append(shape.action)
        kinds: dict[object, int] = {}
        self.kind: dict[int, int] = {}
        self.folded: set[int] = set()
        """Kinds of calls that stand for many."""
        for i in reversed(order):
            call = calls[i]
            has = (
                call.entry >= 0,
                call.lean >= 0,
                call.lent >= 0,
                len(call.late),
                call.rebuilding >= 0,
                call.count >= 0,
            )
            inside = tuple(self.kind[child] for child in self.children[i])
            what = (call.unit, call.region, call.backward_time == NEVER, has, tuple(lean.get(i, ())), inside)
            self.kind[i] = kinds.setdefault(what, len(kinds))
            if call.count >= 0:
                self.folded.add(self.kind[i])

    def loops(self) -> list[list[list[int]]]:
        """See `rounds_of`."""
        found: list[list[list[int]]] = []
        having: set[int] = set()
        """Calls with loops inside: what is around these has to wait."""
        for parent in (*reversed(self.order), -1):
            siblings = self.children[parent]
            kinds = [-1 - i if i in having else self.kind[i] for i in siblings]
            inside = repeats(kinds, self.folded)
            for start, length, count in inside:
                found.append(
                    [
                        [each for i in siblings[begin : begin + length] for each in self._with_inside(i)]
                        for begin in range(start, start + length * count, length)
                    ]
                )
            if inside or having.intersection(siblings):
                having.add(parent)
        return found

    def _with_inside(self, call: int) -> list[int]:
        return [call, *(each for child in self.children[call] for each in self._with_inside(child))]


def repeats(kinds: Sequence[int], folded: Collection[int] = ()) -> list[tuple[int, int, int]]:
    """Where something is repeated at least three times, how long it is, and how often it is there: the shortest.

    Args:
        kinds: A kind for each of several calls beside one another.
        folded: Kinds of which calls stand for many. Several of them are not a loop: they stand for one in which the
            loop's rounds are told apart already.

    Example:
        >>> repeats([5, 1, 2, 1, 2, 1, 2, 1, 7, 1, 2, 1, 2, 1, 2, 1, 2])
        [(1, 2, 3), (9, 2, 4)]
    """
    every = np.array(kinds)
    for length in range(1, min(LONGEST_ROUND, len(every) // FEWEST_ROUNDS) + 1):
        same = np.zeros(len(every) - length + 2, dtype=np.int8)
        same[1:-1] = every[:-length] == every[length:]
        edges = np.flatnonzero(np.diff(same)).reshape(-1, 2)
        long = edges[edges[:, 1] - edges[:, 0] >= (FEWEST_ROUNDS - 1) * length].tolist()
        found = [(start, length, (end - start) // length + 1) for start, end in long]
        found = [each for each in found if not set(kinds[each[0] : each[0] + length]).issubset(folded)]
        if found:
            return found
    return []


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop in a step.

    Attributes:
        structure: The step's shape.
        rounds: Calls of every round.
        between: Times from which on, and before which, the rounds in between take place; in backward apart from that in
            forward, if it is.
    """

    structure: Structure
    rounds: list[list[int]]
    between: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, structure: Structure, rounds: list[list[int]]) -> Loop | None:
        """The loop of some rounds; None unless these take place one after another, and backward the other way round."""
        calls, count = structure.calls, len(rounds)
        marks, owners = structure.layout.marks
        round_of = np.full(len(calls), -1)
        for number, members in enumerate(rounds):
            round_of[members] = number
        numbers = round_of[owners]
        mine = numbers >= 0
        begins = np.flatnonzero(np.diff(numbers[mine], prepend=-1))
        order, times = numbers[mine][begins].tolist(), marks[mine][begins].tolist()
        if order == list(range(count)):
            between: tuple[tuple[int, int], ...] = ((times[1], times[-2]),)
        elif order == [*range(count), *reversed(range(count - 1))]:  # after its forward the last one's backward is next
            between = ((times[1], times[count - 2]), (times[count + 1], times[-1]))
        else:
            return None
        loop = cls(structure, rounds, between)
        return None if loop.are_between(marks[~mine]).any() or not loop.lets_go() else loop

    def lets_go(self) -> bool:
        """Whether what calls without a backward save is gone before the last rounds, or only when all are over.

        That of the round before these may stay until its results are replaced by theirs.
        """
        for member in range(len(self.rounds[0])):
            kept = [self.structure.calls[members[member]].kept_until for members in self.rounds]
            early = len(kept) > FEWEST_ROUNDS and max(kept[:-3]) <= self.between[0][1]
            if self.passes(member) and not early:
                return False
        return True

    def passes(self, member: int) -> bool:
        """Whether what some call of the rounds saves is gone without a backward before all of them are over."""
        calls = self.structure.calls
        kept = [calls[members[member]].kept_until for members in self.rounds]
        return any(kept) and min(kept) <= max(marks_of(calls, self.rounds[-1]))

    def are_between(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether what takes place at some times does so in a round in between."""
        found = np.zeros(len(times), dtype=np.bool_)
        for start, end in self.between:
            found |= (start <= times) & (times < end)
        return found

    def is_highest_at_its_ends(self, values: NDArray[np.float64]) -> bool:
        """Whether no round in between takes more than the first and the last ones, kept or recomputed.

        Args:
            values: Shape (columns,).
        """
        structure, calls = self.structure, self.structure.calls
        column, entry, backward, made = structure.arrays
        padded = np.append(values, 0)
        level = padded[column] + padded[entry] + made
        enough = TOLERANCE * level.max()
        within = self.are_between(structure.times)
        ends = [time for number in (0, -2, -1) for time in marks_of(calls, self.rounds[number])]
        marks = structure.layout.marks[0]
        before = marks[np.maximum(np.searchsorted(marks, structure.times, side="right") - 1, 0)]
        # Positions at which results end are of the round whose mark is the last one before them.
        results = np.array([position.label.startswith(END_OF) for position in structure.positions])
        at_ends = np.isin(np.where(results, before, structure.times), ends)
        outermost = [calls[i] for members in self.rounds for i in _outermost(calls, members)]
        saved = self._saved(outermost, values)
        pairs = [(each, phase) for each in (level, level - saved) for phase in (backward, ~backward)]
        if any(
            each[within & phase].max(initial=0) > each[at_ends & phase].max(initial=0) + enough for each, phase in pairs
        ):
            return False
        again, between = np.zeros(len(outermost)), np.zeros(len(outermost), dtype=bool)
        for row, call in enumerate(outermost):
            place = structure.layout.backward_at.get(call.backward_time)
            if place is not None:
                again[row] = values[call.before_backward] + values[call.working] + made[place] - saved[place]
                between[row] = within[place]
        return bool(again[between].max(initial=0) <= again[~between].max(initial=0) + enough)

    def _saved(self, members: Sequence[CallShape], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What some calls save together, shape (positions,): a table of calls by positions takes long to make."""
        times = self.structure.times
        order = np.argsort(times, kind="stable")
        saved, change = values[[call.saved for call in members]], np.zeros(len(times) + 1)
        out, end = ([getattr(call, name) for call in members] for name in ("out_time", "end_time"))
        np.add.at(change, np.searchsorted(times[order], out), saved)
        np.subtract.at(change, np.searchsorted(times[order], np.maximum(out, end)), saved)
        found = np.empty(len(times))
        found[order] = np.cumsum(change[:-1])
        return found


def marks_of(calls: Sequence[CallShape], members: Iterable[int]) -> list[int]:
    """When calls begin and end, and when their backward begins."""
    times = (time for i in members for time in (calls[i].in_time, calls[i].out_time, calls[i].backward_time))
    return [time for time in times if time != NEVER]


def _outermost(calls: Sequence[CallShape], members: Iterable[int]) -> list[int]:
    """Those of a round's calls, in order of their beginning, that are inside no other one."""
    found: list[int] = []
    for i in members:
        if not found or calls[found[-1]].out_time < calls[i].in_time:
            found.append(i)
    return found


class Clock:
    """Times of what is left, as if there was one round in between, and none of what it is like.

    Of moments that are not left only the order counts: two moments between which some were are three apart.

    Args:
        left: Moments that are left.
        between: Of each moment in between before which of those it is, and in what order.
    """

    def __init__(self, left: Iterable[int], between: Iterable[tuple[int, int]]) -> None:
        self._before = {place: (place[0] - 0.5, place[1]) for place in between}
        moments: list[tuple[float, int]] = sorted({*((float(time), 0) for time in left), *self._before.values()})
        self._new: dict[tuple[float, int], int] = {}
        now = 0
        for last, moment in zip([moments[0], *moments], moments, strict=False):
            now += 0 if moment == last else 1 if moment == (last[0] + 1, 0) and last[1] == 0 else 3
            self._new[moment] = now
        self._left = [int(time) for time, _ in moments if time == int(time)]

    def of(self, time: int) -> int:
        """What a time is."""
        if not 0 < time < NEVER:
            return time
        before = self._left[bisect_right(self._left, time) - 1]
        return self._new[float(before), 0] + min(2, time - before)

    def between(self, place: tuple[int, int]) -> int:
        """What a time in the round in between is."""
        return self._new[self._before[place]]
