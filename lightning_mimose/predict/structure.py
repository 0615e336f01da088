"""The shape of a step: its calls and its positions; `assemble` makes a timeline of it.

Sizes change the numbers, rarely the shape. A `Structure` is what stays; a column vector holds the numbers, one
non-negative value per column, which the estimator fits over input sizes one by one. Times are ranks of marks
in the measured step: a call lives from its `in` to its `out` in forward, and its saved tensors from `out` to
`backward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.layout import Layout

NEVER = 1 << 60
"""The time of an event that does not happen."""


class Resident(NamedTuple):
    """What is alive in a step besides activations; a tuple, because every step makes some and looks plans up by them.

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
        besides: Column of what its recomputation does besides them, in operations that take as long.
        seconds: Column of the seconds its recomputation took.
        given: Column of the bytes of what it is given.
        returned: Column of the bytes of what it returns.
        entry: Column of the live bytes at its start when everything before it is kept, -1 if not recomputed.
        lean: Column of the peak of its forward while nothing is kept, above its start, -1 if not recomputed.
        lent: Column of the bytes of what it saves that others hold too for a while, see `measure.lent`; -1 if there are
            none.
        lent_until: When it is the call's alone; no part of what makes two steps alike.
        kept_until: When what it saves is gone, if there is no backward of it (its result was dropped); or 0. No
            part of what makes two steps alike: a graph in a cycle goes whenever Python looks for those.
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
    besides: int
    seconds: int
    given: int
    returned: int
    entry: int = -1
    lean: int = -1
    lent: int = -1
    lent_until: int = field(default=0, compare=False)
    kept_until: int = field(default=0, compare=False)

    @property
    def end_time(self) -> int:
        """When what it saves is gone or due."""
        return self.kept_until or self.backward_time


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
        outlives: Whether it was still there when backward was over; no part of what makes two steps alike.
    """

    size: int
    holders: tuple[int, ...]
    until_time: int
    outlives: bool = field(default=False, compare=False)

    @property
    def was_held(self) -> bool:
        """Whether calls held it in the measured step; if not (an input inside one), what was measured is without it."""
        return self.until_time >= 0


@dataclass(frozen=True)
class LeanShape:
    """What one grade of lean saves changes about one call.

    Attributes:
        call: Index of the call.
        action: Name of the grade.
        saved: Column of the bytes it spares between forward and backward.
        work: Column of the operations that rebuilding takes.
        positions: (index of a position inside the call's forward or backward, column of the live bytes there).
        items: Storages that the call saves, and that are looked at; no part of what makes two steps alike.
        lent: Column of the bytes of what it spares that others hold too for a while, -1 if there are none.
    """

    call: int
    action: str
    saved: int
    work: int
    positions: tuple[tuple[int, int], ...]
    items: int = field(default=0, compare=False)
    lent: int = -1


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
        dynamic: Units inside which sizes depend on what tensors hold (a router's choice), not on the batch's alone.
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
    dynamic: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def passes(self) -> int:
        """Backward passes in the step."""
        return sum(position.label == "backward step" for position in self.positions)

    @cached_property
    def unsteady(self) -> frozenset[str]:
        """Units inside dynamic ones: together they may take what they always do, but no single one of them does."""
        around = tuple(f"{unit}." for unit in self.dynamic)
        return frozenset(unit for unit in self.units if unit.startswith(around)) if around else frozenset()

    def __hash__(self) -> int:
        """Computed once: a step of a large model has thousands of parts."""
        return self._hash

    @cached_property
    def calls_made(self) -> frozenset[str]:
        """Keys of all calls: a step on another path through the model makes others."""
        return frozenset(call.key for call in self.calls)

    @cached_property
    def loose_holders(self) -> tuple[frozenset[str], ...]:
        """Of every loose storage: the keys of the calls that hold it."""
        return tuple(frozenset(self.calls[index].key for index in loose.holders) for loose in self.loose)

    @cached_property
    def in_times(self) -> list[int]:
        """When forwards begin, in order."""
        return sorted(call.in_time for call in self.calls)

    @cached_property
    def out_times(self) -> dict[str, int]:
        """Key of a call -> when its forward ends."""
        return {call.key: call.out_time for call in self.calls}

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

        The activation peak with everything kept, the one with every region recomputed, and what each region frees.

        Args:
            values: Shape (observations, columns).

        Returns:
            Shape (observations, 2 + regions), bytes.
        """
        kept = self._kept(_padded(values)).max(axis=1)
        regions = [call for call in self.calls if call.region]
        saved = values[:, [call.saved for call in regions]]
        start = values[:, [call.before_backward for call in regions]]
        working = values[:, [call.working for call in regions]]
        out = np.array([call.out_time for call in regions]).reshape(-1, 1)
        backward = np.array([call.backward_time for call in regions])
        held = (out <= backward) & (backward < backward.reshape(-1, 1))
        recomputed = (start + working - saved @ held).max(axis=1, initial=0.0)
        return np.concatenate([np.stack([kept, recomputed], axis=1), saved], axis=1)

    def lean_peaks(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The activation peaks with each of `grades` everywhere, shape (observations, grades), bytes."""
        padded = _padded(values)
        peaks = np.zeros((len(values), len(self.grades)))
        for index, action in enumerate(self.grades):
            peaks[:, index] = self._lean_peak(padded, action)
        return peaks

    def _kept(self, padded: NDArray[np.float64]) -> NDArray[np.float64]:
        column, entry, _, _ = self.arrays
        kept: NDArray[np.float64] = padded[:, column] + padded[:, entry]
        return kept

    @cached_property
    def grades(self) -> tuple[str, ...]:
        """Names of the grades of lean saves that were surveyed."""
        return tuple(dict.fromkeys(shape.action for shape in self.lean))

    def _lean_peak(self, padded: NDArray[np.float64], action: str) -> NDArray[np.float64]:
        _, entry, _, _ = self.arrays
        kept = self._kept(padded)
        level = kept.copy()
        for shape in self.lean:
            if shape.action == action:
                level -= padded[:, [shape.saved]] * self.alive[shape.call]
                level += padded[:, [shape.lent]] * self.lent[shape.call]
                where, own = [p for p, _ in shape.positions], [c for _, c in shape.positions]
                level[:, where] -= kept[:, where] - padded[:, own] - padded[:, entry[where]]
        peak: NDArray[np.float64] = level.max(axis=1)
        return peak

    @cached_property
    def times(self) -> NDArray[np.int64]:
        """Shape (positions,): when they are."""
        return np.array([p.time for p in self.positions], dtype=np.int64)

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """Shape (calls, positions): whether what a call saves is alive at a position of backward or forward."""
        times = self.times
        out = np.array([c.out_time for c in self.calls]).reshape(-1, 1)
        backward = np.array([c.end_time for c in self.calls]).reshape(-1, 1)
        alive: NDArray[np.bool_] = (out <= times) & (times < backward)
        return alive

    @cached_property
    def lent(self) -> NDArray[np.bool_]:
        """Shape (calls, positions): whether others hold what a call has lent, so that it is not spared."""
        until = np.array([c.lent_until for c in self.calls]).reshape(-1, 1)
        lent: NDArray[np.bool_] = self.alive & (self.times < until)
        return lent

    @cached_property
    def layout(self) -> Layout:
        """What its shape alone decides, as arrays."""
        return Layout(self)

    @cached_property
    def spared(self) -> NDArray[np.bool_]:
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
    def arrays(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_], NDArray[np.int64]]:
        """Of every position: its column, that of its region's start, whether it is in backward, gradients made."""
        column = np.array([p.column for p in self.positions], dtype=np.intp)
        entry = np.array([p.entry for p in self.positions], dtype=np.intp)
        backward = np.array([p.backward for p in self.positions], dtype=bool)
        gradients = np.array([p.gradient_bytes for p in self.positions], dtype=np.int64)
        return column, entry, backward, gradients


def _padded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """With a column of zeros at the end, where positions outside of any region find their start."""
    return np.concatenate([values, np.zeros((len(values), 1))], axis=1)
