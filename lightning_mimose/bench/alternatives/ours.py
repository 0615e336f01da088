"""This package in several forms, among them what it grew out of: a static plan, and the Mimose paper's scheduler."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lightning_mimose.bench.runner import Case, MimoseRunner, NotRun, Runner
from lightning_mimose.errors import BudgetInfeasibleError
from lightning_mimose.plan import Plan
from lightning_mimose.plan.greedy import greedy_order, plan_greedy
from lightning_mimose.plan.structure import plan_of
from lightning_mimose.predict.timeline import Timeline

RECOMPUTE = ["recompute"]


def full(case: Case) -> Runner:
    """The default: lean saves and recomputation."""
    return MimoseRunner(case)


def recompute(case: Case) -> Runner:
    """Recomputation alone."""
    return MimoseRunner(case, actions=RECOMPUTE)


def greedy(case: Case) -> Runner:
    """The paper's order of units, on our estimator and until our timeline says that it fits."""
    return MimoseRunner(case, actions=RECOMPUTE, planner="greedy")


def paper(case: Case) -> Runner:
    """The paper's scheduler as published: one scalar for the size, greedy, and bytes taken off a sum."""
    return MimoseRunner(
        case,
        actions=RECOMPUTE,
        planner=_as_published,
        size_fn=_one_scalar,
        notes=["Its errors are the sum model's, measured on our timeline; whatever it leaves over the budget runs so."],
    )


def _as_published(timeline: Timeline, budget_bytes: int) -> Plan:
    answer = plan_greedy(timeline, budget_bytes, until_fits=False)
    if answer is not None:
        return answer
    return plan_of(timeline, np.array([option for option, _ in greedy_order(timeline)], dtype=np.intp))


def _one_scalar(batch: Any) -> int:
    """Elements of the batch's largest tensor: what one number can say about a size."""
    return max(
        (
            leaf.numel()
            for leaf in tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
            if isinstance(leaf, torch.Tensor)
        ),
        default=1,
    )


def static(case: Case) -> Runner:
    """One plan for all batches: the one that our planner makes for the largest, recomputing only."""
    key = f"static plan for {case.budget_bytes}"
    if key not in case.shared:
        case.shared[key] = _plan_for_largest(case)
    plan, seconds = case.shared[key]

    def forced(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        # Where a small batch gains nothing from a unit, its timeline does not offer it.
        return {unit: action for unit, action in plan if (unit, action) in timeline.option_index}

    runner = MimoseRunner(
        case,
        actions=RECOMPUTE,
        planner=forced,
        notes=["It learns like ours, so its first steps are sheltered; a planner that runs before training has none."],
    )
    runner.planning_seconds = seconds
    return runner


def _plan_for_largest(case: Case) -> tuple[Plan, float]:
    """The plan, and what finding it took once everything was learnt (seconds)."""
    case.tell("static: learning what the largest batch needs")
    probe = MimoseRunner(case, actions=RECOMPUTE, planner="exact")
    try:
        for batch in case.work.batches:
            probe.step(batch)
        began = time.perf_counter()
        plan = probe.mimose.plan(case.largest)
        return plan, time.perf_counter() - began
    except BudgetInfeasibleError as error:
        raise NotRun(f"no plan fits the largest batch ({error.smallest_feasible_bytes or 0:,} bytes would)") from error
    finally:
        probe.close()
