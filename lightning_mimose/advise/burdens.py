"""Units that a shelter is better off without: recomputed, they hold more of what they are given than they save."""

from __future__ import annotations

from lightning_mimose.advise.advice import with_reserve
from lightning_mimose.advise.forecast import Forecast
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sizes import BatchSize


def burdens_of(forecast: Forecast, size: BatchSize, resident: Resident) -> list[str]:
    """The units that are not to be recomputed for a batch to run sheltered inside the budget.

    Which ones that are, shows only when a step was measured: pools and layers that drop tokens keep a part of what they
    are given, and hold all of it where they are to run again.

    Args:
        forecast: What is known.
        size: The batch's size, which was measured.
        resident: What is resident.

    Returns:
        They; none if it would not run inside the budget without them either.
    """
    prediction = forecast.estimator.predict(dict(size.dims))
    if prediction is None:
        return []
    timeline = forecast.timeline_of(prediction, resident)
    acting = {unit: action for unit, action in forecast.shelter.items() if (unit, action) in timeline.option_index}
    # What saves next to nothing has no option: no plan recomputes it, and predictions are without it.
    found = [unit for unit in forecast.shelter if unit not in acting and unit in prediction.structure.units]
    peak = timeline.peak_bytes(acting, learns=True)
    while acting:
        others = ({other: acting[other] for other in acting if other != unit} for unit in acting)
        reached = dict(zip(acting, (timeline.peak_bytes(each, learns=True) for each in others), strict=True))
        unit = min(reached, key=reached.__getitem__)
        if reached[unit] >= peak:
            break
        peak = reached[unit]
        del acting[unit]
        found.append(unit)
    return found if with_reserve(peak) <= forecast.budget_bytes else []
