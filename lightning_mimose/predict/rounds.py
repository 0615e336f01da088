"""Loops in a step: calls of units that come again and again in one order, and their backward the other way round."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.shapes import NEVER, CallShape
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


def rounds_of(structure: Structure) -> list[list[int]] | None:
    """The calls of every round of a loop, those inside others included; None if there is none.

    The innermost loops come first: rounds around them are alike only if those are folded.

    Args:
        structure: A step's shape.
    """
    return _Tree(structure).rounds()


class _Tree:
    """Which calls are inside which others, and which of them are alike."""

    def __init__(self, structure: Structure) -> None:
        calls = structure.calls
        self.children: dict[int, list[int]] = {-1: []}
        around: list[int] = []
        order = sorted(range(len(calls)), key=lambda i: calls[i].in_time)
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
        for i in reversed(order):
            call = calls[i]
            has = (call.entry >= 0, call.lean >= 0, call.lent >= 0, call.rebuilding >= 0, call.count >= 0)
            inside = tuple(self.kind[child] for child in self.children[i])
            what = (call.unit, call.region, call.backward_time == NEVER, has, tuple(lean.get(i, ())), inside)
            self.kind[i] = kinds.setdefault(what, len(kinds))

    def rounds(self) -> list[list[int]] | None:
        """The calls of every round of a loop, those inside others included; None if there is none.

        The innermost ones come first: rounds around them are alike only if those are folded.
        """
        for parent in sorted(self.children, reverse=True):
            siblings = self.children[parent]
            found = repeated([self.kind[i] for i in siblings])
            if found is not None:
                start, length, count = found
                return [
                    [each for i in siblings[begin : begin + length] for each in self._with_inside(i)]
                    for begin in range(start, start + length * count, length)
                ]
        return None

    def _with_inside(self, call: int) -> list[int]:
        return [call, *(each for child in self.children[call] for each in self._with_inside(child))]


def repeated(kinds: Sequence[int]) -> tuple[int, int, int] | None:
    """Where something is repeated at least three times, how long it is, and how often it is there.

    Example:
        >>> repeated([5, 1, 2, 1, 2, 1, 2, 1, 7])
        (1, 2, 3)
    """
    every = np.array(kinds)
    for length in range(1, min(LONGEST_ROUND, len(every) // FEWEST_ROUNDS) + 1):
        same = every[:-length] == every[length:]
        runs = [(key, len(list(group))) for key, group in groupby(same.tolist())]
        start = 0
        for key, count in runs:
            if key and count >= (FEWEST_ROUNDS - 1) * length:
                return start, length, count // length + 1
            start += count
    return None


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
        marks = sorted((time, number) for number, members in enumerate(rounds) for time in marks_of(calls, members))
        begins = [(number, next(group)[0]) for number, group in groupby(marks, key=lambda mark: mark[1])]
        order, times = [number for number, _ in begins], [time for _, time in begins]
        if order == list(range(count)):
            between: tuple[tuple[int, int], ...] = ((times[1], times[-2]),)
        elif order == [*range(count), *reversed(range(count - 1))]:  # after its forward the last one's backward is next
            between = ((times[1], times[count - 2]), (times[count + 1], times[-1]))
        else:
            return None
        loop, mine = cls(structure, rounds, between), {i for members in rounds for i in members}
        others = (time for i in range(len(calls)) if i not in mine for time in marks_of(calls, [i]))
        if any(map(loop.is_between, others)) or any(calls[i].kept_until for i in mine):
            return None
        return loop

    def is_between(self, time: int) -> bool:
        """Whether something takes place in a round in between."""
        return any(start <= time < end for start, end in self.between)

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
        within = np.array([self.is_between(time) for time in structure.times.tolist()])
        ends = [time for number in (0, -2, -1) for time in marks_of(calls, self.rounds[number])]
        at_ends = np.isin(structure.times, ends)
        outermost = [i for members in self.rounds for i in _outermost(calls, members)]
        saved = values[[calls[i].saved for i in outermost]]
        alive = structure.alive[outermost]
        spared = level - saved @ alive
        pairs = [(each, phase) for each in (level, spared) for phase in (backward, ~backward)]
        if any(
            each[within & phase].max(initial=0) > each[at_ends & phase].max(initial=0) + enough for each, phase in pairs
        ):
            return False
        again, between = np.zeros(len(outermost)), np.zeros(len(outermost), dtype=bool)
        for row, i in enumerate(outermost):
            place = structure.layout.backward_at.get(calls[i].backward_time)
            if place is not None:
                again[row] = values[[calls[i].before_backward, calls[i].working]].sum() + made[place]
                again[row] -= saved @ alive[:, place]
                between[row] = within[place]
        return bool(again[between].max(initial=0) <= again[~between].max(initial=0) + enough)


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
