"""Training inside a memory budget: `Trainer(callbacks=[MimoseCallback(budget="8GB")])`.

Importing this package registers the strategy names "mimose" and "mimose_ddp" and does nothing else.
"""

from lightning_mimose.actions.again import is_recomputing
from lightning_mimose.errors import (
    BudgetError,
    BudgetInfeasibleError,
    ClosedError,
    DeviceMemoryError,
    LossError,
    MimoseError,
    PlanError,
    RecomputeError,
    SharedBudgetError,
    SizeError,
    UnitsError,
    UnsupportedError,
)
from lightning_mimose.loop import Mimose
from lightning_mimose.plan import Plan
from lightning_mimose.plugin.callback import MimoseCallback
from lightning_mimose.plugin.strategies import (
    MimoseDDPStrategy,
    MimoseSingleDeviceStrategy,
    MimoseStrategyMixin,
    register,
)
from lightning_mimose.report.record import StepRecord
from lightning_mimose.report.report import Report
from lightning_mimose.shared.budget import SharedBudget

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "BudgetInfeasibleError",
    "ClosedError",
    "DeviceMemoryError",
    "LossError",
    "Mimose",
    "MimoseCallback",
    "MimoseDDPStrategy",
    "MimoseError",
    "MimoseSingleDeviceStrategy",
    "MimoseStrategyMixin",
    "Plan",
    "PlanError",
    "RecomputeError",
    "Report",
    "SharedBudget",
    "SharedBudgetError",
    "SizeError",
    "StepRecord",
    "UnitsError",
    "UnsupportedError",
    "is_recomputing",
]

register()
del register
