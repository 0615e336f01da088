"""From the shape of a step and its numbers to a timeline: what is alive at every position, and what each option does.

One method for each action says where choosing it lowers the live bytes, and what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.structure import NEVER, CallShape, LeanShape, Resident, Structure
from lightning_mimose.predict.timeline import Option, SharedHold, Timeline

HOOK_SECONDS = 5e-4
"""What hooks on all that one call saves cost, besides what they do: half of what a layer of BERT was measured to take
on a slow host, since an accelerator does not wait for all of it."""
REGION_FLOPS = 1e4
"""What a recomputed region costs besides its operations, in operations that take as long."""


RECOMPUTE_LEAN = ("lean+attention", "recompute+lean")
"""The grade of lean saves inside a recomputed unit, and the action's name."""
BORROWING = ("lean+attention", "lean+products")
"""Grades of lean saves that may rebuild from a unit's arguments (masks), and so keep them alive."""


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
    seconds_per_flop: float,
    minimum_share: float,
    left_out: frozenset[str] = frozenset(),
    inputs_die: bool = False,
    extras: Extras | None = None,
) -> Timeline:
    """Assemble the timeline of one step.

    Args:
        structure: Its shape.
        values: Shape (columns,); the fitted columns for this step's size.
        resident: What is alive besides activations.
        seconds_per_flop: Rate at which this device recomputes.
        minimum_share: Units that save less than this share of the activation peak are left alone.
        left_out: Units that must not be recomputed.
        inputs_die: Whether an input that nothing holds dies in forward as soon as the last call given it
            returns; otherwise it is taken to live until backward.
        extras: What else may be planned.
    """
    assembly = _Assembly(structure, values, resident, seconds_per_flop, minimum_share, left_out)
    assembly.add_recompute()
    assembly.add_lean()
    assembly.add_recompute_lean(*RECOMPUTE_LEAN)
    if extras is not None and extras.link is not None:
        assembly.add_offload(extras.link)
    for chunks, smaller in extras.smaller.items() if extras is not None else ():
        assembly.add_split(chunks, smaller)
    return assembly.timeline(inputs_die)


class _Assembly:
    """The options of one timeline while they are added."""

    def __init__(
        self,
        structure: Structure,
        values: NDArray[np.float64],
        resident: Resident,
        seconds_per_flop: float,
        minimum_share: float,
        left_out: frozenset[str],
    ) -> None:
        self.structure, self.values, self.resident = structure, values, resident
        self.seconds_per_flop, self.left_out = seconds_per_flop, left_out
        column, entry, backward, made = structure.arrays
        self.value = np.rint(values).astype(np.int64)
        padded = np.append(self.value, 0)
        before = resident.old_gradient_bytes
        if resident.zeroes_gradients:
            gradients = np.where(backward, made, before)
        elif structure.old_gradient_bytes == before:
            gradients = made + np.array([p.old_gradient_bytes for p in structure.positions], dtype=np.int64)
        else:
            gradients = np.maximum(made, before)
        self.level: NDArray[np.int64] = padded[column] + padded[entry]
        self.entry: NDArray[np.int64] = padded[entry]
        self.base: NDArray[np.int64] = resident.lasting_bytes + self.level + gradients
        self.backward, self.made = backward, made
        self.minimum_bytes = max(1, int(minimum_share * (int(self.base.max(initial=0)) - resident.lasting_bytes)))
        # Gradients at a call's backward position also count while it is recomputed.
        self.own = dict(zip(structure.times.tolist(), (self.base - self.level).tolist(), strict=True))
        self.calls_of: dict[str, list[int]] = {}
        for i, call in enumerate(structure.calls):
            self.calls_of.setdefault(call.unit, []).append(i)
        self.options: list[Option] = []
        self.relief: list[NDArray[np.int64]] = []
        self.runs_again: list[tuple[int, int, int]] = []
        """(option, call, what its recomputation takes)."""
        self.borrows: list[tuple[int, int]] = []
        """(option, call) that keeps the call's arguments alive besides those that run again."""

    def _add(self, unit: int, action: str, flops: float, row: NDArray[np.int64], seconds: float = 0.0) -> None:
        self.options.append(Option(unit, action, flops * self.seconds_per_flop + seconds))
        self.relief.append(row)

    def _row(self) -> NDArray[np.int64]:
        return np.zeros(len(self.structure.positions), dtype=np.int64)

    def _freed(self, unit: str) -> int:
        """Bytes between forward and backward that only this unit keeps; 0 if it cannot or need not be planned."""
        structure = self.structure
        members = self.calls_of[unit]
        saved = sum(int(self.value[structure.calls[i].saved]) for i in members if structure.spared[i])
        ends = all(structure.calls[i].backward_time != NEVER for i in members)
        return saved if ends and saved >= self.minimum_bytes and unit not in self.left_out else 0

    # --- actions ----------------------------------------------------------------------------------------------

    def add_recompute(self) -> None:
        """Recomputation: what a call saved is gone until its backward, in which all of it is there at once."""
        structure, value = self.structure, self.value
        for index, unit in enumerate(structure.units):
            saved = self._freed(unit)
            if not saved:
                continue
            row = self._row()
            for i in self.calls_of[unit]:
                call = structure.calls[i]
                self.runs_again.append((len(self.options), i, int(value[call.working])))
                if structure.spared[i]:
                    row += structure.alive[i] * value[call.saved]
                    if call.entry >= 0:
                        row += self._in_forward(call, int(value[call.lean]))
            self._add(index, "recompute", self._recomputing(unit, saved), row)

    def _in_forward(self, call: CallShape, peak_bytes: int) -> NDArray[np.int64]:
        """What is spared inside a call's forward if it has a peak of its own, above its start."""
        inside = (call.in_time <= self.structure.times) & (self.structure.times < call.out_time) & ~self.backward
        before = self.resident.lasting_bytes + self.resident.old_gradient_bytes
        limit = before + self.value[call.entry] + peak_bytes
        spared: NDArray[np.int64] = np.where(inside, np.maximum(self.base - limit, 0), 0)
        return spared

    def _recomputing(self, unit: str, saved_bytes: int) -> float:
        """What recomputing a unit costs, in operations.

        Operations decide. Element-wise work is about the same per byte that is freed, whichever units free it, so
        it hardly changes the choice; counted lightly, with a region's fixed cost, it breaks ties towards few large
        regions. Measured times of single units would decide differently from run to run: they vary by a tenth.
        """
        members = [self.structure.calls[i] for i in self.calls_of[unit]]
        return sum(float(self.values[c.flops]) for c in members) + 0.25 * saved_bytes + REGION_FLOPS * len(members)

    def _rebuilding(self, unit: str, work: float) -> float:
        """What recipes cost, in the operations of `_recomputing`: those stand for the unit's element-wise work too."""
        members = [self.structure.calls[i] for i in self.calls_of[unit]]
        flops = sum(float(self.values[call.flops]) for call in members)
        besides = sum(float(self.values[call.besides]) for call in members)
        return work * flops / (flops + besides) if flops > 0 else work

    def add_lean(self) -> None:
        """The grades of lean saves; one that spares hardly more than the grade before it is no choice."""
        structure, value = self.structure, self.value
        index = {unit: i for i, unit in enumerate(structure.units)}
        by_option: dict[tuple[str, str], list[LeanShape]] = {}
        for shape in structure.lean:
            by_option.setdefault((structure.calls[shape.call].unit, shape.action), []).append(shape)
        before: dict[str, int] = {}
        for (unit, action), shapes in by_option.items():
            saved = sum(int(value[shape.saved]) for shape in shapes)
            enough = max(self.minimum_bytes, int(1.02 * before.get(unit, 0)))
            if unit in self.left_out or len(shapes) != len(self.calls_of[unit]) or saved < enough:
                continue
            before[unit] = saved
            row = self._row()
            for shape in shapes:
                row += structure.alive[shape.call] * value[shape.saved]
                for position, own in shape.positions:
                    row[position] = self.level[position] - value[own] - self.entry[position]
            if action in BORROWING:
                self.borrows += [(len(self.options), shape.call) for shape in shapes]
            work = sum(float(self.values[shape.work]) for shape in shapes)
            self._add(index[unit], action, self._rebuilding(unit, work), row, HOOK_SECONDS * len(shapes))

    def add_recompute_lean(self, grade: str, action: str) -> None:
        """Recomputation that is itself lean: as recomputation, and in its backward as lean saves are.

        Args:
            grade: The grade of lean saves inside.
            action: Name of the action.
        """
        structure, value = self.structure, self.value
        plain = {option.unit: i for i, option in enumerate(self.options) if option.action == "recompute"}
        index = {unit: i for i, unit in enumerate(structure.units)}
        shapes = {shape.call: shape for shape in structure.lean if shape.action == grade}
        for unit, members in self.calls_of.items():
            if index[unit] not in plain or not all(i in shapes for i in members):
                continue
            row, work = self.relief[plain[index[unit]]].copy(), 0.0
            for i in members:
                shape = shapes[i]
                work += self._rebuilding(unit, float(self.values[shape.work]))
                peaks = [0]
                for position, own in shape.positions:
                    if self.backward[position]:
                        row[position] += max(0, int(self.level[position] - value[own]))
                    else:
                        peaks.append(int(value[own]))
                working = min(int(value[structure.calls[i].working]), max(peaks))
                self.runs_again.append((len(self.options), i, working))
            saved = self._freed(unit)
            self._add(index[unit], action, self._recomputing(unit, saved) + work, row, HOOK_SECONDS * len(members))

    def add_offload(self, link: Link) -> None:
        """Offloading: gone while the unit that runs next is through its forward and not yet in its backward.

        Its copies have the link for themselves while that one computes: what does not fit behind it adds time. Units
        are left out from the last one on until all that remain fit into host memory together.
        """
        structure, taken = self.structure, 0
        for index, unit in enumerate(structure.units):
            saved = self._freed(unit)
            if not saved or taken + saved > link.host_bytes:
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
                    row += (away & structure.alive[i]) * self.value[call.saved]
            self._add(index, "offload", 0.0, row, waiting + HOOK_SECONDS * len(self.calls_of[unit]))

    def _following(self, call: CallShape) -> CallShape | None:
        """The call that returns next at the earliest, and so the one whose backward brings the copies back."""
        around = [c for c in self.structure.calls if c.in_time < call.in_time and c.out_time > call.out_time]
        enclosing = min(around, key=lambda c: c.out_time, default=None)
        end = NEVER if enclosing is None else enclosing.out_time
        after = [c for c in self.structure.calls if call.out_time <= c.in_time < end]
        return min(after, key=lambda c: c.in_time, default=enclosing)

    def _seconds_of(self, call: CallShape) -> float:
        return float(self.values[call.flops]) * self.seconds_per_flop

    def add_split(self, chunks: int, smaller: NDArray[np.float64]) -> None:
        """Splitting: recomputation, of a part of the batch at a time.

        Args:
            chunks: How many parts.
            smaller: Shape (columns,); what a step of such a part alone would look like.
        """
        structure, value = self.structure, self.value
        small = np.rint(smaller).astype(np.int64)
        column = structure.arrays[0]
        for index, unit in enumerate(structure.units):
            saved = self._freed(unit)
            members = [structure.calls[i] for i in self.calls_of[unit]]
            if not saved or not all(call.region for call in members):
                continue
            row = self._row()
            for i, call in zip(self.calls_of[unit], members, strict=True):
                # Beside a part there are the results of all parts and their collection, in backward the gradients of
                # what was given, and a second gradient of every parameter while it is added to the first.
                returned, given = 2 * int(value[call.returned]), 2 * int(value[call.given])
                row += structure.alive[i] * value[call.saved]
                row += self._in_forward(call, int(small[call.lean]) + returned)
                inside = self._in_backward(call)
                made = self.made[inside]
                more = given + (int(made.max()) - made if len(made) else 0)
                apart = (self.level[inside] - value[call.before_backward]) - (
                    small[column[inside]] - small[call.before_backward]
                )
                row[inside] += apart - more
                self.runs_again.append((len(self.options), i, int(small[call.working]) + given))
            seconds = chunks * HOOK_SECONDS * len(members)
            self._add(index, f"split{chunks}", self._recomputing(unit, saved), row, seconds)

    def _in_backward(self, call: CallShape) -> NDArray[np.intp]:
        """The positions of a region's backward."""
        later = (c.backward_time for c in self.structure.calls if c.region and c.backward_time > call.backward_time)
        times = self.structure.times
        return np.flatnonzero((times >= call.backward_time) & (times < min(later, default=NEVER)) & self.backward)

    # --- the whole --------------------------------------------------------------------------------------------

    def timeline(self, inputs_die: bool) -> Timeline:
        """Add a position for every recomputation, which binds only if it is chosen, and one for the update."""
        structure, value, options = self.structure, self.value, self.options
        places = {p.time: i for i, p in enumerate(structure.positions) if p.backward}
        matrix = np.array(self.relief, dtype=np.int64).reshape(len(options), len(structure.positions))
        more_base, more_columns, labels = [], [], []
        times, backward = structure.times.tolist(), self.backward.tolist()
        for option, index, working in self.runs_again:
            call = structure.calls[index]
            place = places.get(call.backward_time)
            if place is None:
                continue
            column = matrix[:, place].copy()
            # Its own saved tensors are due now; those of the unit's other calls are still spared.
            column[option] = self._others_spared(option, index, place) - working
            for other, choice in enumerate(options):
                if other != option and choice.unit == options[option].unit:
                    column[other] = 0  # this position is one of recomputing
            more_base.append(self.own[call.backward_time] + int(value[call.before_backward]))
            more_columns.append(column)
            times.append(call.backward_time)
            backward.append(True)
            labels.append(f"recomputation of {call.key}")
        more_base.append(self.resident.update_bytes)
        more_columns.append(np.zeros(len(options), dtype=np.int64))
        times.append(-1)
        backward.append(False)
        labels.append("optimizer step")
        base = np.concatenate([self.base, np.array(more_base, dtype=np.int64)])
        shared = self._shared(base, np.array(times), np.array(backward), inputs_die)
        return Timeline(
            units=structure.units,
            parents=structure.parents,
            options=tuple(options),
            base_bytes=base,
            relief_bytes=np.concatenate([matrix, np.array(more_columns, dtype=np.int64).T], axis=1),
            shared=tuple(shared),
            labels=(*(p.label for p in structure.positions), *labels),
            times=tuple(times),
        )

    def _others_spared(self, option: int, index: int, place: int) -> int:
        """What the other calls of an option's unit spare at a position."""
        structure = self.structure
        others = (i for i in self.calls_of[structure.units[self.options[option].unit]] if i != index)
        return sum(
            int(self.value[structure.calls[i].saved])
            for i in others
            if structure.spared[i] and structure.alive[i, place]
        )

    def _shared(
        self, base: NDArray[np.int64], when: NDArray[np.int64], backward: NDArray[np.bool_], inputs_die: bool
    ) -> Sequence[SharedHold]:
        """What only chosen options hold; takes it out of the base."""
        structure = self.structure
        options_of: dict[int, list[int]] = {}
        for option, index in [*((option, index) for option, index, _ in self.runs_again), *self.borrows]:
            options_of.setdefault(index, []).append(option)
        shared = []
        for loose in structure.loose:
            size = int(self.value[loose.size])
            last_use = max(structure.calls[index].out_time for index in loose.holders)
            # What no region held in the measured step (an input inside one) is not in the base, in forward neither.
            counted = backward | ((inputs_die or loose.until_time < 0) & (when >= last_use))
            base -= np.where(counted & (when <= loose.until_time), size, 0)
            holders: dict[int, NDArray[np.bool_]] = {}
            for index in loose.holders:
                for option in options_of.get(index, ()):
                    until = structure.calls[index].backward_time
                    holders.setdefault(option, counted & (when <= until))
            if holders:
                shared.append(SharedHold(size, tuple(holders), np.array(list(holders.values()))))
        return shared
