"""The shape of a step: its calls and its positions; `assemble` makes a timeline of it.

Sizes change the numbers, rarely the shape. A `Structure` is what stays; a column vector holds the numbers, one
value per column, which the estimator fits over input sizes one by one; only what calls save may be negative. Times are
ranks of marks in the measured step: a call lives from its `in` to its `out` in forward, and its saved tensors from
`out` to `backward`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.handing import NOT_TAKEN, HandingShape, limits
from lightning_mimose.predict.layout import Layout
from lightning_mimose.predict.paths import Path
from lightning_mimose.predict.shapes import NEVER, CallShape, LateShape, LeanShape, LooseShape, Position


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
        handing: What lean units may hand on to the next ones.
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
    handing: tuple[HandingShape, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Structure:
        """From plain data, as `dataclasses.asdict` makes it of one."""
        lean = (
            {
                **each,
                "positions": tuple(map(tuple, each["positions"])),
                "again": tuple(map(tuple, each["again"])),
                "borrowed": tuple(each["borrowed"]),
            }
            for each in data.get("lean", ())
        )
        return cls(
            units=tuple(data["units"]),
            parents=tuple(data["parents"]),
            calls=tuple(
                CallShape(
                    **{
                        **call,
                        "again": tuple(map(tuple, call["again"])),
                        "late": tuple(LateShape(**late) for late in call["late"]),
                    }
                )
                for call in data["calls"]
            ),
            positions=tuple(Position(**position) for position in data["positions"]),
            loose=tuple(
                LooseShape(**{**loose, **{name: tuple(loose[name]) for name in ("holders", "given")}})
                for loose in data["loose"]
            ),
            batch=data["batch"],
            columns=data["columns"],
            old_gradient_bytes=data.get("old_gradient_bytes"),
            lean=tuple(LeanShape(**each) for each in lean),
            dynamic=tuple(data.get("dynamic", ())),
            handing=tuple(HandingShape.of(each) for each in data.get("handing", ())),
        )

    @cached_property
    def passes(self) -> int:
        """Backward passes in the step."""
        return sum(position.label == "backward step" for position in self.positions)

    @cached_property
    def looped(self) -> frozenset[str]:
        """Units of which one call stands for many, see `folding`."""
        return frozenset(call.unit for call in self.calls if call.count >= 0)

    def counts(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """How many calls every call stands for, shape (calls,).

        Args:
            values: Shape (columns,).
        """
        column = np.array([call.count for call in self.calls], dtype=np.intp)
        return np.where(column < 0, 1.0, values[column])

    @cached_property
    def unsteady(self) -> frozenset[str]:
        """Units inside dynamic ones: together they may take what they always do, but no single one of them does."""
        around = tuple(f"{unit}." for unit in self.dynamic)
        return frozenset(unit for unit in self.units if unit.startswith(around)) if around else frozenset()

    def __hash__(self) -> int:
        """Computed once: a step of a large model has thousands of parts."""
        return self._hash

    @cached_property
    def path(self) -> Path:
        """The path through the model that such a step takes."""
        dropped = (call.key for call in self.calls if call.backward_time == NEVER)
        return Path(frozenset(call.key for call in self.calls), frozenset(dropped))

    def with_holds_of(self, other: Structure) -> Structure:
        """Itself, or if others held inputs longer in an equal step, or lean units borrowed more: the same with that."""
        loose = tuple(mine.with_holds_of(its) for mine, its in zip(self.loose, other.loose, strict=True))
        lean = tuple(mine.with_loans_of(its) for mine, its in zip(self.lean, other.lean, strict=True))
        handing = tuple(mine.with_holds_of(its) for mine, its in zip(self.handing, other.handing, strict=True))
        calls = tuple(mine.with_late_of(its) for mine, its in zip(self.calls, other.calls, strict=True))
        mine = (*self.calls, *self.loose, *self.lean, *self.handing)
        same = all(new is old for new, old in zip((*calls, *loose, *lean, *handing), mine, strict=True))
        return self if same else replace(self, calls=calls, loose=loose, lean=lean, handing=handing)

    @cached_property
    def handed_on(self) -> dict[str, int]:
        """Unit that is called -> up to which grade its result is handed on; 0, or `NOT_TAKEN`, where it is not."""
        needs, grades = [each.needs for each in self.handing], [each.grade for each in self.handing]
        found = dict.fromkeys(self.units, NOT_TAKEN)
        for each, limit in zip(self.handing, limits(needs, grades), strict=True):
            found[self.calls[each.call].unit] = limit if each.since_time < NEVER else 0
        return found

    def contradicted(
        self, fates: Mapping[frozenset[str], Sequence[str | None]], acting: Collection[str]
    ) -> Structure | None:
        """The same with the inputs that a planned step has shown to live longer; None if there are none.

        Args:
            fates: What became of inputs, by the calls that were given them, see `measure.inputs.InputWatch`.
            acting: Units that were not kept, and may have held what they were given.
        """
        loose = list(self.loose)
        around = tuple(f"{unit}." for unit in acting)
        for number, each in enumerate(self.loose):
            holders = [self.calls[index] for index in each.holders]
            keys = frozenset(self.calls[index].key for index in each.given)
            if not each.was_held or each.since_time is None or each.lasts or keys not in fates:
                continue
            if any(f"{call.unit}.".startswith(around) for call in holders):
                continue
            last = fates[keys]
            if len(last) == each.alike:  # else nobody knows which of them it is
                last = last[each.rank : each.rank + 1]
            if None in last:
                loose[number] = replace(each, since_time=NEVER)
            elif any(call.key in last and call.in_time >= each.since_time for call in self.calls):
                loose[number] = replace(each, since_time=None)
        changed = any(new is not old for new, old in zip(loose, self.loose, strict=True))
        return replace(self, loose=tuple(loose)) if changed else None

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
                self.handing,
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

    def left(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What is there at the end of the step besides what was at its beginning, and gradients.

        Args:
            values: Shape (observations, columns).

        Returns:
            Shape (observations,), bytes.
        """
        left: NDArray[np.float64] = self._kept(_padded(values))[:, -1]
        return left

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
        shapes, where, own = self._lean_arrays[action]
        calls = [shape.call for shape in shapes]
        kept = self._kept(padded)
        level = kept - padded[:, [shape.saved for shape in shapes]] @ self.alive[calls]
        level += padded[:, [shape.lent for shape in shapes]] @ self.lent[calls]
        np.subtract.at(level.T, where, (kept[:, where] - padded[:, own] - padded[:, entry[where]]).T)
        peak: NDArray[np.float64] = level.max(axis=1)
        return peak

    @cached_property
    def _lean_arrays(self) -> dict[str, tuple[list[LeanShape], NDArray[np.intp], NDArray[np.intp]]]:
        """Grade -> its shapes, their units' positions in backward, and the columns of these."""
        found = {}
        for action in self.grades:
            shapes = [shape for shape in self.lean if shape.action == action]
            pairs = [pair for shape in shapes for pair in shape.positions]
            where, own = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
            found[action] = shapes, where, own
        return found

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
    def surveyed(self) -> tuple[LeanShape, ...]:
        """What the least grade of lean saves would change about every call that was looked into."""
        first: dict[int, LeanShape] = {}
        for shape in self.lean:
            first.setdefault(shape.call, shape)
        return tuple(first.values())

    def tensors(self, values: NDArray[np.float64]) -> float:
        """How many tensors are saved in a step, but outside of units and where nothing was ever recomputed.

        Args:
            values: Shape (columns,).
        """
        return float(values[[call.tensors for call in self.calls if call.region]].sum())

    def forward_operations(self, values: NDArray[np.float64]) -> float:
        """Operations of what is trained, in forward; of what is outside units nothing is known.

        Args:
            values: Shape (columns,).
        """
        regions = [column for call in self.calls if call.region for column in (call.flops, call.besides)]
        return float(values[regions].sum())

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
    def forward(self) -> NDArray[np.bool_]:
        """Shape (positions,): whether a call's forward begins or ends there, in a second one after backward, too."""
        marks = {time for call in self.calls for time in (call.in_time, call.out_time)}
        return np.isin(self.times, list(marks))

    @cached_property
    def arrays(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_], NDArray[np.int64]]:
        """Of every position: its column, that of its region's start, whether it is in backward, gradients made."""
        column = np.array([p.column for p in self.positions], dtype=np.intp)
        entry = np.array([p.entry for p in self.positions], dtype=np.intp)
        backward = np.array([p.backward for p in self.positions], dtype=bool)
        gradients = np.array([p.gradient_bytes for p in self.positions], dtype=np.int64)
        return column, entry, backward, gradients

    @property
    def adds_to_gradients(self) -> bool:
        """Whether its steps may add to gradients of earlier ones, which none frees for them."""
        return self.old_gradient_bytes is not None

    @cached_property
    def due_gradients(self) -> NDArray[np.int64]:
        """Shape (positions,): bytes of the gradients there in a step that finds none of earlier ones."""
        reached = np.array([p.reached_gradient_bytes for p in self.positions], dtype=np.int64)
        due: NDArray[np.int64] = self.arrays[3] + reached
        return due


def _padded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """With a column of zeros at the end, where positions outside of any region find their start."""
    return np.concatenate([values, np.zeros((len(values), 1))], axis=1)
