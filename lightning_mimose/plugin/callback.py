"""The callback: a thin door from Lightning's hooks onto the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.budget import format_bytes, parse_budget
from lightning_mimose.engine.core import Engine
from lightning_mimose.errors import BudgetError, MimoseError
from lightning_mimose.measure.meter import has_memory_counters
from lightning_mimose.menu import check_actions
from lightning_mimose.plan import Plan, check_planner
from lightning_mimose.plugin.entry import VARIABLE
from lightning_mimose.plugin.evaluation import EvaluationMeter
from lightning_mimose.plugin.ranks import release_peers
from lightning_mimose.plugin.run import Run
from lightning_mimose.plugin.support import (
    check_module,
    check_strategy,
    tell,
    warn,
    warn_of_searches,
)
from lightning_mimose.report.metrics import StepMetrics
from lightning_mimose.report.record import History, Records
from lightning_mimose.report.report import Report
from lightning_mimose.settings import check_choices, check_host_budget
from lightning_mimose.shared.budget import SHARED_BUDGETS, AnyBudget
from lightning_mimose.size_functions import check_size_fn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

MOST_LEARNT = 4
"""Sets of trained parameters whose steps are remembered, where another one begins an epoch."""
LENT = "log", "log_dict"
"""Methods of the model that Lightning lends every callback for one run, which keep it alive."""


class MimoseCallback(Callback):
    """Keeps every training step inside a memory budget, at the least cost in time. Results do not change.

    Args:
        budget: `"8GB"` (10^9), `"8GiB"` (2^30), bytes, a share of the device (`0.8`, `"80%"`), or `"auto"`: what is
            free on the device when training starts. On an accelerator it bounds what the allocator reserves, on CPU
            the live tensor bytes. Or a `SharedBudget` that several trainings keep together.
        units: fnmatch patterns on qualified names, or class names, of the submodules to plan; None finds them.
        size_fn: Batch -> int or named dimensions; None reads the dimensions of the batch's tensors, or of those
            that the model is called with, where the batch does not tell them.
        actions: Names of the actions plans may use; None for the exact ones that pay on this device.
        planner: `"auto"` (a heuristic at once, the exact plan when it is ready), `"exact"`, `"greedy"` (the Mimose
            paper's), or a callable `(timeline, budget_bytes) -> Plan | {unit: action}`.
        on_infeasible: `"raise"` an error when no plan fits, or `"warn"` and go on with the most saving plan.
        on_oom: What to do when the device runs out of memory all the same: `"retry"` runs the batch again under the
            most saving plan, as if it had not begun (weights, generators, buffers, logged values), or `"raise"`. Where
            it cannot be repeated (manual optimization, under DDP once backward has begun) the error says where the
            memory went.
        host_budget: Host memory that offloading may take, written as `budget` is; None for half of what is free.

    Limitations:
        With manual optimization a batch that breaks the budget is found out after its updates, not before them.
        LBFGS fills its history step by step; all of it is reserved from the start, so its first steps are predicted
        higher than they are, and some later ones by two vectors of all parameters.
        The trial steps of LearningRateFinder, BatchSizeFinder and the Tuner are not planned: Lightning runs them
        without other callbacks.

    Metrics:
        mimose/peak_bytes, mimose/predicted_peak_bytes, mimose/budget_bytes (bytes), mimose/recomputed_units,
        mimose/cache_hits (counts), mimose/planning_seconds (seconds).

    Raises:
        BudgetError: The budget cannot be understood.
        UnsupportedError: An action this version does not have.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[MimoseCallback(budget="8GB")], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        budget: AnyBudget = "auto",
        units: list[str] | None = None,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        actions: list[str] | None = None,
        planner: Literal["auto", "exact", "greedy"] | Callable[..., Any] = "auto",
        on_infeasible: Literal["raise", "warn"] = "raise",
        on_oom: Literal["retry", "raise"] = "retry",
        host_budget: str | int | float | None = None,
    ) -> None:
        self.budget = budget
        check_host_budget(host_budget)
        check_actions(actions)
        check_choices(on_infeasible, on_oom)
        check_planner(planner)
        check_size_fn(size_fn)
        self.units = units
        self.size_fn = size_fn
        self.actions = actions
        self.planner = planner
        self.on_infeasible = on_infeasible
        self.on_oom = on_oom
        self.host_budget = host_budget
        self._run: Run | None = None
        self._advisor: Advisor | None = None
        self._loaded: dict[str, Any] | None = None
        self._learnt: dict[str, dict[str, Any]] = {}
        """Fingerprint of what was trained -> what had been learnt by then, the latest last."""
        self._history = History()
        self._metrics = StepMetrics()
        self._evaluation = EvaluationMeter()
        self._unit_names: tuple[str, ...] = ()
        self._idle = False
        self._from_environment = False

    # --- what the user asks -----------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """One callback of the user's and one from the environment may stand side by side."""
        return self._generate_state_key(environment=True) if self._from_environment else super().state_key

    @property
    def budget(self) -> AnyBudget:
        """What was asked for. Another one may be assigned while a fit runs, and holds from the next batch on."""
        return self._budget

    @budget.setter
    def budget(self, budget: AnyBudget) -> None:
        if not isinstance(budget, SHARED_BUDGETS):
            parse_budget(budget)
        self._budget, self._is_new_budget = budget, True

    @property
    def records(self) -> Records:
        """One record per training batch of all fits, the newest 10,000."""
        return self._history.records

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before the first fit."""
        return self._advisor.budget_bytes if self._advisor is not None else None

    def plan(self, batch_or_size: Any, budget: str | int | float | None = None) -> Plan:
        """The plan that a batch, or named dimensions, would get.

        Args:
            batch_or_size: A batch, or a mapping such as `{"batch": 8, "input_ids:1": 512}`.
            budget: Bytes, as a number or as "8GB"; None for the budget in force.

        Raises:
            BudgetInfeasibleError: No plan fits.
            MimoseError: Nothing is known about this size yet.
        """
        return self._known().plan(batch_or_size, budget)

    def smallest_feasible_bytes(self, batch_or_size: Any) -> int:
        """The least budget that is sure to do for a batch, or named dimensions, even as the first of a run.

        In a step like the last one: one that accumulates holds the gradients of the batches before it.
        """
        return self._known().smallest_feasible_bytes(batch_or_size)

    def report(self) -> Report:
        """What happened in all fits so far."""
        if self._advisor is None:
            return Report(self._history, self._unit_names, None, self._evaluation.peaks)
        advisor = self._advisor
        return Report(
            self._history,
            self._unit_names,
            advisor.budget_bytes,
            self._evaluation.peaks,
            advisor.guarded(),
            tuple(advisor.hints.values()),
        )

    def _known(self) -> Advisor:
        if self._advisor is None:
            raise MimoseError("Nothing is known before training: call this after trainer.fit() has started.")
        return self._advisor

    # --- Lightning's hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what is not supported, before anything runs."""
        if stage != "fit":
            return
        others = [c for c in trainer.callbacks if isinstance(c, MimoseCallback) and c is not self]  # type: ignore[attr-defined]
        carried = getattr(trainer.strategy, "mimose_callback", None)
        # The environment's callback gives way to any other, and a strategy that names no budget to a callback.
        self._idle = bool(others) and (
            self._from_environment
            or (carried is self and self.budget == "auto" and not all(c._from_environment for c in others))
        )
        if self._idle:
            if self._from_environment:
                tell(
                    f"mimose: {VARIABLE}={self.budget} is not used: this Trainer has a MimoseCallback or a strategy of "
                    f"its own (budget {others[0].budget!r})"
                )
            return
        rivals = [c for c in others if not c._from_environment and not (c is carried and c.budget == "auto")]
        if rivals and carried is not None:
            named = [c.budget for c in (self, *rivals)]
            raise BudgetError(
                f"Both the callback and the strategy name a budget ({' and '.join(map(repr, named))}). Name it once."
            )
        if rivals:
            raise BudgetError("Two MimoseCallbacks are among this Trainer's callbacks. Keep one of them.")
        check_strategy(trainer.strategy)
        check_module(pl_module)
        device = trainer.strategy.root_device
        if not has_memory_counters(device):
            self._idle = True
            warn(f"mimose: {device} has no memory counters that torch can read; training goes on without a budget.")
            return
        warn_of_searches(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the units, reserve what the optimizer will need, and patch."""
        if self._idle:
            return
        self._metrics = StepMetrics()
        self._tell_budget(self._open(trainer, pl_module, self.budget))

    @staticmethod
    def _tell_budget(engine: Engine) -> None:
        where = engine.memory.description.rstrip(",")  # where it tells of neighbours, it ends in one
        tell(
            f"mimose: budget {engine.budget_bytes:,} bytes ({format_bytes(engine.budget_bytes)}) on {where}, "
            f"{len(engine.units)} units found"
        )

    def _open(self, trainer: Trainer, pl_module: LightningModule, budget: AnyBudget) -> Engine:
        check_choices(self.on_infeasible, self.on_oom)  # which may have been assigned since
        check_host_budget(self.host_budget)
        self._is_new_budget = False
        asked = ("units", "size_fn", "actions", "planner", "on_infeasible", "host_budget")
        options = {"budget": budget, **{name: getattr(self, name) for name in asked}}
        run = Run(trainer, pl_module, options, retries=self.on_oom == "retry")
        engine = run.engine
        self._take_over_knowledge(engine)
        self._run = run  # from here on an exception undoes what was done
        self._advisor, self._unit_names = engine.advisor, tuple(unit.name for unit in engine.units)
        run.start()
        return engine

    def _take_over_knowledge(self, engine: Engine) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if not engine.advisor.load_state_dict(loaded):
                warn(
                    "mimose: what the checkpoint holds was learnt with another model, precision, device or version of "
                    "lightning-mimose and is not used; the first steps measure again."
                )
        elif self._advisor is not None:
            self._learnt.pop(self._advisor.fingerprint, None)
            self._learnt[self._advisor.fingerprint] = self._advisor.state_dict()
            known = self._learnt.get(engine.advisor.fingerprint)
            if known is not None:
                engine.advisor.load_state_dict(known)
            while len(self._learnt) > MOST_LEARNT:
                del self._learnt[next(iter(self._learnt))]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan this batch."""
        if self._run is None:
            return
        self._run.engine.abort_step()  # a step that another hook skipped has no end
        if self._is_new_budget:
            self._close()
            self._tell_budget(self._open(trainer, pl_module, self.budget))
        elif self._run.is_another(batch_idx):  # what is saved, made and kept from now on is another matter
            shared = isinstance(self.budget, SHARED_BUDGETS)
            budget = self.budget if shared else self._run.engine.budget_bytes
            self._close()
            self._open(trainer, pl_module, budget)
        self._run.begin_batch(batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Forward is done."""
        if self._run is not None:
            self._run.habits.look(pl_module)
            self._run.engine.begin_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What is still there, somebody holds."""
        if self._run is not None:
            self._run.engine.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Backward is done; with manual optimization more of it may follow."""
        if self._run is not None and pl_module.automatic_optimization:
            self._run.engine.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step."""
        if self._run is None:
            return
        number, seen = self._history.aggregates.steps, pl_module.automatic_optimization
        record = self._run.engine.end_step(number, sees_backward=seen)
        if record is not None:
            record = self._history.add(record)
            self._metrics.log(trainer, self, record)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values, the same on every rank."""
        if self._run is not None:
            self._metrics.log_epoch(trainer, self)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Measure evaluation's own peak, which the budget does not promise anything about."""
        if self._run is not None:
            self._evaluation.begin(self._run.engine, batch, batch_idx, "validation", dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note it."""
        self._evaluation.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model as it was, and no other rank waiting for this one."""
        self._close()
        self._let_go()
        if isinstance(exception, Exception) and not self._idle:
            release_peers(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was."""
        self._close()
        self._let_go()

    def _close(self) -> None:
        self._evaluation.end()
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _let_go(self) -> None:
        """Give back what was lent."""
        for name in LENT:
            vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled, knows what was learnt, and takes no part in the run that goes on."""
        state = {name: value for name, value in vars(self).items() if name not in LENT}
        return {**state, "_run": None, "_evaluation": copy(self._evaluation)}

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return self._advisor.state_dict() if self._advisor is not None else dict(self._loaded or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until the model is known."""
        if self._run is None:  # in mid-run a tuner restores an older state than is known here
            self._loaded = state_dict or None
