"""The two errors that end a training for want of memory, in words: what was asked, what was found, what to change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

from lightning_mimose.advise.advice import Holds, with_reserve
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import BudgetInfeasibleError, DeviceMemoryError
from lightning_mimose.measure.update import UpdateReserve
from lightning_mimose.plan.best import small_plan
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sizes import BatchSize

SCARCE_SHARE = 0.1
"""Share of the budget: what the device has beyond it is worth mentioning if it is more."""


class Refuser:
    """Says that the budget cannot be kept, as an error or a warning.

    Args:
        advisor: What is known.
        on_infeasible: Which of the two.
        update: Knows what the first updates will bring.

    Attributes:
        beside: Says what other trainings in the same budget hold.
        exceed: Lets a step that only a warning was given for go beyond the budget.
    """

    def __init__(self, advisor: Advisor, on_infeasible: Literal["raise", "warn"], update: UpdateReserve) -> None:
        self._advisor, self._update = advisor, update
        self._raises = advisor.planner.refuses = on_infeasible == "raise"
        self._told_bytes = 0
        """The most that a warning has said a batch needs: with lengths that vary there would be one for each."""
        self.beside: Callable[[], str] = str
        self.exceed: Callable[[], object] = bool

    def update(
        self, lasting_bytes: int, gradient_bytes: int, least_bytes: int, parts: str
    ) -> BudgetInfeasibleError | None:
        """See whether the optimizers' updates alone fit.

        Args:
            lasting_bytes: Parameters, buffers and state.
            gradient_bytes: Gradients that are there.
            least_bytes: What an update reaches.
            parts: What that consists of.

        Returns:
            What to raise if they do not.
        """
        budget = self._advisor.budget_bytes
        if least_bytes <= budget or not self._raises:
            return None
        why = f"the optimizer's update alone needs {format_bytes(least_bytes)} ({parts}), before any activation"
        instead = "train fewer parameters, or use an optimizer with less state"
        return infeasible_error(budget, lasting_bytes + gradient_bytes, least_bytes, why, instead)

    def by_prediction(self, size: BatchSize, resident: Resident) -> None:
        """Refuse a batch whose most saving plan is predicted to exceed the budget."""
        advisor = self._advisor
        timeline, _ = advisor.timeline(dict(size.dims))
        # Training that goes on does not wait for the exact answer.
        plan = advisor.least(timeline) if self._raises else small_plan(advisor.menu(timeline))
        sure, found = advisor.sure_bytes(timeline), "" if self._raises else " found at once"
        where = timeline.peak_position(dict(plan))
        least = min(sure, plan.predicted_peak_bytes)
        self.refuse(size, resident, least, sure, f"under the most saving plan{found} (at: {where})")

    def by_update(self, size: BatchSize, resident: Resident) -> None:
        """Refuse a batch of whose update it is known that it will exceed the budget, for those before it did."""
        needed, most = self._update.surely_bytes(resident.lasting_bytes)
        how = "in its update, with what runs beside that (clipping, hooks), whatever is recomputed before it"
        self.refuse(size, resident, needed, with_reserve(most), how)

    def refuse(self, size: BatchSize, resident: Resident, needed: int, sure: int, how: str) -> None:
        """Refuse a batch.

        Args:
            size: Its size.
            resident: What is resident.
            needed: Bytes that it needs.
            sure: The least budget that is sure to do.
            how: Under what it needs them.

        Raises:
            BudgetInfeasibleError: Unless only a warning was asked for.
        """
        budget = self._advisor.budget_bytes
        what = f"a batch of {self._advisor.tracker.named(size)} needs {format_bytes(needed)} {how}"
        if self._raises:
            # A loop that goes on after the error must be refused again, not find the plan.
            self._advisor.planner.forget()
            # Of the same batch later, when optimizers have their state and there are gradients to be zeroed.
            later = self._update.later(resident)
            more = later.total_bytes - resident.total_bytes
            if more > 0:
                what += f" now, and {format_bytes(more)} more in later steps (gradients, optimizer state)"
            view = self._advisor.step_view(size, later)
            sure = max(sure, view.least_bytes if view else sure + later.total_bytes - resident.total_bytes)
            raise infeasible_error(budget, resident.total_bytes, sure, what + self.beside())
        if needed > self._told_bytes:
            self._told_bytes = needed
            warnings.warn(
                f"The budget of {format_bytes(budget)} cannot be kept: {what}. Going on with that plan, here and in "
                "other batches; the next to be told of is one that needs more.",
                stacklevel=4,
            )
        self.exceed()


def infeasible_error(
    budget_bytes: int,
    resident_bytes: int,
    smallest: int,
    why: str,
    instead: str = "use smaller batches or an optimizer with less state",
) -> BudgetInfeasibleError:
    """No plan keeps the step inside the budget.

    Args:
        budget_bytes: What was asked for.
        resident_bytes: What is resident before the step.
        smallest: The least budget that is sure to do.
        why: What needs how much, as the end of a sentence.
        instead: What may help but a larger budget.
    """
    return BudgetInfeasibleError(
        f"The budget of {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) cannot be kept: {why}. "
        f"Resident are {resident_bytes:,} bytes ({format_bytes(resident_bytes)}). Give at least {smallest:,} bytes "
        f'({format_bytes(smallest)}), {instead}, or go on with the most saving plan by on_infeasible="warn".',
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        smallest_feasible_bytes=smallest,
    )


def device_memory_error(
    budget_bytes: int,
    device: str,
    resident_bytes: int,
    holds: Holds | None,
    error: BaseException,
    hint: str,
    *,
    beyond_bytes: int = 0,
) -> DeviceMemoryError:
    """The device is out of memory in spite of the plan: where the memory went.

    Args:
        budget_bytes: The budget.
        device: Its description.
        resident_bytes: What is resident before the step.
        holds: What the step holds at its peak, where that is known.
        error: What the device said.
        hint: Why the step was not run again.
        beyond_bytes: What the device has beyond that.
    """
    retained = holds.retained_bytes if holds is not None else {}
    where = [f"resident {format_bytes(resident_bytes)}"]
    if holds is not None:
        largest = sorted(retained.items(), key=lambda item: -item[1])[:5]
        kept = ", ".join(f"{unit} {format_bytes(size)}" for unit, size in largest)
        where.append(f"retained by units {format_bytes(sum(retained.values()))}" + (f" ({kept})" if kept else ""))
        where.append(f"transient and between units {format_bytes(holds.transient_bytes)}")
        where.append(f"predicted peak {format_bytes(holds.peak_bytes)} at {holds.position}")
    least = holds.least_bytes if holds is not None else None
    fits = f"The most saving plan needs {format_bytes(least)} for this batch. " if least is not None else ""
    if beyond_bytes > SCARCE_SHARE * budget_bytes:
        what = "ran out of what the budget allows it,"
        way_out = f"Give a larger budget (the device has {format_bytes(beyond_bytes)} more)"
    else:
        what = "ran out of memory under a budget of"
        way_out = "Give a smaller budget (what other processes hold is not there)"
    return DeviceMemoryError(
        f"{device[:1].upper()}{device[1:]} {what} {format_bytes(budget_bytes)}: {'; '.join(where)}. {hint} {fits}"
        f"{way_out}, use smaller batches, or an optimizer with less state. The device said: "
        f"{str(error).splitlines()[0]}",
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        retained_bytes=retained,
        smallest_feasible_bytes=least,
    )
