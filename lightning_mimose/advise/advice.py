"""What the advisor says, as values: what to do with a batch, where memory goes, what a step looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from lightning_mimose.plan import Plan
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Timeline

RESERVE_SHARE = 0.002
"""Share of the budget kept free of plans: small allocations that no column describes (logged scalars, hooks)."""


class Advice(NamedTuple):
    """What to do with one batch.

    Attributes:
        plan: The plan; None to run sheltered.
        predicted_peak_bytes: For the batch's actual size; None when sheltered, and where no prediction is trusted.
        cache_hit: Whether the plan was known.
        infeasible: Whether even the most saving plan exceeds the budget.
        to_be_proven: Whether its step should be measured: it keeps units lean in a larger batch than was measured, or
            it is not known yet to which blocks its size is rounded up.
        bounded: Whether all that is known of its peak is a bound, see `predict.ample`.
    """

    plan: Plan | None
    predicted_peak_bytes: int | None
    cache_hit: bool
    infeasible: bool = False
    to_be_proven: bool = False
    bounded: bool = False


@dataclass(frozen=True)
class Holds:
    """What is alive at the peak of a step.

    Attributes:
        retained_bytes: Outermost unit that is kept -> what it keeps for backward.
        transient_bytes: The rest, besides what is resident.
        peak_bytes: All of it.
        position: Where the peak is.
        least_bytes: The peak under the most saving plan.
    """

    retained_bytes: Mapping[str, int]
    transient_bytes: int
    peak_bytes: int
    position: str
    least_bytes: int


@dataclass(frozen=True, eq=False)
class StepView:
    """What is known about the step of one batch size.

    Attributes:
        structure: Its shape.
        timeline: What it holds.
        margin_bytes: What plans leave free.
        least_bytes: The least budget that is sure to do.
        wants_bytes: What it would take if nothing were saved.
        trusted: Whether plans are made for it.
        routes: Plan -> what was worked out for it by those who let steps wait for each other.
    """

    structure: Structure
    timeline: Timeline
    margin_bytes: int
    least_bytes: int
    wants_bytes: int
    trusted: bool
    routes: dict[Any, Any]


def with_reserve(peak_bytes: int) -> int:
    """The budget that has this peak and the reserve in it: what is named as enough must also be enough for plans.

    Example:
        >>> with_reserve(998)
        1000
    """
    return ceil(peak_bytes / (1 - RESERVE_SHARE))
