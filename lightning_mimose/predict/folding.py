"""Loops: a model that calls its blocks as often as a text is long has another shape for every length.

What such steps have in common is a loop's first round, its last two, and that what happens in between grows with their
number. So the rounds in between are folded into one, which saves and computes what they do together. It has no
positions of its own: what is alive rises or falls from round to round, so that it is highest in the first or in the
last ones (of which there are two, for in the last one's backward there are no gradients of the round before). Where a
round in between takes more than these, nothing is folded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.shapes import NEVER, CallShape, LeanShape, LooseShape
from lightning_mimose.predict.structure import Structure

FEWEST_ROUNDS = 3
"""Of a loop that is folded: the first and the last two."""
MOST_LOOPS = 8
"""In a step, those inside others counted every time."""
LONGEST_ROUND = 128
"""Calls of which a round may consist, beside one another."""
ROUNDS = ("first", "between", "last but one", "last")
"""Names of what is left of a loop."""
MARKS = ("in", "out", "backward")
"""What positions of calls are named by."""
MOMENTS, ENDS = ("in_time", "out_time", "backward_time"), ("lent_until", "held_until", "kept_until")
SUMMED = ("saved", "flops", "besides", "seconds")
STATED = ("given", "returned", "entry", "lean", "rebuilding")
OTHERS = ("working", "before_backward", "lent", "count")
"""What is known of calls: times, and columns of what rounds in between are together, and of what each is alone."""
TOLERANCE = 1e-3
"""Share of the step's peak by which a round in between may be above the others."""


class Folded(NamedTuple):
    """A step whose loops are folded.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,).
    """

    structure: Structure
    values: NDArray[np.float64]


def has_loops(structure: Structure) -> bool:
    """Whether a unit is called so often that there may be something to fold."""
    return max(Counter(call.unit for call in structure.calls).values(), default=0) >= FEWEST_ROUNDS


def fold(structure: Structure, values: NDArray[np.float64]) -> Folded | None:
    """Fold the loops of a step; None if it has none, or they cannot be folded.

    Args:
        structure: Its shape.
        values: Shape (columns,).
    """
    if not has_loops(structure):
        return None
    folded: Folded | None = None
    for _ in range(MOST_LOOPS):
        tree = _Tree(structure)
        rounds = tree.loop()
        if rounds is None:
            return folded
        loop = _Loop.of(structure, rounds)
        if loop is None or not loop.is_highest_at_its_ends(values):
            return None
        folded = _Fold(loop, values).result()
        structure, values = folded
    return None


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

    def loop(self) -> list[list[int]] | None:
        """The calls of every round of a loop, those inside others included; None if there is none.

        The innermost ones come first: rounds around them are alike only if those are folded.
        """
        for parent in sorted(self.children, reverse=True):
            siblings = self.children[parent]
            found = _repeated([self.kind[i] for i in siblings])
            if found is not None:
                start, length, count = found
                return [
                    [each for i in siblings[begin : begin + length] for each in self._with_inside(i)]
                    for begin in range(start, start + length * count, length)
                ]
        return None

    def _with_inside(self, call: int) -> list[int]:
        return [call, *(each for child in self.children[call] for each in self._with_inside(child))]


def _repeated(kinds: Sequence[int]) -> tuple[int, int, int] | None:
    """Where something is repeated at least three times, how long it is, and how often it is there.

    Example:
        >>> _repeated([5, 1, 2, 1, 2, 1, 2, 1, 7])
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
class _Loop:
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
    def of(cls, structure: Structure, rounds: list[list[int]]) -> _Loop | None:
        """The loop of some rounds; None unless these take place one after another, and backward the other way round."""
        calls, count = structure.calls, len(rounds)
        marks = sorted((time, number) for number, members in enumerate(rounds) for time in _marks(calls, members))
        begins = [(number, next(group)[0]) for number, group in groupby(marks, key=lambda mark: mark[1])]
        order, times = [number for number, _ in begins], [time for _, time in begins]
        if order == list(range(count)):
            between: tuple[tuple[int, int], ...] = ((times[1], times[-2]),)
        elif order == [*range(count), *reversed(range(count - 1))]:  # after its forward the last one's backward is next
            between = ((times[1], times[count - 2]), (times[count + 1], times[-1]))
        else:
            return None
        loop, mine = cls(structure, rounds, between), {i for members in rounds for i in members}
        others = (time for i in range(len(calls)) if i not in mine for time in _marks(calls, [i]))
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
        ends = [time for number in (0, -2, -1) for time in _marks(calls, self.rounds[number])]
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


def _marks(calls: Sequence[CallShape], members: Iterable[int]) -> list[int]:
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


class _Clock:
    """Times of what is left, as if there was one round in between, and none of what it is like.

    Of moments that are not left only the order counts: there are two steps between two that did not follow each other.
    """

    def __init__(self, left: Iterable[int], between: Iterable[tuple[int, int]]) -> None:
        """What is left, and of each moment in between before which of those it is, and in what order."""
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


class _Fold:
    """Folds one loop.

    Args:
        loop: The loop.
        values: Shape (columns,).
    """

    def __init__(self, loop: _Loop, values: NDArray[np.float64]) -> None:
        self._loop, self._structure, self._old = loop, loop.structure, values
        self._values: list[float] = []
        self._columns: dict[int, int] = {}
        calls, self._rounds = self._structure.calls, loop.rounds
        self._like = self._rounds[-2]
        """The calls that those of the round in between are like."""
        self._middle = {i: member for members in self._rounds[1:-2] for member, i in enumerate(members)}
        left = [i for i in range(len(calls)) if i not in self._middle]
        self._index = {i: new for new, i in enumerate(left)}
        """Call -> its index, or that of the one which stands for it."""
        self._index |= {i: len(left) + member for i, member in self._middle.items()}
        self._places = [p for p, position in enumerate(self._structure.positions) if not loop.is_between(position.time)]
        moments = [*(self._structure.positions[p].time for p in self._places), *_marks(calls, left)]
        self._clock = _Clock(moments, map(self._place, _marks(calls, self._like)))

    def _place(self, time: int) -> tuple[int, int]:
        """Where something takes place in the round in between: before a moment that is left, and in what order.

        Args:
            time: When it does in the last round but one.
        """
        (_, forward), *_, (_, last) = (*self._loop.between, self._loop.between[-1])
        return forward if time < self._structure.calls[self._rounds[-1][0]].in_time else last, time

    def result(self) -> Folded:
        """The step with this loop folded."""
        structure, names = self._structure, self._names()
        calls = [self._kept(call, names[i]) for i, call in enumerate(structure.calls) if i not in self._middle]
        calls += [self._between(member) for member in range(len(self._like))]
        labels = {
            f"{mark} {call.key}": f"{mark} {names[i]}" for i, call in enumerate(structure.calls) for mark in MARKS
        }
        positions = tuple(
            replace(
                position,
                label=labels.get(position.label, position.label),
                time=self._clock.of(position.time),
                column=self._column(position.column),
                entry=self._column(position.entry),
            )
            for position in (structure.positions[p] for p in self._places)
        )
        loose, number = self._loose(calls)
        found = replace(
            structure,
            calls=tuple(calls),
            positions=positions,
            loose=loose,
            lean=tuple(self._lean(number)),
            batch=self._column(structure.batch),
            handing=(),  # of units that are called several times nothing is handed on
        )
        return Folded(replace(found, columns=len(self._values)), np.array(self._values))

    def _names(self) -> dict[int, str]:
        """Call -> its key: in a step of more rounds the last one's is the same."""
        calls, names, looped = self._structure.calls, dict[int, str](), set[str]()
        for name, members in zip(ROUNDS, (self._rounds[0], (), *self._rounds[-2:]), strict=True):
            ranks = Counter[str]()
            for i in members:
                unit = calls[i].unit
                names[i] = _key(unit, name, ranks[unit])
                ranks[unit] += 1
                looped.add(unit)
        beside = Counter[str]()
        for i, call in enumerate(calls):
            if i not in names:
                names[i] = _key(call.unit, "beside", beside[call.unit]) if call.unit in looped else call.key
                beside[call.unit] += i not in self._middle
        return names

    def _column(self, old: int) -> int:
        """The index of a column that is left."""
        if old < 0:
            return old
        if old not in self._columns:
            self._columns[old] = self._new(float(self._old[old]))
        return self._columns[old]

    def _new(self, value: float) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _sum(self, columns: Sequence[int]) -> int:
        """A column of what several are together; -1 where there is none."""
        return self._new(float(self._old[list(columns)].sum()))

    def _kept(self, call: CallShape, key: str) -> CallShape:
        found: dict[str, Any] = {name: self._clock.of(getattr(call, name)) for name in (*MOMENTS, *ENDS)}
        found |= {name: self._column(getattr(call, name)) for name in (*SUMMED, *STATED, *OTHERS)}
        return replace(call, key=key, **found)

    def _between(self, member: int) -> CallShape:
        """The call that stands for those of all rounds in between."""
        calls, clock = self._structure.calls, self._clock
        like, first = calls[self._like[member]], calls[self._rounds[0][member]]
        all_of = [calls[members[member]] for members in self._rounds[1:-2]]
        ranks = Counter(calls[i].unit for i in self._like[:member])
        found: dict[str, Any] = {
            name: NEVER if getattr(like, name) == NEVER else clock.between(self._place(getattr(like, name)))
            for name in MOMENTS
        }
        found |= {name: self._sum([getattr(call, name) for call in all_of]) for name in SUMMED}
        found |= {name: -1 if getattr(like, name) < 0 else self._copy(getattr(like, name)) for name in STATED}
        held = found["backward_time"] if like.held_until >= 0 else -1
        return replace(
            like,
            key=_key(like.unit, ROUNDS[1], ranks[like.unit]),
            **found,
            working=self._new(0.0),  # it never runs again at a moment that is left
            before_backward=self._copy(first.before_backward),
            lent=-1 if like.lent < 0 else self._sum([call.lent for call in all_of]),
            count=self._new(sum(1.0 if call.count < 0 else float(self._old[call.count]) for call in all_of)),
            lent_until=max((clock.of(call.lent_until) for call in all_of), default=0),
            held_until=max((held, *(clock.of(call.held_until) for call in all_of))),
        )

    def _copy(self, old: int) -> int:
        """A column of its own that is as another one."""
        return self._new(float(self._old[old]))

    def _lean(self, number: Mapping[int, int]) -> Iterator[LeanShape]:
        """What lean saves change.

        Args:
            number: Loose storage -> its index, or that of what it is a part of.
        """
        position_of = {p: new for new, p in enumerate(self._places)}
        of_call: dict[tuple[int, str], list[LeanShape]] = {}
        for shape in self._structure.lean:
            if shape.call in self._middle:
                of_call.setdefault((self._middle[shape.call], shape.action), []).append(shape)
                continue
            yield replace(
                shape,
                call=self._index[shape.call],
                saved=self._column(shape.saved),
                work=self._column(shape.work),
                lent=self._column(shape.lent),
                positions=tuple(
                    (position_of[p], self._column(column)) for p, column in shape.positions if p in position_of
                ),
                borrowed=tuple(sorted({number[i] for i in shape.borrowed})),
            )
        member_of = {i: member for member, i in enumerate(self._like)}
        first = len(self._structure.calls) - len(self._middle)
        for shape in self._structure.lean:
            if shape.call in member_of:
                all_of = of_call.get((member_of[shape.call], shape.action), [])
                yield LeanShape(
                    call=first + member_of[shape.call],
                    action=shape.action,
                    saved=self._sum([each.saved for each in all_of]),
                    work=self._sum([each.work for each in all_of]),
                    positions=(),
                    items=sum(each.items for each in all_of),
                    lent=-1 if shape.lent < 0 else self._sum([each.lent for each in all_of]),
                    borrowed=tuple(sorted({number[i] for each in all_of for i in each.borrowed})),
                )

    def _loose(self, calls: Sequence[CallShape]) -> tuple[tuple[LooseShape, ...], dict[int, int]]:
        """Loose storages, and where each is found.

        What only calls of rounds in between hold is one with what others of them do; where there are no such rounds, it
        is nothing, and known from the last round but one.
        """
        found: list[LooseShape] = []
        number: dict[int, int] = {}
        alone: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        member_of = self._middle or {i: member for member, i in enumerate(self._like)}
        for i, each in enumerate(self._structure.loose):
            if member_of.keys() >= set(each.holders):
                members = tuple(sorted({member_of[holder] for holder in each.holders}))
                alone.setdefault((members, each.was_held), []).append(i)
            if not self._middle.keys() >= set(each.holders):
                number[i] = len(found)
                found.append(self._held_by_others(each, calls))
        first = len(calls) - len(self._like)
        for (members, was_held), all_of in sorted(alone.items()):
            parts = [self._moved(self._structure.loose[i]) for i in all_of]
            if self._middle:
                number |= dict.fromkeys(all_of, len(found))
            else:
                parts = [replace(p, since_time=p.since_time and min(p.since_time, 1), lasts_until=NEVER) for p in parts]
            together = reduce(LooseShape.with_holds_of, parts)
            found.append(
                replace(
                    together,
                    size=self._sum([self._structure.loose[i].size for i in all_of] if self._middle else []),
                    holders=tuple(first + member for member in members),
                    until_time=1 if was_held else -1,
                    ending=self._new(0.0),
                    given=(),
                    alike=0,
                )
            )
        return tuple(found), number

    def _held_by_others(self, loose: LooseShape, calls: Sequence[CallShape]) -> LooseShape:
        """A loose storage that is not that of rounds in between alone.

        Args:
            loose: The storage.
            calls: The calls that are left.
        """
        first, held = len(calls) - len(self._like), set(loose.holders)
        holders = {self._index[i] for i in held}
        for member, each in enumerate(zip(self._rounds[0], *self._rounds[-2:], strict=True)):
            if held.issuperset(each):
                holders.add(first + member)
        is_whole = max(holders) < first
        return replace(
            self._moved(loose),
            size=self._column(loose.size),
            ending=self._column(loose.ending),
            holders=tuple(sorted(holders, key=lambda i: -calls[i].backward_time)),
            until_time=1 if loose.was_held else -1,
            given=tuple(self._index[i] for i in loose.given) if is_whole else (),
            alike=loose.alike if is_whole else 0,
        )

    def _moved(self, loose: LooseShape) -> LooseShape:
        since = None if loose.since_time is None else self._clock.of(loose.since_time)
        return replace(loose, since_time=since, lasts_until=self._clock.of(loose.lasts_until))


def _key(unit: str, name: str, rank: int) -> str:
    return f"{unit}#{name} {rank + 1}" if rank else f"{unit}#{name}"
