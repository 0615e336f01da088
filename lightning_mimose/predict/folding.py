"""Loops: a model that calls its blocks as often as a text is long has another shape for every length.

What such steps have in common is a loop's first round, its last two, and that what happens in between grows with their
number. So the rounds in between are folded into one, which saves and computes what they do together. It has no
positions of its own: what is alive rises or falls from round to round, so that it is highest in the first or in the
last ones (of which there are two, for in the last one's backward there are no gradients of the round before). Where a
round in between takes more than these, nothing is folded. Of loops inside of loops the inner ones come first, all at
once: then the rounds around them are alike, of however many calls each was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.columns import Columns, Keys
from lightning_mimose.predict.handing import HandingShape
from lightning_mimose.predict.maxima import NOT_KNOWN, Maxima
from lightning_mimose.predict.rounds import Clock, Loop, has_loops, marks_of, rounds_of
from lightning_mimose.predict.shapes import END_OF, NEVER, CallShape, LateShape, LeanShape, LooseShape, result_at
from lightning_mimose.predict.structure import Structure

MOST_DEPTHS = 8
"""Times that loops are folded in a step: all that are in no other one, with rounds of one length; then the next."""
MARKS = ("in", "out", "backward")
"""What positions of calls are named by."""
MOMENTS, ENDS = ("in_time", "out_time", "backward_time"), ("lent_until", "held_until", "kept_until")
SUMMED = ("saved", "flops", "besides", "tensors")
STATED = ("given", "returned", "entry", "lean", "rebuilding", "places", "comparing")
OTHERS = ("working", "before_backward", "lent", "count")
"""What is known of calls: times, and columns of what rounds in between are together, and of what each is alone."""


class Folded(NamedTuple):
    """A step whose loops are folded.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,).
        maxima: What columns of moments that are left are the largest of.
    """

    structure: Structure
    values: NDArray[np.float64]
    maxima: Maxima = NOT_KNOWN


def fold(structure: Structure, values: NDArray[np.float64], maxima: Maxima = NOT_KNOWN) -> Folded | None:
    """Fold the loops of a step; None if it has none, or they cannot be folded.

    Args:
        structure: Its shape.
        values: Shape (columns,).
        maxima: What some of them are the largest of, if that is known.
    """
    if not has_loops(structure):
        return None
    folded: Folded | None = None
    for _ in range(MOST_DEPTHS):
        loops = []
        for rounds in rounds_of(structure):
            loop = Loop.of(structure, rounds)
            if loop is None or not loop.is_highest_at_its_ends(values):
                return None
            loops.append(loop)
        if not loops:
            return folded
        folded = _Fold(loops, values, maxima).result()
        structure, values, maxima = folded
    return None


class _Fold(Columns):
    """Folds loops of which none is inside another one.

    Args:
        loops: The loops.
        values: Shape (columns,).
        maxima: What some of them are the largest of.
    """

    def __init__(self, loops: Sequence[Loop], values: NDArray[np.float64], maxima: Maxima) -> None:
        super().__init__(values)
        self._maxima = maxima
        self._structure = loops[0].structure
        calls = self._structure.calls
        self._first, self._like, self._last = (
            [i for loop in loops for i in loop.rounds[number]] for number in (0, -2, -1)
        )
        """The calls of first rounds, of last ones but one (which those of the rounds in between are like), of last."""
        self._loops = [loop for loop in loops for _ in loop.rounds[0]]
        self._passes = [loop.passes(k) for loop in loops for k in range(len(loop.rounds[0]))]
        self._all_of = [[i[k] for i in loop.rounds[1:-2]] for loop in loops for k in range(len(loop.rounds[0]))]
        """Of every member of the rounds: its loop, see `Loop.passes`, and the calls of which one is left."""
        self._middle = {i: member for member, all_of in enumerate(self._all_of) for i in all_of}
        self._keys = Keys(calls, (self._first, self._like, self._last), self._middle)
        left = [i for i in range(len(calls)) if i not in self._middle]
        self._index = {i: new for new, i in enumerate(left)}
        """Call -> its index, or that of the one which stands for it."""
        self._index |= {i: len(left) + member for i, member in self._middle.items()}
        times = self._structure.times
        gone = np.any([loop.are_between(times) for loop in loops], axis=0)
        self._places: list[int] = np.flatnonzero(~gone).tolist()
        self._position_of = {p: new for new, p in enumerate(self._places)}
        moments = [*times[~gone].tolist(), *marks_of(calls, left)]
        places = (self._place(member, time) for member, i in enumerate(self._like) for time in marks_of(calls, [i]))
        self._clock = Clock(moments, places)

    def _place(self, member: int, time: int) -> tuple[int, int]:
        """Where something takes place in a round in between: before a moment that is left, and in what order.

        Args:
            member: Of which call.
            time: When it does in the last round but one.
        """
        loop = self._loops[member]
        (_, forward), *_, (_, last) = (*loop.between, loop.between[-1])
        return forward if time < self._structure.calls[loop.rounds[-1][0]].in_time else last, time

    def result(self) -> Folded:
        """The step with this loop folded."""
        structure, names = self._structure, self._keys.of_calls()
        calls = [self._kept(call, names[i]) for i, call in enumerate(structure.calls) if i not in self._middle]
        calls += [self._between(member) for member in range(len(self._like))]
        labels = {
            f"{mark} {call.key}": f"{mark} {names[i]}" for i, call in enumerate(structure.calls) for mark in MARKS
        }
        for i, call in enumerate(structure.calls):
            labels[f"{call.key} dropped step"] = f"{names[i]} dropped step"
        labels |= {f"{END_OF} {result_at(old)}": f"{END_OF} {result_at(new)}" for old, new in labels.items()}
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
            handing=tuple(map(self._handing, structure.handing)),
        )
        maxima = self._maxima.renamed(self._columns)
        return Folded(replace(found, columns=len(self._values)), np.array(self._values), maxima)

    def _kept(self, call: CallShape, key: str) -> CallShape:
        found: dict[str, Any] = {name: self._clock.of(getattr(call, name)) for name in (*MOMENTS, *ENDS)}
        found |= {name: self._column(getattr(call, name)) for name in (*SUMMED, *STATED, *OTHERS)}
        clock = self._clock
        late = (
            LateShape(self._column(each.size), clock.of(each.since_time), clock.of(each.until_time))
            for each in call.late
        )
        return replace(call, key=key, **found, again=tuple(self._left_of(call.again)), late=tuple(late))

    def _left_of(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Positions, with a column each, of which some are left."""
        return ((self._position_of[p], self._column(column)) for p, column in pairs if p in self._position_of)

    def _between(self, member: int) -> CallShape:
        """The call that stands for those of all rounds in between."""
        calls, clock = self._structure.calls, self._clock
        like, first = calls[self._like[member]], calls[self._first[member]]
        all_of = [calls[i] for i in self._all_of[member]]
        found: dict[str, Any] = {
            name: NEVER if getattr(like, name) == NEVER else clock.between(self._place(member, getattr(like, name)))
            for name in MOMENTS
        }
        found |= {name: self._sum([getattr(call, name) for call in all_of]) for name in SUMMED}
        kept = [call.kept_until for call in all_of]
        if self._passes[member]:  # one after another is gone, so that only the last one is there later
            found["saved"], kept = self._copy(all_of[-1].saved), kept[-1:]
        found |= {name: -1 if getattr(like, name) < 0 else self._copy(getattr(like, name)) for name in STATED}
        held = found["backward_time"] if like.held_until >= 0 else -1
        return replace(
            like,
            key=self._keys.between[member],
            **found,
            again=(),
            working=self._new(0.0),  # it never runs again at a moment that is left
            before_backward=self._copy(first.before_backward),
            lent=-1 if like.lent < 0 else self._sum([call.lent for call in all_of]),
            count=self._new(sum(1.0 if call.count < 0 else float(self._old[call.count]) for call in all_of)),
            late=(),  # with each round's result at another moment
            lent_until=max((clock.of(call.lent_until) for call in all_of), default=0),
            kept_until=clock.of(min(kept, default=0)),
            held_until=max((held, *(clock.of(call.held_until) for call in all_of))),
        )

    def _handing(self, handing: HandingShape) -> HandingShape:
        """What is handed on elsewhere: units that are called several times hand on nothing."""
        return replace(
            handing,
            call=self._index[handing.call],
            taker=self._index[handing.taker],
            size=self._column(handing.size),
            work=self._column(handing.work),
            temporary=self._column(handing.temporary),
            also=tuple(map(self._column, handing.also)),
            since_time=self._clock.of(handing.since_time),
        )

    def _lean(self, number: Mapping[int, int]) -> Iterator[LeanShape]:
        """What lean saves change.

        Args:
            number: Loose storage -> its index, or that of what it is a part of.
        """
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
                working=self._column(shape.working),
                positions=tuple(self._left_of(shape.positions)),
                again=tuple(self._left_of(shape.again)),
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
        member_of = {i: member for member, i in enumerate(self._like) if not self._all_of[member]} | self._middle
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
            is_there = self._middle.keys() >= set(self._structure.loose[all_of[0]].holders)
            if is_there:
                number |= dict.fromkeys(all_of, len(found))
            else:
                parts = [replace(p, since_time=p.since_time and min(p.since_time, 1), lasts_until=NEVER) for p in parts]
            together = reduce(LooseShape.with_holds_of, parts)
            found.append(
                replace(
                    together,
                    size=self._sum([self._structure.loose[i].size for i in all_of] if is_there else []),
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
        for member, each in enumerate(zip(self._first, self._like, self._last, strict=True)):
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
