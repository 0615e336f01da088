"""The options of a timeline while they are added: a row of relief for each, and positions that only they bring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.loose import Places, gone, highest_twice, shared_holds, take_out
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Option, Timeline

STEP_END = "end step"
"""What the last position of a step is called that was looked at to its backward's end."""
FEW_BYTES = 512
"""What a step leaves behind if it leaves nothing: its loss, and other numbers."""

MOST_BYTES = 1 << 50
"""More than any device has; of so many a thousand can be added up without overflow."""


def whole_bytes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Columns as whole numbers, none of which is negative: what would hold more than it frees frees nothing.

    Nor so large that a thousand of them could not be added up: sizes that somebody asks for may be of any length.
    """
    return np.clip(np.rint(np.nan_to_num(values, nan=MOST_BYTES)), 0, MOST_BYTES).astype(np.int64)


def levels(
    structure: Structure, value: NDArray[np.int64], resident: Resident
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What is alive at every position when everything is kept, and loose inputs are there throughout.

    Args:
        structure: The step's shape.
        value: Shape (columns,); the fitted columns for its size.
        resident: What is alive besides activations.

    Returns:
        Shape (positions,) each: activations, what of them was there when the position's call began (0 where it is in
        none), and everything.
    """
    column, entry, backward, made = structure.arrays
    padded = np.append(value, 0)
    before = resident.old_gradient_bytes
    if resident.zeroes_gradients:
        gradients = np.where(backward, structure.due_gradients, before)
    elif structure.old_gradient_bytes == before:
        gradients = made + np.array([p.old_gradient_bytes for p in structure.positions], dtype=np.int64)
    else:
        gradients = np.maximum(structure.due_gradients, before)
    start: NDArray[np.int64] = padded[entry]
    level: NDArray[np.int64] = padded[column] + start
    lasting = min(resident.beside_bytes, MOST_BYTES)  # a batch of any length is a part of it
    everything: NDArray[np.int64] = lasting + level + gradients
    return level, start, everything


def held_in_update(resident: Resident, left_bytes: int) -> int:
    """What is in the optimizer's update of that which backward leaves behind besides gradients.

    On a device that counts its memory nothing: what modules hold lasts there. What the step returns is left out, then.

    Args:
        resident: What is alive besides activations.
        left_bytes: What is returned, kept by a module, or of a graph that somebody holds.
    """
    return 0 if resident.counts_held or left_bytes <= FEW_BYTES else left_bytes


def add_held(structure: Structure, base: NDArray[np.int64], resident: Resident, without: int) -> int:
    """Count in the update what is there when all is kept and backward is over.

    Args:
        structure: The step's shape.
        base: Shape (positions,), those of the step first and the update's last; changed.
        resident: What is alive besides activations.
        without: Of the last of the step's positions, what is no activation.

    Returns:
        What was added.
    """
    held_bytes = 0
    if structure.layout.labels[-1:] == (STEP_END,):
        held_bytes = held_in_update(resident, int(base[len(structure.positions) - 1]) - without)
    base[-1] += held_bytes
    return held_bytes


def kept_timeline(structure: Structure, values: NDArray[np.float64], resident: Resident) -> Timeline:
    """The timeline of a step of which everything is kept: without options, and in a fraction of the time.

    Args:
        structure: Its shape.
        values: Shape (columns,); the fitted columns for its size.
        resident: What is alive besides activations.
    """
    value = whole_bytes(values)
    level, _, everything = levels(structure, value, resident)
    base = np.append(everything, resident.end_bytes)
    times, backward = np.append(structure.times, -1), np.append(structure.arrays[2], False)
    places = Places(times, backward, np.zeros(len(base), dtype=np.bool_))
    for each in gone(structure, value, places):
        take_out(structure, base, places, each)
    add_held(structure, base, resident, int(everything[-1] - level[-1]))
    return Timeline(
        units=structure.units,
        parents=structure.parents,
        options=(),
        base_bytes=base,
        relief_bytes=np.zeros((0, len(base)), dtype=np.int64),
        shared=(),
        labels=(*structure.layout.labels, "optimizer step"),
        times=tuple(times.tolist()),
    )


class Rows:
    """What a step is without any option, and room for those that are added.

    Args:
        structure: Its shape.
        values: Shape (columns,); the fitted columns for its size.
        resident: What is alive besides activations.
        rates: What the parts of actions cost.
        minimum_share: Units that save less than this share of the activation peak are left alone.
        left_out: Units that must not be recomputed.
        kinds: Options that a unit may have at most.
    """

    def __init__(
        self,
        structure: Structure,
        values: NDArray[np.float64],
        resident: Resident,
        rates: Rates,
        minimum_share: float,
        left_out: frozenset[str],
        kinds: int,
    ) -> None:
        self.structure, self.resident = structure, resident
        self.rates, self.left_out = rates, left_out
        self.backward, self.made = structure.arrays[2], structure.due_gradients
        self.values, self.value = values, whole_bytes(values)
        self.level, self.entry, self.base = levels(structure, self.value, resident)
        activations = int(self.base.max(initial=0)) - resident.beside_bytes
        self.minimum_bytes = max(1, int(minimum_share * activations))
        # Gradients at a call's backward position also count while it is recomputed.
        self.own = dict(zip(structure.times.tolist(), (self.base - self.level).tolist(), strict=True))
        self.calls_of = structure.layout.calls_of
        self._look_at_calls(values)
        # Every recomputation has a position besides; there is one for the update.
        places = structure.layout.backward_at
        self.again = {
            i: places[structure.calls[i].backward_time]
            for unit in self.freed
            for i in self.calls_of[unit]
            if structure.calls[i].backward_time in places
        }
        at = dict(zip(structure.times.tolist(), range(len(structure.positions)), strict=True))
        self.twice = [at[time] for time in highest_twice(structure, self.value) if time in at]
        self.options: list[Option] = []
        # Tens of megabytes for hundreds of units: each row is written once, where it stays.
        self.relief = np.empty(
            (kinds * len(structure.units), len(structure.positions) + len(self.again) + len(self.twice) + 1),
            dtype=np.int64,
        )
        self.runs_again: list[tuple[int, int, int]] = []
        """(option, call, what its recomputation takes)."""
        self.borrows: list[tuple[int, int, int]] = []
        """(option, loose storage, call) that keeps one of the call's arguments alive, besides those that run again."""

    @cached_property
    def tensors(self) -> list[float]:
        """How many tensors every call saves."""
        found: list[float] = self.values[self.structure.layout.columns["tensors"]].tolist()
        return found

    @cached_property
    def tensors_of(self) -> list[float]:
        """How many tensors the calls of every unit save."""
        layout = self.structure.layout
        found: list[float] = np.bincount(layout.unit_of, self.tensors, len(self.structure.units)).tolist()
        return found

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """How many calls every call stands for, see `Structure.counts`."""
        return self.structure.counts(self.values)

    def _add(self, unit: int, action: str, seconds: float) -> None:
        self.options.append(Option(unit, action, seconds))

    def _row(self) -> NDArray[np.int64]:
        """The row of the option that is added next, without the positions of recomputations; zeros."""
        row = self.relief[len(self.options), : len(self.structure.positions)]
        row[:] = 0
        return row

    def _spare(self, first: int, calls: Sequence[int], spared_bytes: Sequence[int], lent_bytes: Sequence[int]) -> None:
        """Fill the rows from `first` on, one for each call: it spares these bytes wherever what it saves is alive.

        But for those of them that others hold too, while they do.
        """
        rows = self.relief[first : first + len(calls), : len(self.structure.positions)]
        np.multiply(self.structure.alive[list(calls)], np.array(spared_bytes, np.int64).reshape(-1, 1), out=rows)
        if any(lent_bytes):
            rows -= self.structure.lent[list(calls)] * np.array(lent_bytes, np.int64).reshape(-1, 1)

    def _spared(self, call: int, spared_bytes: int, lent_bytes: int) -> NDArray[np.int64]:
        """The same of one call, shape (positions,)."""
        spared: NDArray[np.int64] = self.structure.alive[call] * np.int64(spared_bytes)
        return spared - self.structure.lent[call] * np.int64(lent_bytes) if lent_bytes else spared

    def _look_at_calls(self, values: NDArray[np.float64]) -> None:
        """What every call saves and needs, and what every unit's calls do so together."""
        structure, layout = self.structure, self.structure.layout
        count, unit_of = len(structure.units), layout.unit_of
        saved = self.value[layout.columns["saved"]] * structure.spared
        self.saved: list[int] = saved.tolist()
        lent = np.append(self.value, 0)[layout.columns["lent"]]
        self.lent: list[int] = np.minimum(lent, saved).tolist()
        self.working: list[int] = self.value[layout.columns["working"]].tolist()
        flops = np.bincount(unit_of, values[layout.columns["flops"]], count)
        besides = np.bincount(unit_of, values[layout.columns["besides"]], count)
        self.operations: list[float] = (flops + besides).tolist()
        # Bytes between forward and backward that only a unit keeps, where it can and need be planned.
        freed = np.rint(np.bincount(unit_of, saved, count)).astype(np.int64)
        self.freed = {
            unit: saved_bytes
            for unit, saved_bytes in zip(structure.units, freed.tolist(), strict=True)
            if saved_bytes >= self.minimum_bytes and unit not in self.left_out
        }

    def timeline(self) -> Timeline:
        """Add a position for every call that runs again, which binds only if it does, and one for the update.

        And those that are looked at twice, see `loose.highest_twice`.
        """
        structure, value, options = self.structure, self.value, self.options
        count, places = len(structure.positions), np.array([*self.again.values(), *self.twice], dtype=np.intp)
        again = [structure.calls[i] for i in self.again]
        relief = self.relief[: len(options)]
        relief[:, count:-1] = np.take(relief, places, axis=1)
        relief[:, -1] = 0
        # These are positions of recomputing: no other option of the unit does anything there, but for what it spares of
        # the unit's other calls.
        alone = np.full(len(structure.units), -1, dtype=np.intp)
        for column, call in enumerate(again, count):
            if len(self.calls_of[call.unit]) == 1:
                alone[structure.layout.index[call.unit]] = column
        column_of_option = alone[np.array([option.unit for option in options], dtype=np.intp)]
        rows = np.flatnonzero(column_of_option >= 0)
        relief[rows, column_of_option[rows]] = 0
        column_of = {i: column for column, i in enumerate(self.again, count)}
        # Its own saved tensors are due now; those of the unit's other calls are still spared.
        due = [(o, column_of[i], self._others_spared(i) - takes) for o, i, takes in self.runs_again if i in column_of]
        options_, columns, amounts = np.array(due, dtype=np.int64).reshape(-1, 3).T
        relief[options_, columns] = amounts
        more = [self.own[call.backward_time] + int(value[call.before_backward]) for call in again]
        added = np.array(more, dtype=np.int64)
        base = np.concatenate([self.base, added, self.base[self.twice], [self.resident.end_bytes]])
        when = (structure.times, [call.backward_time for call in again], structure.times[self.twice], [-1])
        in_backward = (self.backward, [True] * len(again), self.backward[self.twice], [False])
        second = np.zeros(len(base), dtype=np.bool_)
        second[count + len(again) : -1] = True
        times = np.concatenate(when).astype(np.int64)
        held = Places(times, np.concatenate(in_backward).astype(np.bool_), second)
        shared = shared_holds(structure, value, base, held, self.runs_again, self.borrows)
        # Of graphs that somebody holds, what is spared at the step's end is spared in the update.
        held_bytes = add_held(structure, base, self.resident, self.own[int(structure.times[-1])])
        relief[:, -1] = np.clip(relief[:, count - 1], 0, held_bytes)
        ending = np.zeros(len(base), dtype=np.int64)
        ending[count : count + len(again)] = (structure.layout.whole(value) - self.working)[list(self.again)]
        own = structure.layout.labels
        labels = (*own, *(f"recomputation of {c.key}" for c in again), *(own[i] for i in self.twice))
        return Timeline(
            units=structure.units,
            parents=structure.parents,
            options=tuple(options),
            base_bytes=base,
            relief_bytes=relief,
            shared=tuple(shared),
            labels=(*labels, "optimizer step"),
            times=tuple(times.tolist()),
            ending_bytes=ending,
        )

    def _others_spared(self, index: int) -> int:
        """What the other calls of a call's unit spare when that call runs again."""
        members = self.calls_of[self.structure.calls[index].unit]
        if len(members) == 1:
            return 0
        alive, place = self.structure.alive, self.again[index]
        return sum(self.saved[i] for i in members if i != index and alive[i, place])
