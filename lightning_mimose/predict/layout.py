"""What only the shape of a step decides, as flat arrays: computed once, used for every size's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.handing import HandingShape
from lightning_mimose.predict.shapes import NEVER

if TYPE_CHECKING:
    from lightning_mimose.predict.structure import Structure

Ints = NDArray[np.intp]


class Handed(NamedTuple):
    """A result that is handed on, and where that changes what is alive.

    Attributes:
        shape: The result.
        spared: Positions at which it is not there.
        made: Those from which it is there again until its own call's backward ends.
        taken: Those at which the backward of the call begins that saves it.
    """

    shape: HandingShape
    spared: Ints
    made: Ints
    taken: Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """The calls, units and positions of a structure by number.

    Attributes:
        structure: Whose layout it is.
    """

    structure: Structure

    @cached_property
    def index(self) -> dict[str, int]:
        """Unit -> its number."""
        return {unit: i for i, unit in enumerate(self.structure.units)}

    @cached_property
    def calls_of(self) -> dict[str, list[int]]:
        """Unit -> its calls."""
        found: dict[str, list[int]] = {}
        for i, call in enumerate(self.structure.calls):
            found.setdefault(call.unit, []).append(i)
        return found

    @cached_property
    def unit_of(self) -> Ints:
        """Shape (calls,); the number of each call's unit."""
        return np.array([self.index[call.unit] for call in self.structure.calls], dtype=np.intp)

    @cached_property
    def columns(self) -> dict[str, Ints]:
        """Field of a call -> shape (calls,), each call's column; -1 for none."""
        names = (
            "saved",
            "working",
            "before_backward",
            "flops",
            "besides",
            "entry",
            "lean",
            "lent",
            "tensors",
            "places",
            "comparing",
        )
        return {name: np.array([getattr(c, name) for c in self.structure.calls], dtype=np.intp) for name in names}

    @cached_property
    def marks(self) -> tuple[NDArray[np.int64], Ints]:
        """When calls begin and end, and when their backward begins, in order; and of which call each of these is."""
        calls = self.structure.calls
        times = np.array([(c.in_time, c.out_time, c.backward_time) for c in calls], dtype=np.int64).reshape(-1)
        owners = np.repeat(np.arange(len(calls)), 3)
        order = np.argsort(times, kind="stable")
        order = order[times[order] != NEVER]
        return times[order], owners[order]

    @cached_property
    def backward_at(self) -> dict[int, int]:
        """Time -> position in backward."""
        structure = self.structure
        return {p.time: i for i, p in enumerate(structure.positions) if p.backward}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Of every position."""
        return tuple(position.label for position in self.structure.positions)

    @cached_property
    def in_forward(self) -> tuple[Ints, Ints]:
        """Every pair of a call and a position inside its forward: calls, positions."""
        structure, times, forward = self.structure, self.structure.times, self.structure.forward
        inside = [np.flatnonzero((c.in_time <= times) & (times < c.out_time) & forward) for c in structure.calls]
        call = np.repeat(np.arange(len(inside)), [len(positions) for positions in inside])
        return call, np.concatenate([np.zeros(0, dtype=np.intp), *inside])

    def whole(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """What running a region again to its end takes above its start, of which `working` is a part; shape (calls,).

        Args:
            values: Shape (columns,).
        """
        call, column = self._in_regions
        found: NDArray[np.int64] = values[self.columns["working"]]
        here = found[call] > 0  # what stands for the rounds of a loop never runs again
        np.maximum.at(found, call[here], values[column[here]])
        return found

    @cached_property
    def _in_regions(self) -> tuple[Ints, Ints]:
        """Every pair of a region and a position inside its forward that is measured from its start: calls, columns."""
        call, position = self.in_forward
        column, entry, _, _ = self.structure.arrays
        own = np.array([each.entry if each.region else -1 for each in self.structure.calls], dtype=np.intp)
        here = (own[call] >= 0) & (own[call] == entry[position])
        return call[here], column[position[here]]

    @cached_property
    def lean_of(self) -> dict[tuple[str, str], list[int]]:
        """(unit, grade) -> numbers of its lean shapes, one for each call of the unit."""
        found: dict[tuple[str, str], list[int]] = {}
        for i, shape in enumerate(self.structure.lean):
            found.setdefault((self.structure.calls[shape.call].unit, shape.action), []).append(i)
        return found

    @cached_property
    def handed(self) -> dict[str, Handed]:
        """Unit -> its result that may be handed on."""
        calls, times, found = self.structure.calls, self.structure.times, {}
        for shape in self.structure.handing:
            taken, ends = calls[shape.taker].backward_time, calls[shape.call].end_time
            found[calls[shape.call].unit] = Handed(
                shape,
                spared=np.flatnonzero((shape.since_time <= times) & (times < taken)),
                made=np.flatnonzero((taken <= times) & (times < ends)),
                taken=np.flatnonzero(times == taken),
            )
        return found

    @cached_property
    def lean_columns(self) -> tuple[Ints, Ints, Ints]:
        """Shape (lean shapes,) each: columns of what is spared, of what is lent of it, of the work of rebuilding."""
        lean = self.structure.lean
        saved, lent, work = ([getattr(shape, name) for shape in lean] for name in ("saved", "lent", "work"))
        return np.array(saved, dtype=np.intp), np.array(lent, dtype=np.intp), np.array(work, dtype=np.intp)

    @cached_property
    def lean_again(self) -> Ints:
        """The columns of `lean_positions` where the calls are recomputed themselves."""
        shapes = ((dict(shape.again), shape.positions) for shape in self.structure.lean)
        return np.array([again.get(*pair) for again, pairs in shapes for pair in pairs], dtype=np.intp)

    @cached_property
    def lean_working(self) -> tuple[Ints, Ints]:
        """Of lean shapes that are used in recomputations: calls, and columns of the peak until these stop."""
        found = [(shape.call, shape.working) for shape in self.structure.lean if shape.working >= 0]
        call, column = np.array(found, dtype=np.intp).reshape(-1, 2).T.copy()
        return call, column

    @cached_property
    def lean_positions(self) -> tuple[Ints, Ints, Ints]:
        """All positions of lean shapes in a row: number of the shape, position, column."""
        flat = [(i, *pair) for i, shape in enumerate(self.structure.lean) for pair in shape.positions]
        shape, position, column = np.array(flat, dtype=np.intp).reshape(-1, 3).T.copy()
        return shape, position, column
