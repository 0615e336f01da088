"""The Mimose paper's scheduler (arXiv 2209.02478), with its sum model of memory, for comparison.

It takes bytes off a total instead of walking the timeline, and does not look at time. What it says is needed is
therefore wrong at the end of the network, where recomputing a unit relieves nothing; see `until_fits`.
"""

from __future__ import annotations

import numpy as np

from lightning_mimose.menu import RECOMPUTE
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.structure import plan_of
from lightning_mimose.predict.timeline import Timeline

ALIKE = 0.9
"""Units of at least this share of a bucket's largest are in that bucket: the paper's 10 %-wide buckets."""


def greedy_order(timeline: Timeline) -> list[tuple[int, int]]:
    """(option, bytes) of every top-level *recompute*, in the order in which the paper's scheduler takes them.

    Units of similar size share a bucket. The bucket of the largest units comes first; inside a bucket the earliest
    unit does, since what it saves is alive the longest.
    """
    most = timeline.relief_bytes.max(axis=1, initial=0).tolist()
    sizes = [
        (option, int(most[option]))
        for option, choice in enumerate(timeline.options)
        if choice.action == RECOMPUTE and timeline.parents[choice.unit] < 0 and most[option] > 0
    ]
    sizes.sort(key=lambda entry: (-entry[1], timeline.options[entry[0]].unit))
    order: list[tuple[int, int]] = []
    while sizes:
        bucket = [entry for entry in sizes if entry[1] >= ALIKE * sizes[0][1]]
        sizes = sizes[len(bucket) :]
        order += sorted(bucket, key=lambda entry: timeline.options[entry[0]].unit)
    return order


def plan_greedy(timeline: Timeline, budget_bytes: int, *, until_fits: bool = True) -> Plan | None:
    """The plan of the paper's scheduler.

    Args:
        timeline: What the step would hold, and the options there are.
        budget_bytes: What the step may reach.
        until_fits: Where the sum model's answer does not fit on the timeline, go on taking units in the same order
            until it does. If False the paper's answer is returned as it is: its `predicted_peak_bytes` is the
            timeline's, and **may be above the budget**.

    Returns:
        The plan, or None when taking every unit would not be enough (by the timeline; by the sum model when
        `until_fits` is False).

    Example:
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 1.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [7, 0, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> plan_greedy(timeline, 16, until_fits=False).predicted_peak_bytes, plan_greedy(timeline, 16)
        (22, None)
    """
    need = int(timeline.base_bytes.max(initial=0)) - budget_bytes
    order = greedy_order(timeline)
    count = 0
    while need > 0 and count < len(order):
        need -= order[count][1]
        count += 1
    if not until_fits:
        return _first(timeline, order, count) if need <= 0 else None
    for taken in range(count, len(order) + 1):
        plan = _first(timeline, order, taken)
        if plan.predicted_peak_bytes <= budget_bytes:
            return plan
    return None


def _first(timeline: Timeline, order: list[tuple[int, int]], count: int) -> Plan:
    """The plan that takes the first `count` options of the order."""
    return plan_of(timeline, np.array([option for option, _ in order[:count]], dtype=np.intp))
