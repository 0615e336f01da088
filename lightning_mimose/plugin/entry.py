"""The entry point: a budget from the environment for an unchanged training script."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_mimose.plugin.callback import MimoseCallback

VARIABLE = "MIMOSE_BUDGET"


def callbacks() -> list[MimoseCallback]:
    """Called by every Trainer in the environment; returns nothing, and imports nothing, unless the variable is set."""
    budget = os.environ.get(VARIABLE)
    if not budget:
        return []
    from lightning_mimose.errors import BudgetError
    from lightning_mimose.plugin.callback import MimoseCallback

    try:
        callback = MimoseCallback(budget=budget)
    except BudgetError as error:
        raise BudgetError(f"In the environment variable {VARIABLE}: {error}") from None
    callback._from_environment = True
    return [callback]
