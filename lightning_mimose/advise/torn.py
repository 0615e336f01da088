"""Which of several blocks lengths are rounded up to, where all that was seen is described by each: a step may tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_mimose.predict.fit import Blocks
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.timeline import Timeline


def torn_by(
    prediction: Prediction,
    resident: Resident,
    timeline_of: Callable[[Prediction, Resident], Timeline],
    actions: Mapping[str, str],
    least_bytes: float,
) -> list[Blocks]:
    """The blocks that a step's size may be rounded up to instead, of which its peak would tell.

    Of long lengths it would not: blocks of 16 and of 32 are nearly the same there.

    Args:
        prediction: Of the step.
        resident: What is resident.
        timeline_of: Makes a timeline of both.
        actions: What units do in the step.
        least_bytes: By how much its peak has to be lower with them.
    """
    if not prediction.torn:
        return []

    def peak_of(one: Prediction) -> int:
        timeline = timeline_of(one, resident)
        known = {unit: action for unit, action in actions.items() if (unit, action) in timeline.option_index}
        return timeline.peak_bytes(known)

    peak = peak_of(prediction)
    return [
        blocks
        for blocks, values in prediction.torn.items()
        if peak - peak_of(replace(prediction, values=values)) > least_bytes
    ]
