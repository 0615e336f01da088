"""From the shape of a step and its numbers to a timeline: what is alive at every position, and what each option does.

One method for each action says where choosing it lowers the live bytes, and what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import GRADE_INSIDE, GRADES, OFFLOAD, RECOMPUTE, RECOMPUTE_LEAN, SPLIT
from lightning_mimose.predict.comparing import Comparing
from lightning_mimose.predict.layout import Handed
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.rows import Rows
from lightning_mimose.predict.shapes import NEVER, CallShape, Resident
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Timeline

HOOK_SECONDS = 5e-4
"""What hooks on all that one call saves cost, besides what they do."""


@dataclass(frozen=True)
class Link:
    """The way from the device to host memory.

    Attributes:
        bytes_per_second: What goes over it, in either direction.
        host_bytes: What the host has room for.
        frees: Whether moving something frees memory that the budget counts; not where the host is the device.
    """

    bytes_per_second: float
    host_bytes: int
    frees: bool


@dataclass(frozen=True, eq=False)
class Extras:
    """What may be planned besides recomputation and lean saves.

    Attributes:
        link: For offloading; None if it is not asked for.
        smaller: Number of chunks -> the columns of a batch that is smaller by it, for splitting.
    """

    link: Link | None = None
    smaller: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)


def assemble(
    structure: Structure,
    values: NDArray[np.float64],
    resident: Resident,
    *,
    rates: Rates,
    minimum_share: float,
    left_out: frozenset[str] = frozenset(),
    extras: Extras | None = None,
    handed_on: Mapping[str, int] = MappingProxyType({}),
    comparing: Comparing = MappingProxyType({}),
) -> Timeline:
    """Assemble the timeline of one step.

    Args:
        structure: Its shape.
        values: Shape (columns,); the fitted columns for this step's size.
        resident: What is alive besides activations.
        rates: What the parts of actions cost.
        minimum_share: Units that save less than this share of the activation peak are left alone.
        left_out: Units that must not be recomputed.
        extras: What else may be planned.
        handed_on: Unit -> up to which grade its result is handed on, see `Structure.handed_on`.
        comparing: What comparing recipes will take, see `Comparisons.to_come`.
    """
    extras = extras or Extras()
    kinds = len(structure.grades) + 3 + len(extras.smaller)
    assembly = _Assembly(structure, values, resident, rates, minimum_share, left_out, kinds)
    assembly.add_recompute()
    assembly.add_lean(handed_on, comparing)
    assembly.add_recompute_lean(GRADE_INSIDE, RECOMPUTE_LEAN, comparing)
    if extras.link is not None:
        assembly.add_offload(extras.link)
    for chunks, smaller in extras.smaller.items():
        assembly.add_split(chunks, smaller)
    assembly.add_again(extras.smaller)
    return assembly.timeline()


class _Assembly(Rows):
    """One method for each action."""

    def add_recompute(self) -> None:
        """Recomputation: what a call saved is gone until its backward, in which all of it is there at once."""
        structure, columns, first = self.structure, self.structure.layout.columns, len(self.options)
        members = [self.calls_of[unit] for unit in self.freed]
        ones = [calls[0] for calls in members]
        self._spare(first, ones, [self.saved[i] for i in ones], [self.lent[i] for i in ones])
        row_of = np.full(len(structure.calls), -1, dtype=np.intp)
        for row, unit in enumerate(self.freed, first):
            calls = self.calls_of[unit]
            for i in calls[1:]:
                self.relief[row, : len(structure.positions)] += self._spared(i, self.saved[i], self.lent[i])
            for i in calls:
                for late in structure.calls[i].late:
                    is_there = (late.since_time <= structure.times) & (structure.times < late.until_time)
                    self.relief[row, : len(structure.positions)] += (structure.alive[i] & is_there) * self.value[
                        late.size
                    ]
                self.runs_again.append((row, i, self.working[i]))
                row_of[i] = row if structure.spared[i] else -1
            index = structure.layout.index[unit]
            self._add(index, RECOMPUTE, self._recompute_seconds[index])
        self._spare_in_forward(row_of, self.value[columns["lean"]])

    def _spare_in_forward(self, row_of: NDArray[np.intp], peak_bytes: NDArray[np.int64]) -> None:
        """What is spared inside a call's forward if it has a peak of its own, above its start.

        Args:
            row_of: Shape (calls,); the row that a call is a part of, -1 for none.
            peak_bytes: Shape (calls,); its peak.
        """
        layout = self.structure.layout
        entry = layout.columns["entry"]
        limit = self.value[entry] + peak_bytes
        call, position = layout.in_forward
        here = ((row_of >= 0) & (entry >= 0))[call]
        call, position = call[here], position[here]
        np.add.at(self.relief, (row_of[call], position), self.level[position] - limit[call])

    @cached_property
    def _recompute_seconds(self) -> list[float]:
        """What recomputing each unit costs.

        Counted, at a rate that is measured over the whole model: measured times of single units would decide
        differently from run to run, for they vary by a tenth.
        """
        rates, unit_of, count = self.rates, self.structure.layout.unit_of, len(self.structure.units)
        besides = rates.region_seconds * np.bincount(unit_of, self.counts, count)
        besides += rates.again_seconds * np.array(self.tensors_of)
        found: list[float] = (rates.again_per_operation * np.array(self.operations) + besides).tolist()
        return found

    def add_lean(self, handed_on: Mapping[str, int], comparing: Comparing) -> None:
        """The grades of lean saves; one that spares hardly more than the grade before it is no choice.

        Args:
            handed_on: Unit -> up to which grade its result is handed on.
            comparing: What comparing recipes will take.
        """
        structure, layout, first = self.structure, self.structure.layout, len(self.options)
        saved: list[int] = self.value[layout.lean_columns[0]].tolist()
        lent: list[int] = np.append(self.value, 0)[layout.lean_columns[1]].tolist()
        work: list[float] = self.values[layout.lean_columns[2]].tolist()
        call_of = [shape.call for shape in structure.lean]
        before: dict[str, int] = {}
        chosen: list[list[int]] = []
        hands: list[tuple[int, Handed]] = []
        for (unit, action), shapes in layout.lean_of.items():
            one = len(shapes) == 1  # as usual: hundreds of units have thousands of these
            spared = saved[shapes[0]] if one else sum(saved[i] for i in shapes)
            enough = max(self.minimum_bytes, int(1.02 * before.get(unit, 0)))
            if spared < enough or unit in self.left_out or len(shapes) != len(self.calls_of[unit]):
                continue
            before[unit] = spared
            self.borrows += [(len(self.options), n, call_of[i]) for i in shapes for n in structure.lean[i].borrowed]
            index = layout.index[unit]
            rebuilding = work[shapes[0]] if one else sum(work[i] for i in shapes)
            looking = self.rates.look_seconds * self.tensors_of[index]
            handed = layout.handed.get(unit) if handed_on else None
            if handed is not None and handed.shape.grade <= GRADES.index(action) + 1 <= handed_on.get(unit, 0):
                rebuilding += float(self.values[handed.shape.work])
                hands.append((len(self.options), handed))
            self._add(index, action, rebuilding * self.rates.rebuilt_per_operation + looking)
            chosen.append(shapes)
        ones = [shapes[0] for shapes in chosen]
        self._spare(first, [call_of[i] for i in ones], [saved[i] for i in ones], [lent[i] for i in ones])
        self._alter(ones, range(first, first + len(ones)))
        for row, shapes in enumerate(chosen, first):
            for i in shapes[1:]:
                self.relief[row, : len(structure.positions)] += self._spared(call_of[i], saved[i], lent[i])
                self._alter([i], [row])

        for row, handed in hands:
            self._hand_on(row, handed)
        number, position = layout.in_forward
        for row, shapes in enumerate(chosen if comparing else (), first):
            for i in comparing.keys() & {call_of[shape] for shape in shapes}:
                grade, nbytes = comparing[i]
                if GRADES.index(self.options[row].action) >= grade:
                    self.relief[row, position[number == i]] -= nbytes

    def _hand_on(self, row: int, handed: Handed) -> None:
        """What is spared by a result that is made for the next call when the backward of that one begins.

        From then on it is there, and so is what is rebuilt on the way to it, which its own call needs next.
        """
        shape, spares = handed.shape, self.relief[row]
        spares[handed.spared] += self.value[shape.size]
        spares[handed.made] -= self.value[shape.also[GRADES.index(self.options[row].action)]]
        # What it takes for a moment comes before anything else of that backward.
        before = self.value[self.structure.calls[shape.taker].before_backward]
        moment = before + self.value[shape.temporary] - self.level[handed.taken]
        spares[handed.taken] -= np.maximum(moment, 0)

    def _alter(self, shapes: Sequence[int], rows: Sequence[int]) -> None:
        """Where lean saves change what is alive inside a call: the rows that each of `shapes` is about."""
        if not len(shapes):
            return
        shape, position, own = self.structure.layout.lean_positions
        row_of = np.full(len(self.structure.lean), -1, dtype=np.intp)
        row_of[list(shapes)] = rows
        here = row_of[shape] >= 0
        at = position[here]
        # In addition to what the unit's other calls spare there.
        self.relief[row_of[shape[here]], at] += self.level[at] - self.value[own[here]] - self.entry[at]

    def add_recompute_lean(self, grade: str, action: str, comparing: Comparing) -> None:
        """Recomputation that is itself lean: as recomputation, and in its backward as lean saves are.

        Args:
            grade: The grade of lean saves inside.
            action: Name of the action.
            comparing: What comparing recipes will take.
        """
        structure, layout, count = self.structure, self.structure.layout, len(self.structure.positions)
        plain = {option.unit: i for i, option in enumerate(self.options) if option.action == RECOMPUTE}
        of_call = {shape.call: i for i, shape in enumerate(structure.lean) if shape.action == grade}
        work: list[float] = self.values[layout.lean_columns[2]].tolist()
        shape, position, _ = layout.lean_positions
        alive, forward = self.value[layout.lean_again], structure.forward[position]
        calls, columns = layout.lean_working
        until_last: dict[int, int] = dict(zip(calls.tolist(), self.value[columns].tolist(), strict=True))
        row_of = np.full(len(structure.lean), -1, dtype=np.intp)
        for unit, members in self.calls_of.items():
            index = layout.index[unit]
            if index not in plain or not all(i in of_call for i in members):
                continue
            row = len(self.options)
            self.relief[row, :count] = self.relief[plain[index], :count]
            seconds = self._recompute_seconds[index]
            for i in members:
                mine = of_call[i]
                row_of[mine] = row
                seconds += work[mine] * self.rates.rebuilt_per_operation
                seconds += self.rates.look_seconds * self.tensors[i]
                # Of those that stand for rounds in between it is not known: the last round takes as much.
                takes = min(self.working[i], until_last.get(i, 0))
                known, nbytes = comparing.get(i, (len(GRADES), 0))
                self.runs_again.append((row, i, takes + nbytes if known <= GRADES.index(grade) else takes))
            self._add(index, action, seconds)
        here = ~forward & (row_of[shape] >= 0)
        # Below zero where what keeps something in another form has it beside what it makes of it: a mask's bits.
        np.add.at(self.relief, (row_of[shape[here]], position[here]), self.level[position[here]] - alive[here])

    def add_offload(self, link: Link) -> None:
        """Offloading: gone while the unit that runs next is through its forward and not yet in its backward.

        Its copies have the link for themselves while that one computes: what does not fit behind it adds time. Units
        are left out from the last one on until all that remain fit into host memory together, and those of loops that
        are folded: what follows a round in between is one like it.
        """
        structure, taken = self.structure, 0
        for index, unit in enumerate(structure.units):
            saved = self.freed.get(unit, 0)
            if not saved or taken + saved > link.host_bytes or unit in structure.looped:
                continue
            taken += saved if structure.parents[index] < 0 else 0  # what nested units move, their parents would
            row, waiting = self._row(), 0.0
            for i in self.calls_of[unit]:
                call = structure.calls[i]
                following = self._following(call)
                copying = float(self.value[call.saved]) / link.bytes_per_second
                behind = 0.0 if following is None else self._seconds_of(following)
                # Backward takes about twice a forward.
                waiting += max(0.0, copying - behind) + max(0.0, copying - 2 * behind)
                if following is not None and structure.spared[i] and link.frees:
                    away = (structure.times >= following.out_time) & (structure.times < following.backward_time)
                    row += away * self._spared(i, int(self.value[call.saved]), self.lent[i])
            self._add(index, OFFLOAD, waiting + HOOK_SECONDS * len(self.calls_of[unit]))

    def _following(self, call: CallShape) -> CallShape | None:
        """The call that returns next at the earliest, and so the one whose backward brings the copies back."""
        around = [c for c in self.structure.calls if c.in_time < call.in_time and c.out_time > call.out_time]
        enclosing = min(around, key=lambda c: c.out_time, default=None)
        end = NEVER if enclosing is None else enclosing.out_time
        after = [c for c in self.structure.calls if call.out_time <= c.in_time < end]
        return min(after, key=lambda c: c.in_time, default=enclosing)

    def _seconds_of(self, call: CallShape) -> float:
        return float(self.values[call.flops] + self.values[call.besides]) * self.rates.seconds_per_operation

    def add_split(self, chunks: int, smaller: NDArray[np.float64]) -> None:
        """Splitting: recomputation, of a part of the batch at a time.

        Args:
            chunks: How many parts.
            smaller: Shape (columns,); what a step of such a part alone would look like.
        """
        structure, value = self.structure, self.value
        small = np.rint(smaller).astype(np.int64)
        column = structure.arrays[0]
        row_of = np.full(len(structure.calls), -1, dtype=np.intp)
        peak = np.zeros(len(structure.calls), dtype=np.int64)
        for index, unit in enumerate(structure.units):
            saved = self.freed.get(unit, 0)
            members = [structure.calls[i] for i in self.calls_of[unit]]
            if not saved or not all(call.region for call in members):
                continue
            row = self._row()
            for i, call in zip(self.calls_of[unit], members, strict=True):
                # Beside a part there are the results of all parts and their collection, in backward the gradients of
                # what was given, and a second gradient of every parameter while it is added to the first.
                returned, given = 2 * int(value[call.returned]), 2 * int(value[call.given])
                row += self._spared(i, int(value[call.saved]), self.lent[i])
                row_of[i], peak[i] = len(self.options), int(small[call.lean]) + returned
                inside = self._in_backward(call)
                made = self.made[inside]
                more = given + (int(made.max()) - made if len(made) else 0)
                apart = (self.level[inside] - value[call.before_backward]) - (
                    small[column[inside]] - small[call.before_backward]
                )
                row[inside] += apart - more
                self.runs_again.append((len(self.options), i, int(small[call.working]) + given))
            seconds = self._recompute_seconds[index] + chunks * HOOK_SECONDS * len(members)
            self._add(index, f"{SPLIT}{chunks}", seconds)
        self._spare_in_forward(row_of, peak)

    def add_again(self, smaller: Mapping[int, NDArray[np.float64]]) -> None:
        """What is there twice in the backward of calls that make anew, or bring back, what somebody else holds.

        And what is not there in the forward where something goes that they would have saved.

        Args:
            smaller: Number of chunks -> the columns of a batch that is smaller by it.
        """
        calls, column = self.structure.calls, self.structure.arrays[0]
        if not any(call.again for call in calls):
            return
        forward = self.structure.forward
        values = {RECOMPUTE: self.value, RECOMPUTE_LEAN: self.value, OFFLOAD: self.value}
        values |= {f"{SPLIT}{chunks}": np.rint(each).astype(np.int64) for chunks, each in smaller.items()}
        for row, option in enumerate(self.options):
            value = values.get(option.action)
            if value is None:
                continue
            for i in self.calls_of[self.structure.units[option.unit]]:
                for position, own in calls[i].again:
                    if option.action != RECOMPUTE_LEAN or forward[position]:  # whose backward was looked at by itself
                        self.relief[row, position] -= value[own] - value[column[position]]

    def _in_backward(self, call: CallShape) -> NDArray[np.intp]:
        """The positions of a region's backward."""
        regions = (c for c in self.structure.calls if c.region)
        later = (time for c in regions for time in (c.backward_time, c.in_time) if time > call.backward_time)
        times = self.structure.times
        return np.flatnonzero((times >= call.backward_time) & (times < min(later, default=NEVER)))
