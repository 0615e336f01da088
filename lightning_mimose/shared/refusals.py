"""What a shared budget says when it refuses something."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import BudgetInfeasibleError


def no_room_error(job: str, rest_bytes: int, budget_bytes: int, others: Mapping[str, int]) -> BudgetInfeasibleError:
    """For a job that does not fit.

    Args:
        job: Its name.
        rest_bytes: What it holds between its steps.
        budget_bytes: The shared budget.
        others: Other job -> what it holds between its steps; empty if the job would not fit alone.
    """
    holds = (
        f"Job {job!r} holds {format_bytes(rest_bytes)} between its steps (parameters, gradients, optimizer state), and "
        f"the shared budget is {format_bytes(budget_bytes)}"
    )
    if not others:
        text = f"{holds}: it does not fit even alone. Give a larger budget or train a smaller model."
    else:
        told = ", ".join(f"{name!r} {format_bytes(held)}" for name, held in others.items())
        text = (
            f"{holds}, of which other jobs hold {format_bytes(sum(others.values()))} ({told}). What is left is too "
            "little for the steps of all of them. Run fewer jobs at a time, give a larger budget, or let this job wait "
            'until another one ends: SharedBudget(..., when_full="wait").'
        )
    return BudgetInfeasibleError(
        text, budget_bytes=budget_bytes, resident_bytes=rest_bytes, smallest_feasible_bytes=None
    )
