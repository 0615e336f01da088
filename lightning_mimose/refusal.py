"""The two errors that end a training for want of memory, in words: what was asked, what was found, what to change."""

from __future__ import annotations

from lightning_mimose.advisor import Holds
from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import BudgetInfeasibleError, DeviceMemoryError


def infeasible_error(budget_bytes: int, resident_bytes: int, smallest: int, why: str) -> BudgetInfeasibleError:
    """No plan keeps the step inside the budget.

    Args:
        budget_bytes: What was asked for.
        resident_bytes: What is resident before the step.
        smallest: The least budget that is sure to do.
        why: What needs how much, as the end of a sentence.
    """
    return BudgetInfeasibleError(
        f"The budget of {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) cannot be kept: {why}. "
        f"Resident are {resident_bytes:,} bytes ({format_bytes(resident_bytes)}). Give at least {smallest:,} bytes "
        f"({format_bytes(smallest)}), use smaller batches or an optimizer with less state, or go on with the most "
        'saving plan by on_infeasible="warn".',
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        smallest_feasible_bytes=smallest,
    )


def device_memory_error(
    budget_bytes: int, device: str, resident_bytes: int, holds: Holds | None, error: BaseException, hint: str
) -> DeviceMemoryError:
    """The device is out of memory in spite of the plan: where the memory went.

    Args:
        budget_bytes: The budget.
        device: Its description.
        resident_bytes: What is resident before the step.
        holds: What the step holds at its peak, where that is known.
        error: What the device said.
        hint: Why the step was not run again.
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
    return DeviceMemoryError(
        f"{device[:1].upper()}{device[1:]} ran out of memory under a budget of {format_bytes(budget_bytes)}: "
        f"{'; '.join(where)}. {hint} {fits}Give a smaller budget (what other processes hold is not there), use "
        f"smaller batches, or an optimizer with less state. The device said: {str(error).splitlines()[0]}",
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        retained_bytes=retained,
        smallest_feasible_bytes=least,
    )
