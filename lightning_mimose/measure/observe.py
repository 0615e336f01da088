"""From a recorded step to numbers: the structure of the step and one value per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.call_shapes import call_shape
from lightning_mimose.measure.columns import Columns
from lightning_mimose.measure.handing import handing_shapes, handings
from lightning_mimose.measure.kept import KeptStep
from lightning_mimose.measure.loose import loose_shapes
from lightning_mimose.measure.positions import Positions
from lightning_mimose.measure.savings import Savings, savings
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.menu import GRADE_INSIDE
from lightning_mimose.predict.maxima import NOT_KNOWN, Maxima
from lightning_mimose.predict.shapes import LeanShape
from lightning_mimose.predict.structure import Structure


@dataclass(frozen=True, eq=False)
class Observation:
    """A measured sheltered step.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,), float64.
        peak_bytes: Measured peak above what is resident besides gradients.
        maxima: What columns are the largest of.
        seconds: What the forward of all regions took.
    """

    structure: Structure
    values: NDArray[np.float64]
    peak_bytes: int
    maxima: Maxima = NOT_KNOWN
    seconds: float = 0.0


def observe(
    trace: StepTrace, batch_bytes: int, old_gradient_bytes: int | None = None, grades: Sequence[str] = ()
) -> Observation:
    """Read a sheltered step: what was not recomputed in it cannot be, or saved nothing.

    Args:
        trace: What was recorded.
        batch_bytes: Bytes of the step's batch.
        old_gradient_bytes: Bytes of gradients at its start, in a loop that frees them when it likes; None in one that
            sets them to None between forward and backward.
        grades: Names of the grades of lean saves, if regions were surveyed for them.
    """
    peak_bytes, columns, kept = trace.peak_bytes, Columns(), KeptStep(trace)
    trace = kept.trace
    shapes = {id(call): call_shape(kept, call, columns) for call in trace.calls}
    surveyed = [call for call in kept.regions if call.items is not None and trace.pieces]
    handed = handings(trace, kept.region_of) if trace.pieces else []
    handing_of = {id(each.call): each for each in handed}
    spared = {
        id(call): savings(
            trace,
            call,
            kept.saved_by[id(call)].held,
            kept.lends[id(call)].storages,
            len(grades),
            handing_of.get(id(call)),
            kept.twice[id(call)],
        )
        for call in surveyed
    }
    positions = Positions(kept, shapes, spared, grades, columns)
    positions.read(old_gradient_bytes)
    until_last = _until_last(kept, surveyed, spared, grades, columns)
    units = tuple(dict.fromkeys(call.unit for call in trace.calls))
    place = {number: i for i, number in enumerate(kept.inputs)}
    loose = loose_shapes(trace, kept.inputs, kept.region_of, list(shapes), kept.pieces, kept.until, columns.add)
    structure = Structure(
        units=units,
        parents=_parents(units, trace.calls),
        calls=tuple(replace(shape, again=tuple(positions.again[key])) for key, shape in shapes.items()),
        positions=tuple(positions.found),
        loose=loose,
        batch=columns.add(batch_bytes),
        columns=len(columns.values),
        old_gradient_bytes=old_gradient_bytes,
        lean=tuple(
            LeanShape(
                call=list(shapes).index(id(call)),
                action=action,
                saved=columns.add(spared[id(call)][grade].gain_bytes),
                work=columns.add(spared[id(call)][grade].work),
                positions=tuple((position, peaks[grade]) for position, peaks in positions.lean[id(call)]),
                lent=columns.add(spared[id(call)][grade].lent_bytes) if kept.lends[id(call)].may_be else -1,
                working=until_last[id(call)] if action == GRADE_INSIDE else -1,
                again=tuple(positions.lean_again[id(call)]) if action == GRADE_INSIDE else (),
                borrowed=tuple(sorted(place[n] for n in spared[id(call)][grade].arguments if n in place)),
            )
            for call in surveyed
            for grade, action in enumerate(grades)
        ),
        dynamic=tuple(dict.fromkeys(call.unit for call in trace.calls if call.dynamic)),
        handing=handing_shapes(handed, list(shapes), len(grades), columns.add),
    )
    structure = replace(structure, columns=len(columns.values))
    return Observation(
        structure,
        np.array(columns.values),
        peak_bytes,
        Maxima.of(columns.maxima),
        sum(call.seconds for call in kept.regions),
    )


def _until_last(
    kept: KeptStep,
    surveyed: Sequence[Call],
    spared: Mapping[int, Sequence[Savings]],
    grades: Sequence[str],
    columns: Columns,
) -> dict[int, int]:
    """Columns of the peak of a recomputation with lean saves, of each region, up to the last tensor that it saves."""
    if GRADE_INSIDE not in grades:
        return {}
    grade, intervals = grades.index(GRADE_INSIDE), kept.trace.intervals
    return {
        id(call): columns.add_highest(spared[id(call)][grade].until_last, intervals[call.marks["again"]].level_bytes)
        for call in surveyed
    }


def _parents(units: tuple[str, ...], calls: tuple[Call, ...]) -> tuple[int, ...]:
    index = {unit: i for i, unit in enumerate(units)}
    parents: dict[str, int] = {}
    for call in calls:
        # Of its first call: that begins after its parent's first, so parents form a tree whoever else calls the unit.
        parents.setdefault(call.unit, index[call.parent.unit] if call.parent is not None else -1)
    return tuple(parents[unit] for unit in units)
