"""The best plan, by whichever way is quickest: all are looked at where they are few, and HiGHS is asked where not."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mimose.plan.exhaustive import Every
from lightning_mimose.plan.optimal import least_peak_heuristic, plan_exact, smallest_feasible
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.structure import Incumbent, best_incumbent, plan_of
from lightning_mimose.predict.timeline import Timeline


def fastest_plan(
    timeline: Timeline, budget_bytes: int, *, time_limit_seconds: float = 20.0, incumbents: Sequence[Incumbent] = ()
) -> Plan | None:
    """The plan that fits the budget and adds the least time; see `plan_exact`.

    Args:
        timeline: What the step would hold, and the options there are.
        budget_bytes: What no position may exceed.
        time_limit_seconds: When to stop and return the best plan known by then.
        incumbents: Plans known already; the result is never slower than one of them that fits.

    Returns:
        The plan; None when there is none (or none was found before the time was over).
    """
    if (every := Every.of(timeline)) is None:
        return plan_exact(timeline, budget_bytes, time_limit_seconds=time_limit_seconds, incumbents=incumbents)
    pick = every.fastest(budget_bytes)
    if pick is None:
        return None
    best = plan_of(timeline, pick)
    known = best_incumbent(timeline, budget_bytes, incumbents, best.added_seconds)  # faster by its rounding at most
    return best if known is None else known


def smallest_plan(timeline: Timeline, *, time_limit_seconds: float = 20.0) -> Plan:
    """The plan with the least peak that there is; of several, the one that adds least time.

    Args:
        timeline: What the step would hold, and the options there are.
        time_limit_seconds: When to stop and return the best plan known by then.
    """
    every = Every.of(timeline)
    if every is None:
        return smallest_feasible(timeline, time_limit_seconds=time_limit_seconds)
    return plan_of(timeline, every.smallest())


def small_plan(timeline: Timeline) -> Plan:
    """A plan whose peak is close to the least that is possible, in milliseconds."""
    every = Every.of(timeline)
    return least_peak_heuristic(timeline) if every is None else plan_of(timeline, every.smallest())
