"""The shape of a step: its calls, its positions, and how measured columns become a timeline.

Sizes change the numbers, rarely the shape. A `Structure` is what stays; a column vector holds the numbers, one
non-negative value per column, which the estimator fits over input sizes one by one. Times are ranks of marks
in the measured step: a call lives from its `in` to its `out` in forward, and its saved tensors from `out` to
`backward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.timeline import Option, SharedHold, Timeline

NEVER = 1 << 60
"""The time of an event that does not happen."""


@dataclass(frozen=True)
class Resident:
    """What is alive in a step besides activations.

    Attributes:
        lasting_bytes: Parameters, buffers, optimizer state and the batch.
        old_gradient_bytes: Gradients alive at the step's start.
        zeroes_gradients: Whether they are set to None between forward and backward.
        update_bytes: Peak of the optimizer's update, everything included.
    """

    lasting_bytes: int
    old_gradient_bytes: int
    zeroes_gradients: bool
    update_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that is resident at the step's start."""
        return self.lasting_bytes + self.old_gradient_bytes


@dataclass(frozen=True)
class CallShape:
    """One call of a unit.

    Attributes:
        key: Unit name and occurrence.
        unit: Name of the unit.
        region: Whether the call was itself recomputed while it was measured (not nested in one that was).
        in_time: When its forward begins.
        out_time: When its forward ends.
        backward_time: When its backward begins, or `NEVER`.
        saved: Column of the bytes that recomputing it frees between forward and backward.
        working: Column of the peak of its forward while everything it saves is kept, above its start.
        before_backward: Column of the live bytes when its backward begins, without what it saved.
        flops: Column of the operations its recomputation runs.
        seconds: Column of the seconds its recomputation took.
        entry: Column of the live bytes at its start when everything before it is kept, -1 if not recomputed.
        lean: Column of the peak of its forward while nothing is kept, above its start, -1 if not recomputed.
    """

    key: str
    unit: str
    region: bool
    in_time: int
    out_time: int
    backward_time: int
    saved: int
    working: int
    before_backward: int
    flops: int
    seconds: int
    entry: int = -1
    lean: int = -1


@dataclass(frozen=True)
class Position:
    """One place on the timeline.

    Attributes:
        label: Readable name.
        time: When it is.
        backward: Whether it lies after the start of the backward pass.
        column: Column of the live bytes there, above resident ones and gradients, when everything is kept.
        entry: Column to add to it (positions inside a region are measured from the region's start), or -1.
        gradient_bytes: Bytes of the gradients made before it in this step.
        old_gradient_bytes: Bytes of older gradients alive there, in a loop that frees them when it likes.
    """

    label: str
    time: int
    backward: bool
    column: int
    entry: int
    gradient_bytes: int
    old_gradient_bytes: int = 0


@dataclass(frozen=True)
class LooseShape:
    """A storage that nothing holds in backward unless one of the calls it is an input of is recomputed.

    Attributes:
        size: Column of its bytes.
        holders: Indices of the calls that hold it when recomputed, the longest-holding first.
        until_time: Until when it was held in the measured step, -1 if it was not.
    """

    size: int
    holders: tuple[int, ...]
    until_time: int


@dataclass(frozen=True)
class LeanShape:
    """What one grade of lean saves changes about one call.

    Attributes:
        call: Index of the call.
        action: Name of the grade.
        saved: Column of the bytes it spares between forward and backward.
        work: Column of the operations that rebuilding takes.
        positions: (index of a position inside the call's forward or backward, column of the live bytes there).
    """

    call: int
    action: str
    saved: int
    work: int
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Structure:
    """What a step looks like at any size.

    Attributes:
        units: Units that were called, in forward order.
        parents: Index of the unit that encloses a unit's first call most nearly, -1 at the top.
        calls: Every call.
        positions: Every position.
        loose: Storages held only by recomputed calls.
        batch: Column of the batch's own bytes.
        columns: Number of columns.
        old_gradient_bytes: Bytes of gradients at the measured steps' start, in a loop that frees them when it likes.
        lean: What lean saves of each grade would change.
    """

    units: tuple[str, ...]
    parents: tuple[int, ...]
    calls: tuple[CallShape, ...]
    positions: tuple[Position, ...]
    loose: tuple[LooseShape, ...]
    batch: int
    columns: int
    old_gradient_bytes: int | None = None
    lean: tuple[LeanShape, ...] = ()

    @cached_property
    def passes(self) -> int:
        """Backward passes in the step."""
        return sum(position.label == "backward step" for position in self.positions)

    def __hash__(self) -> int:
        """Computed once: a step of a large model has thousands of parts."""
        return self._hash

    @cached_property
    def calls_made(self) -> frozenset[str]:
        """Keys of all calls: a step on another path through the model makes others."""
        return frozenset(call.key for call in self.calls)

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.units,
                self.parents,
                self.calls,
                self.positions,
                self.loose,
                self.batch,
                self.columns,
                self.old_gradient_bytes,
                self.lean,
            )
        )

    def summary(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What predictions are judged by.

        The activation peak with everything kept, the one with every region recomputed, those with each grade of lean
        saves everywhere; and what each region frees.

        Args:
            values: Shape (observations, columns).

        Returns:
            Shape (observations, 2 + `grades` + regions), bytes.
        """
        padded = np.concatenate([values, np.zeros((len(values), 1))], axis=1)
        column, entry, _, _ = self._arrays
        kept = (padded[:, column] + padded[:, entry]).max(axis=1)
        regions = [call for call in self.calls if call.region]
        saved = values[:, [call.saved for call in regions]]
        start = values[:, [call.before_backward for call in regions]]
        working = values[:, [call.working for call in regions]]
        out = np.array([call.out_time for call in regions]).reshape(-1, 1)
        backward = np.array([call.backward_time for call in regions])
        held = (out <= backward) & (backward < backward.reshape(-1, 1))
        recomputed = (start + working - saved @ held).max(axis=1, initial=0.0)
        lean = [self._lean_peak(padded, action) for action in self.grades]
        return np.concatenate([np.stack([kept, recomputed, *lean], axis=1), saved], axis=1)

    @cached_property
    def grades(self) -> tuple[str, ...]:
        """Names of the grades of lean saves that were surveyed."""
        return tuple(dict.fromkeys(shape.action for shape in self.lean))

    def _lean_peak(self, padded: NDArray[np.float64], action: str) -> NDArray[np.float64]:
        column, entry, _, _ = self._arrays
        kept = padded[:, column] + padded[:, entry]
        level = kept.copy()
        for shape in self.lean:
            if shape.action == action:
                level -= padded[:, [shape.saved]] * self._alive[shape.call]
                where, own = [p for p, _ in shape.positions], [c for _, c in shape.positions]
                level[:, where] -= kept[:, where] - padded[:, own] - padded[:, entry[where]]
        peak: NDArray[np.float64] = level.max(axis=1)
        return peak

    @cached_property
    def _times(self) -> NDArray[np.int64]:
        return np.array([p.time for p in self.positions], dtype=np.int64)

    @cached_property
    def _alive(self) -> NDArray[np.bool_]:
        """Shape (calls, positions): whether what a call saves is alive at a position of backward or forward."""
        times = self._times
        out = np.array([c.out_time for c in self.calls]).reshape(-1, 1)
        backward = np.array([c.backward_time for c in self.calls]).reshape(-1, 1)
        alive: NDArray[np.bool_] = (out <= times) & (times < backward)
        return alive

    @cached_property
    def _spared(self) -> NDArray[np.bool_]:
        """Shape (calls,): whether recomputing its unit is what frees what a call saves.

        A unit that several units share is a part of one of them only, its parent, with which it never acts at once.
        With another one it may: what its call saves in there is freed by that one, and must not count twice.
        """
        index = {unit: i for i, unit in enumerate(self.units)}
        spared = np.zeros(len(self.calls), dtype=bool)
        around: list[int] = []
        for i in sorted(range(len(self.calls)), key=lambda i: self.calls[i].in_time):
            call = self.calls[i]
            while around and self.calls[around[-1]].out_time < call.in_time:
                around.pop()
            parent = index[self.calls[around[-1]].unit] if around else -1
            spared[i] = parent == self.parents[index[call.unit]] and (not around or spared[around[-1]])
            around.append(i)
        return spared

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_], NDArray[np.int64]]:
        column = np.array([p.column for p in self.positions], dtype=np.intp)
        entry = np.array([p.entry for p in self.positions], dtype=np.intp)
        backward = np.array([p.backward for p in self.positions], dtype=bool)
        gradients = np.array([p.gradient_bytes for p in self.positions], dtype=np.int64)
        return column, entry, backward, gradients

    def timeline(
        self,
        values: NDArray[np.float64],
        resident: Resident,
        *,
        seconds_per_flop: float,
        minimum_share: float,
        left_out: frozenset[str] = frozenset(),
        inputs_die: bool = False,
    ) -> Timeline:
        """Assemble the timeline of one step.

        Args:
            values: Shape (columns,); the fitted columns for this step's size.
            resident: What is alive besides activations.
            seconds_per_flop: Rate at which this device recomputes.
            minimum_share: Units that save less than this share of the activation peak are left alone.
            left_out: Units that must not be recomputed.
            inputs_die: Whether an input that nothing holds dies in forward as soon as the last call given it
                returns; otherwise it is taken to live until backward.
        """
        column, entry, backward, made = self._arrays
        value = np.rint(values).astype(np.int64)
        padded = np.append(value, 0)
        before = resident.old_gradient_bytes
        if resident.zeroes_gradients:
            gradients = np.where(backward, made, before)
        elif self.old_gradient_bytes == before:
            gradients = made + np.array([p.old_gradient_bytes for p in self.positions], dtype=np.int64)
        else:
            gradients = np.maximum(made, before)
        base = resident.lasting_bytes + padded[column] + padded[entry] + gradients
        times = self._times
        minimum_bytes = max(1, int(minimum_share * (int(base.max(initial=0)) - resident.lasting_bytes)))
        calls_of: dict[str, list[int]] = {}
        for i, call in enumerate(self.calls):
            calls_of.setdefault(call.unit, []).append(i)
        # Gradients at a call's backward position also count while it is recomputed.
        own = {p.time: int(base[i] - padded[p.column] - padded[p.entry]) for i, p in enumerate(self.positions)}

        options: list[Option] = []
        relief: list[NDArray[np.int64]] = []
        extra: list[tuple[int, int]] = []
        for index, unit in enumerate(self.units):
            members = [self.calls[i] for i in calls_of[unit]]
            saved = sum(int(value[self.calls[i].saved]) for i in calls_of[unit] if self._spared[i])
            if unit in left_out or saved < minimum_bytes or any(c.backward_time == NEVER for c in members):
                continue
            row = np.zeros(len(self.positions), dtype=np.int64)
            for i in calls_of[unit]:
                call = self.calls[i]
                extra.append((len(options), i))
                if not self._spared[i]:
                    continue
                row += self._alive[i] * value[call.saved]
                if call.entry >= 0:
                    inside = (call.in_time <= times) & (times < call.out_time) & ~backward
                    limit = resident.lasting_bytes + before + value[call.entry] + value[call.lean]
                    row += np.where(inside, np.maximum(base - limit, 0), 0)
            flops = sum(float(values[c.flops]) for c in members)
            options.append(Option(index, "recompute", _seconds(flops, saved, len(members), seconds_per_flop)))
            relief.append(row)
        self._add_lean(options, relief, base, values, value, seconds_per_flop, minimum_bytes, left_out)
        return self._finish(base, options, relief, extra, value, own, resident.update_bytes, inputs_die)

    def _add_lean(
        self,
        options: list[Option],
        relief: list[NDArray[np.int64]],
        base: NDArray[np.int64],
        values: NDArray[np.float64],
        value: NDArray[np.int64],
        seconds_per_flop: float,
        minimum_bytes: int,
        left_out: frozenset[str],
    ) -> None:
        """Add the grades of lean saves; one that spares hardly more than the grade before it is no choice."""
        column, entry, _, _ = self._arrays
        padded = np.append(value, 0)
        level = padded[column] + padded[entry]
        index = {unit: i for i, unit in enumerate(self.units)}
        calls_of = Counter(call.unit for call in self.calls)
        by_option: dict[tuple[str, str], list[LeanShape]] = {}
        for shape in self.lean:
            by_option.setdefault((self.calls[shape.call].unit, shape.action), []).append(shape)
        before: dict[str, int] = {}
        for (unit, action), shapes in by_option.items():
            saved = sum(int(value[shape.saved]) for shape in shapes)
            enough = max(minimum_bytes, int(1.02 * before.get(unit, 0)))
            if unit in left_out or len(shapes) != calls_of[unit] or saved < enough:
                continue
            before[unit] = saved
            row = np.zeros(len(self.positions), dtype=np.int64)
            for shape in shapes:
                row += self._alive[shape.call] * value[shape.saved]
                for position, own in shape.positions:
                    row[position] = level[position] - value[own] - padded[entry[position]]
            work = sum(float(values[shape.work]) for shape in shapes)
            options.append(Option(index[unit], action, (work + 1e5 * len(shapes)) * seconds_per_flop))
            relief.append(row)

    def _finish(
        self,
        base: NDArray[np.int64],
        options: list[Option],
        relief: list[NDArray[np.int64]],
        extra: Sequence[tuple[int, int]],
        value: NDArray[np.int64],
        own: dict[int, int],
        update_bytes: int,
        inputs_die: bool,
    ) -> Timeline:
        """Add a position for every recomputation, which binds only if it is chosen, and one for the update."""
        places = {p.time: i for i, p in enumerate(self.positions) if p.backward}
        matrix = np.array(relief, dtype=np.int64).reshape(len(options), len(self.positions))
        more_base, more_columns, labels = [], [], []
        times = [p.time for p in self.positions]
        backward = [p.backward for p in self.positions]
        for option, index in extra:
            call = self.calls[index]
            place = places.get(call.backward_time)
            if place is None:
                continue
            column = matrix[:, place].copy()
            # Its own saved tensors are due now; those of the unit's other calls are still spared.
            column[option] -= value[call.working]
            for other, choice in enumerate(options):
                if other != option and choice.unit == options[option].unit:
                    column[other] = 0  # this position is one of recomputing
            more_base.append(own[call.backward_time] + int(value[call.before_backward]))
            more_columns.append(column)
            times.append(call.backward_time)
            backward.append(True)
            labels.append(f"recomputation of {call.key}")
        more_base.append(update_bytes)
        more_columns.append(np.zeros(len(options), dtype=np.int64))
        times.append(-1)
        backward.append(False)
        labels.append("optimizer step")
        base = np.concatenate([base, np.array(more_base, dtype=np.int64)])
        when = np.array(times)
        option_of = {index: option for option, index in extra}
        shared = []
        for loose in self.loose:
            size = int(value[loose.size])
            last_use = max(self.calls[index].out_time for index in loose.holders)
            # What no region held in the measured step (an input inside one) is not in the base, in forward neither.
            counted = np.array(backward) | ((inputs_die or loose.until_time < 0) & (when >= last_use))
            base -= np.where(counted & (when <= loose.until_time), size, 0)
            holders: dict[int, NDArray[np.bool_]] = {}
            for index in loose.holders:
                if index in option_of:
                    until = self.calls[index].backward_time
                    holders.setdefault(option_of[index], counted & (when <= until))
            if holders:
                shared.append(SharedHold(size, tuple(holders), np.array(list(holders.values()))))
        return Timeline(
            units=self.units,
            parents=self.parents,
            options=tuple(options),
            base_bytes=base,
            relief_bytes=np.concatenate([matrix, np.array(more_columns, dtype=np.int64).T], axis=1),
            shared=tuple(shared),
            labels=(*(p.label for p in self.positions), *labels),
        )


def _seconds(flops: float, saved_bytes: int, calls: int, seconds_per_flop: float) -> float:
    """What recomputing a unit costs.

    Operations decide. Element-wise work is about the same per byte that is freed, whichever units free it, so
    it hardly changes the choice; counted lightly, with a region's fixed cost, it breaks ties towards few large
    regions. Measured times of single units would decide differently from run to run: they vary by a tenth.
    """
    return (flops + 0.25 * saved_bytes + 1e4 * calls) * seconds_per_flop
