"""Every error of the package, as a tree.

    MimoseError
    ├── BudgetError              a budget that cannot be parsed, is negative, or exceeds the device
    ├── BudgetInfeasibleError    no plan keeps this batch inside the budget
    ├── UnitsError               unit patterns that match nothing, or a model with nothing to plan
    ├── SizeError                nothing to read a size in, or another structure than that of earlier batches
    ├── LossError                a loss function that returns no loss, in a plain loop
    ├── ClosedError              a step of a plain loop after close()
    ├── PlanError                a forced plan that names unknown units, actions, or nested units
    ├── RecomputeError           a unit that cannot be repeated, in a step that cannot be run again
    ├── SharedBudgetError        a shared budget that cannot be joined: it contradicts itself, or its name is taken
    ├── DeviceMemoryError        the device ran out of memory all the same; also a torch.OutOfMemoryError
    └── UnsupportedError         a strategy or setting that the package refuses, by name

A message says what was asked, what was found and what to change, with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class MimoseError(Exception):
    """Base of every error that the package raises on purpose."""


class BudgetError(MimoseError, ValueError):
    """A budget that cannot be parsed, is not positive, or exceeds the device."""


class BudgetInfeasibleError(MimoseError):
    """No plan keeps the step inside the budget.

    Attributes:
        budget_bytes: What was asked for.
        resident_bytes: What parameters, gradients, optimizer state and batch take by themselves.
        smallest_feasible_bytes: The least budget that would work with the current units and actions, where known.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, resident_bytes: int, smallest_feasible_bytes: int | None
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.resident_bytes = resident_bytes
        self.smallest_feasible_bytes = smallest_feasible_bytes


class UnitsError(MimoseError, ValueError):
    """Unit patterns that match nothing, or a model in which nothing can be planned."""


class SizeError(MimoseError, TypeError):
    """Nothing to read a size in, a `size_fn` that returns no sizes, or sizes that changed type between batches."""


class ClosedError(MimoseError, RuntimeError):
    """A `Mimose` was closed, and is asked for another step."""


class LossError(MimoseError, TypeError):
    """What a plain loop's loss function returned is no tensor of one number with gradients."""


class PlanError(MimoseError, ValueError):
    """A forced plan that names unknown units or actions, or acts on a unit and its ancestor at once."""


class RecomputeError(MimoseError):
    """A unit turned out not to be repeatable after its forward had run, in a step that cannot run again.

    Attributes:
        reasons: Unit -> why it cannot be recomputed.
        told: The same in one line.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.told = "; ".join(f"{unit!r}: {reason}" for unit, reason in reasons.items())
        super().__init__(
            f"Recomputed units cannot be repeated: {self.told}. They are left alone from now on, but this step could "
            f"not be run again. Leave them out from the start: units=[...] names the ones to plan."
        )
        self.reasons = dict(reasons)


class DeviceMemoryError(MimoseError, torch.OutOfMemoryError):
    """The device ran out of memory in spite of the plan, and the step cannot be run again.

    Attributes:
        budget_bytes: The budget.
        resident_bytes: What was resident before the step.
        retained_bytes: Unit -> bytes that it keeps for backward under the plan, where known.
        smallest_feasible_bytes: What this batch needs under the most saving plan, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        resident_bytes: int,
        retained_bytes: Mapping[str, int],
        smallest_feasible_bytes: int | None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.resident_bytes = resident_bytes
        self.retained_bytes = dict(retained_bytes)
        self.smallest_feasible_bytes = smallest_feasible_bytes


class UnsupportedError(MimoseError):
    """A strategy or setting the package does not support; the message names it and what to use instead."""


class SharedBudgetError(MimoseError):
    """A shared budget that cannot be joined: contradicting budgets or devices, a name that somebody else has taken."""


_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left; some libraries only say so in their text.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(ValueError("no"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
