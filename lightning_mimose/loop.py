"""The door for a plain PyTorch loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.agreement import NO_RETRY
from lightning_mimose.engine.arguments import has_tensors
from lightning_mimose.engine.attempts import Attempts
from lightning_mimose.engine.core import Engine
from lightning_mimose.errors import ClosedError, LossError, SizeError
from lightning_mimose.measure.optimizers import optimized
from lightning_mimose.plan import Plan, PlannerChoice
from lightning_mimose.report.record import History, Records
from lightning_mimose.report.report import Report
from lightning_mimose.settings import (
    check_choices,
    check_functions,
    check_host_budget,
    check_loss,
    checked_optimizers,
)
from lightning_mimose.shared.budget import AnyBudget


class Mimose:
    """Keeps a plain training loop inside a memory budget.

    Args:
        model: Any module; its submodules are planned.
        budget: `"8GB"`, `"8GiB"`, bytes, a share of the device (`0.8`, `"80%"`) or `"auto"`; or a `SharedBudget`.
        optimizer: Stepped by `step`, or several that are; None to only run forward and backward. What is updated by
            others has state that the budget does not know of.
        loss_fn: Called as `loss_fn(model, batch)`; by default the model is called with the batch (a mapping by
            keyword, a sequence by position) and its `loss`, its first element, or itself is the loss.
        backward_fn: Called with the loss in place of its `backward()`, if given: `fabric.backward`, or
            `lambda loss: scaler.scale(loss).backward()`.
        update_fn: Called in place of `optimizer.step()`, which it is to call: to clip gradients before, to step a
            scaler, or one of several optimizers at a time. They are named all the same.
        units: Patterns or class names of what to plan; None finds it.
        size_fn: Batch -> int or named dimensions; None reads the batch's tensors, or what the model is called with.
        actions: Names of the actions plans may use; None for those that pay.
        planner: "auto", "exact", "greedy" (the paper's), or a callable (timeline, budget_bytes) -> plan.
        on_infeasible: "raise", or "warn" to go on with the most saving plan.
        host_budget: Host memory that offloading may take, written as `budget` is; None for half of what is free.
        on_oom: "retry" runs a step that is out of memory all the same again, under the most saving plan and as if it
            had not begun; "raise" says where the memory went.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> model = nn.Sequential(*[block() for _ in range(4)])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda m, x: m(x).pow(2).mean()) as mimose:
        ...     for _ in range(3):
        ...         loss = mimose.step(torch.randn(32, 16))
        >>> len(mimose.records)
        3

        Gradients of two batches each, clipped before the update:

        >>> def update():
        ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        >>> with Mimose(
        ...     model, budget="1GB", optimizer=optimizer, loss_fn=lambda m, x: m(x).pow(2).mean() / 2, update_fn=update
        ... ) as mimose:
        ...     for number in range(4):
        ...         loss = mimose.step(torch.randn(32, 16), update=number % 2 == 1)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: AnyBudget = "auto",
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        backward_fn: Callable[[torch.Tensor], Any] | None = None,
        update_fn: Callable[[], Any] | None = None,
        units: Sequence[str] | None = None,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        actions: Sequence[str] | None = None,
        planner: PlannerChoice = "auto",
        on_infeasible: Literal["raise", "warn"] = "raise",
        on_oom: Literal["retry", "raise"] = "retry",
        host_budget: str | int | float | None = None,
    ) -> None:
        check_choices(on_infeasible, on_oom)
        check_host_budget(host_budget)
        check_functions(loss_fn, backward_fn, update_fn)
        optimizers = checked_optimizers(optimizer, update_fn, model)
        self._model: nn.Module | None = model
        self._optimizers = optimizers
        self._optimized: list[list[nn.Parameter]] = []
        self._has_all = False
        """Whether the optimizers, of these parameters, have all of the model's."""
        self._loss_fn = loss_fn or own_loss
        self._backward_fn = backward_fn or torch.Tensor.backward
        self._update_fn = update_fn
        self._accumulates = False
        self._begun = 0
        self._history = History()
        self._engine: Engine | None = Engine(
            model,
            budget=budget,
            units=units,
            size_fn=size_fn,
            actions=actions,
            planner=planner,
            on_infeasible=on_infeasible,
            host_budget=host_budget,
        )
        self._host = self._engine.host
        self._advisor = self._engine.advisor
        self._units = tuple(unit.name for unit in self._engine.units)
        try:
            self._engine.watch(optimizers)
            self._engine.attach()
        except BaseException:
            self._engine.detach()
            raise
        forbidden = "" if self._engine.agreement is None else NO_RETRY
        self._attempts: Attempts | None = Attempts(
            self._engine.running,
            model,
            list(dict.fromkeys([*model.parameters(), *optimized(*optimizers)])),
            self._engine.device,
            retry=on_oom == "retry",
            forbids=lambda: forbidden,
        )

    @property
    def budget_bytes(self) -> int:
        """The budget, in bytes."""
        return self._advisor.budget_bytes

    @property
    def records(self) -> Records:
        """One record per step, the newest 10,000."""
        return self._history.records

    def step(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        """Run one step: forward, zero the gradients, backward, update.

        Args:
            batch: The batch, on the model's device.
            update: Whether to update. If not, the next step adds to these gradients, which are zeroed no more before
                an update was made; what the losses are divided by is `loss_fn`'s business.

        Returns:
            The loss, detached.

        Raises:
            BudgetInfeasibleError: No plan keeps this batch inside the budget. No update was made.
            ClosedError: It was closed.
            DeviceMemoryError: The device is out of memory under the most saving plan. No update was made.
            LossError: `loss_fn` returned no loss. No update was made.

        Gradients of earlier batches that were not updated with are still there then, and so is what the failed one's
        backward had added, if it came so far: zero them to begin anew.
        """
        engine, model, attempts = self._engine, self._model, self._attempts
        if engine is None or model is None or attempts is None:
            raise ClosedError("This Mimose is closed. Make a new one to go on training.")
        loss_fn, accumulates = self._loss_fn, self._accumulates

        def once() -> torch.Tensor:
            engine.begin_forward()
            loss = check_loss(loss_fn(model, batch))
            if not accumulates:
                self._zero_gradients(model)
            engine.begin_backward(loss)
            self._backward_fn(loss)
            engine.after_backward()
            return loss.detach()

        self._begun += 1
        try:
            if not engine.ledger.watches(self._optimizers):  # parameters were added to one
                attempts.zeroes(list(dict.fromkeys([*model.parameters(), *optimized(*self._optimizers)])))
                engine.ledger.refresh()
                engine.watch(self._optimizers)
            engine.begin_step(
                batch,
                batch_idx=self._begun - 1,
                zeroes_gradients=not accumulates,
                accumulates=accumulates,
                updates=update,
            )
            loss = attempts.run(once)
            if update:
                engine.before_update()
                if self._update_fn is not None:
                    self._update_fn()
                else:
                    for optimizer in self._optimizers:
                        optimizer.step()
                self._accumulates = False
            record = engine.end_step(self._history.aggregates.steps)
            self._accumulates = not update
        except BaseException:
            engine.abort_step()
            raise
        if record is not None:
            self._history.add(record)
        return loss

    def _zero_gradients(self, model: nn.Module) -> None:
        """Those of the optimizers, which may hold parameters of the loss, and of what else the model has."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        known = self._optimized
        if len(known) != len(groups) or not all(map(_are_the_same, groups, known)):
            self._optimized = [list(parameters) for parameters in groups]
            self._has_all = set(map(id, model.parameters())) <= set(map(id, chain.from_iterable(groups)))
        if not self._has_all:  # the model's own walks through all its modules
            model.zero_grad(set_to_none=True)

    def plan(self, batch_or_size: Any, budget: str | int | float | None = None) -> Plan:
        """The plan that a batch (or named dimensions) would get, under this budget or another, in bytes or as "8GB"."""
        return self._advisor.plan(batch_or_size, budget)

    def smallest_feasible_bytes(self, batch_or_size: Any) -> int:
        """The least budget that is sure to do for a batch (or named dimensions), in a step like the last one.

        One that accumulates holds the gradients of the batches before it, and may need more.
        """
        return self._advisor.smallest_feasible_bytes(batch_or_size)

    def report(self) -> Report:
        """What happened so far."""
        advisor = self._advisor
        hints = tuple(advisor.hints.values())
        return Report(self._history, self._units, advisor.budget_bytes, guarded=advisor.guarded(), hints=hints)

    def close(self) -> None:
        """Leave the model as it was. Records, plans and the report stay available."""
        if self._engine is not None:
            self._engine.detach()
        self._engine = self._model = self._update_fn = self._attempts = None
        self._loss_fn, self._backward_fn = own_loss, torch.Tensor.backward
        self._optimizers, self._optimized = (), []

    def __enter__(self) -> Mimose:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _are_the_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether they have the same objects: tensors are not to be compared with `==`."""
    return len(some) == len(others) and all(map(is_, some, others))


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model returns for a batch: a mapping goes in by keyword, a sequence by position.

    Raises:
        LossError: What it returned holds no scalar loss.
        SizeError: There is no tensor in the batch, and it cannot be called with that.
    """
    try:
        if isinstance(batch, Mapping):
            out = model(**batch)
        elif isinstance(batch, (tuple, list)):
            out = model(*batch)
        else:
            out = model(batch)
    except TypeError as error:
        if has_tensors(batch) or _takes(model, batch):
            raise
        raise SizeError(
            f"There is no tensor in this batch, a {type(batch).__name__}, and {type(model).__name__} cannot be called "
            f"with it ({error}). Pass loss_fn=lambda model, batch: ... that makes tensors of it."
        ) from error
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = out[0] if isinstance(out, (tuple, list)) else out["loss"] if isinstance(out, Mapping) else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise LossError(
            f"The model returned a {type(out).__name__} without a scalar loss. Pass loss_fn=lambda model, batch: ... "
            "that returns one."
        )
    return loss


def _takes(model: nn.Module, batch: Any) -> bool:
    """Whether a model can be called with a batch, as far as its signature says."""
    by_name = dict(batch) if isinstance(batch, Mapping) else {}
    by_position = () if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        inspect.signature(model.forward).bind(*by_position, **by_name)
    except ValueError:  # it has none
        return True
    except TypeError:
        return False
    return True
