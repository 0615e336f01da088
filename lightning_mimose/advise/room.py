"""Room for trials: which units may run once more beside a step, in no more memory than it may have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.advise.advice import Advice, with_reserve
from lightning_mimose.advise.forecast import Forecast
from lightning_mimose.measure.call import RNG_STATE_BYTES
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.shapes import CallShape, Resident
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.sizes import BatchSize

TRIAL_SHARE = 1.5
"""What a unit that runs beside a step may take where that is not known better, as a share of what is known."""


def room_to_try(
    forecast: Forecast, size: BatchSize, resident: Resident, advice: Advice, *, split: bool = False
) -> set[str]:
    """Units that may run once more beside a step, with all they save kept.

    In a planned step the room is the peak it is predicted to have anyway. In a sheltered one it is the budget, judged
    by the nearest size that was measured; a larger one is taken to need quadratically more.

    Args:
        forecast: What is known.
        size: The batch's size.
        resident: What is resident.
        advice: What the step will do.
        split: Whether they run without keeping what they save, but with two results to compare.
    """
    wanted = dict(size.dims)
    if advice.plan is not None:
        prediction = forecast.estimator.predict(wanted)
        if prediction is None or advice.predicted_peak_bytes is None:
            return set()
        room = advice.predicted_peak_bytes - resident.total_bytes
        return _beside(prediction, forecast.timeline_of(prediction, resident), advice.plan.actions, room, split)

    def growth(seen: Mapping[str, int]) -> float:
        # Dimensions of the same lengths are one: tokens and their mask.
        return prod(max(1.0, now / max(then, 1)) ** 2 for now, then in {(wanted[name], seen[name]) for name in seen})

    alike = [each for each in forecast.estimator.observations() if each[0].keys() == wanted.keys()]
    if not alike:
        return set()
    dims, structure, values = min(alike, key=lambda each: growth(each[0]))
    room = int((forecast.budget_bytes - resident.total_bytes) / growth(dims))
    prediction = Prediction(structure, values, 0.0, False)
    return _beside(prediction, forecast.timeline_of(prediction, resident), forecast.shelter, room, split)


def may_prove(
    forecast: Forecast, size: BatchSize, resident: Resident, actions: Mapping[str, str], units: set[str]
) -> bool:
    """Whether units may run once more beside a planned step, with nothing kept of what they save.

    Args:
        forecast: What is known.
        size: The batch's size.
        resident: What is resident.
        actions: Unit -> what it does in the step.
        units: Those that are to be proven, for they act for the first time.
    """
    prediction = forecast.estimator.predict(dict(size.dims))
    if prediction is None:
        return False
    structure, values = prediction.structure, prediction.values
    timeline = forecast.timeline_of(prediction, resident)
    number, position = structure.layout.in_forward

    def reached(index: int, call: CallShape) -> int:
        # Their own action spares nothing yet.
        others = {unit: action for unit, action in actions.items() if (unit, action) in timeline.option_index}
        others.pop(call.unit, None)
        inside = position[number == index]
        kept = timeline.level_bytes(timeline.chosen(others))[inside].max() if inside.size else 0
        takes = values[[call.given, structure.batch, call.returned, call.lean if call.lean >= 0 else call.working]]
        return with_reserve(int(kept - values[call.working] + takes.sum()))

    calls = [(i, call) for i, call in enumerate(structure.calls) if call.unit in units]
    return all(reached(i, call) <= forecast.budget_bytes for i, call in calls)


def _beside(
    prediction: Prediction,
    timeline: Timeline,
    actions: Mapping[str, str],
    room_bytes: int,
    split: bool,
) -> set[str]:
    """Units whose trial fits into a room, beside what the units before them keep."""
    structure, values = prediction.structure, prediction.values
    chosen = [each for each in actions.items() if each in timeline.option_index]
    made = structure.arrays[3]
    number, position = structure.layout.in_forward

    def before(index: int, call: CallShape) -> float:
        """What is there when a call begins, gradients of an earlier backward pass of the step included."""
        inside = position[number == index]
        # Not the call's own action, or that of a unit around it: what those spare, they spare later.
        others = [timeline.option_index[unit, a] for unit, a in chosen if not f"{call.unit}.".startswith(f"{unit}.")]
        spared = timeline.relief_bytes[others][:, inside].sum(axis=0).min() if inside.size else 0
        return float(values[call.entry] + made[inside].max(initial=0) - spared)

    # The first call is the one that is tried; which of them that is, need not be the same in every step.
    regions = [(i, call) for i, call in enumerate(structure.calls) if call.region]
    takes = _splitting if split else _rebuilding
    large = {c.unit for i, c in regions if with_reserve(int(before(i, c) + takes(structure, i, values))) > room_bytes}
    return {call.unit for _, call in regions} - large


def _splitting(structure: Structure, index: int, value: NDArray[np.float64]) -> float:
    """What it takes to split a call beside a step: nothing that it saves is kept, but there are two results."""
    call = structure.calls[index]
    takes = value[call.lean] + 2 * value[call.returned] if call.lean >= 0 else value[call.working]
    return float(TRIAL_SHARE * (value[call.given] + takes))


def _rebuilding(structure: Structure, index: int, value: NDArray[np.float64]) -> float:
    """What it takes to compare recipes: copies of what a call is given, it as lean as can be, and a tensor again."""
    call, forward = structure.calls[index], structure.forward
    if call.rebuilding < 0:
        return TRIAL_SHARE * float(value[call.given] + value[call.working])
    leanest = [shape for shape in structure.lean if shape.call == index][-1]
    peaks = [value[column] for position, column in leanest.positions if forward[position]]
    given = value[call.given] + value[structure.batch]  # of which it may be given something, too
    return float(given + max(peaks, default=value[call.working]) + value[call.rebuilding] + RNG_STATE_BYTES)
