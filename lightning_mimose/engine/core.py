"""The engine: one step from batch to record. It knows no Lightning; every door is a thin wrapper around it.

batch -> input size -> plan cache -> (miss) estimator -> planner -> plan -> units -> forward, backward
-> meter -> estimator
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.actions.offload import HostMemory, Offloader
from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.agreement import Agreement
from lightning_mimose.budget import device_memory
from lightning_mimose.engine.attachment import Attachment
from lightning_mimose.engine.decisions import Decisions
from lightning_mimose.engine.inlets import Inlets
from lightning_mimose.engine.lessons import Lessons
from lightning_mimose.engine.limits import device_bytes, device_of, host_bytes, refuse_lazy
from lightning_mimose.engine.metering import Metering
from lightning_mimose.engine.refusal import Refuser
from lightning_mimose.engine.running import Running
from lightning_mimose.engine.step import Step
from lightning_mimose.engine.tenancy import Tenancy
from lightning_mimose.engine.trials import Trials
from lightning_mimose.errors import BudgetInfeasibleError, RecomputeError
from lightning_mimose.measure import counters
from lightning_mimose.measure.cap import ReservedCap
from lightning_mimose.measure.kernels import kernels_turn_at
from lightning_mimose.measure.link import measure_link
from lightning_mimose.measure.others import Others, take_workspaces
from lightning_mimose.measure.resident import ResidentLedger
from lightning_mimose.measure.update import UpdateReserve
from lightning_mimose.menu import GRADES, OFFLOAD, SPLITS, check_actions
from lightning_mimose.plan import PlannerChoice
from lightning_mimose.predict.misses import scratch_bytes
from lightning_mimose.report.record import StepRecord
from lightning_mimose.sharding import sharded_modules, sharing_ranks
from lightning_mimose.shared.budget import SHARED_BUDGETS, AnyBudget
from lightning_mimose.units import Unit, find_units, fingerprint, runs_compiled


class Engine:
    """Keeps the steps of one model inside a budget.

    Args:
        model: The model whose submodules are planned.
        budget: What `parse_budget` takes, or one that several trainings share.
        units: Patterns that name the units; None finds them.
        size_fn: Batch -> size; None reads the dimensions of its tensors.
        actions: Names of the actions that plans may use; None for those that pay on this device.
        planner: See `plan.Scheduler`.
        on_infeasible: What to do when no plan fits.
        host_budget: Host memory that offloading may take, as `budget`; None for half of what is free.
        device: Where the step runs; None asks the model's parameters.
        bucket_bytes: What a distributed wrapper keeps resident besides.
        precision: Names what the steps run in; what was learnt in another precision is not used.
        profile: Whether torch's profiler is free to be used for measuring.

    Raises:
        BudgetError: The budget cannot be understood, or exceeds the device.
        UnitsError: There is nothing to plan.
        UnsupportedError: The device's memory cannot be read, or the model has lazy modules.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: AnyBudget,
        units: Sequence[str] | None = None,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        actions: Sequence[str] | None = None,
        planner: PlannerChoice = "auto",
        on_infeasible: Literal["raise", "warn"] = "raise",
        host_budget: str | int | float | None = None,
        device: torch.device | None = None,
        bucket_bytes: int = 0,
        precision: str = "",
        profile: bool = True,
    ) -> None:
        self.model = model
        refuse_lazy(model)
        self.device = device_of(model, device)
        ranks = sharing_ranks(model)
        # The profiler misses what gloo's threads let go of; a dispatch mode does not.
        self.profile = profile and len(ranks) < 2
        self.compiles = partial(runs_compiled, model)
        self.actions = check_actions(actions)
        self.units: tuple[Unit, ...] = find_units(model, units)
        self.ledger = ResidentLedger(model, bucket_bytes)
        self.memory = device_memory(self.device)
        budget_bytes = device_bytes(budget, self.device, self.memory, self.ledger)
        self.advisor = Advisor(
            budget_bytes,
            size_fn=size_fn,
            planner=planner,
            actions=self.actions,
            fingerprint=fingerprint(model, self.device, f"{precision} {len(ranks)}", self.units),
            turns=kernels_turn_at(model, self.device),
        )
        self.advisor.may_hand_on = not sharded_modules(model)
        self.session = Session(
            lean=any(action in GRADES for action in self.actions),
            splits=any(action in SPLITS for action in self.actions),
        )
        self.advisor.compared = self.session.comparisons
        self.host: HostMemory | None = None
        if OFFLOAD in self.actions:
            self.host = HostMemory(host_bytes(host_budget))
            self.session.offloader = Offloader(self.host, self.device)
            link = measure_link(self.device, self.host.budget_bytes)
            # What spares nothing is planned by nobody but who forces it.
            self.advisor.link = link if link.frees or callable(planner) else None
        self._update = UpdateReserve(self.ledger)
        self._refuser = Refuser(self.advisor, on_infeasible, self._update)
        self.tenancy: Tenancy | None = None
        if isinstance(budget, SHARED_BUDGETS):
            self.tenancy = Tenancy(*budget.open(self.device), self.advisor, self.session)
            self._refuser.beside = self.tenancy.beside
            self.advisor.owns_allocator = False  # other jobs of the process, and other models of this one, use it too
            weakref.finalize(self, self.tenancy.drop)
        cap = ReservedCap(self.device, budget_bytes, lasts=on_infeasible == "raise")
        self._attachment = Attachment(model, self.units, self.session, self.advisor, cap)
        self._refuser.exceed = self._attachment.exceed_budget
        others = Others(self.device, budget_bytes) if self.tenancy is None and counters.exist(self.device) else None
        self.advisor.barred_bytes = others.barred_bytes if others is not None else 0
        self.advisor.scratch_bytes = scratch_bytes(budget_bytes) if counters.exist(self.device) else 0
        trials = Trials(self.advisor, self.session)
        fixed = size_fn is not None or self.tenancy is not None or len(ranks) > 1
        self._inlets = Inlets(model, self.units, self.advisor, self.session, fixed=fixed)
        self._decisions = Decisions(
            model,
            self.advisor,
            self.session,
            self.ledger,
            self._update,
            self._refuser,
            trials,
            self._attachment,
            self._inlets,
            Agreement(ranks) if len(ranks) > 1 else None,
            self.tenancy,
            others,
        )
        self._lessons = Lessons(
            model, self.advisor, self.session, self.ledger, self._update, self._refuser, self.device
        )
        self._metering = Metering(
            self.device, self.session, self.ledger, self._lessons, profile=self.profile, compiles=self.compiles
        )
        self.running = Running(
            self.device,
            self.memory,
            self.advisor,
            self.session,
            self.ledger,
            self._update,
            self._decisions,
            self._attachment,
            trials,
            self._inlets,
            self._lessons,
            self._metering,
            self.tenancy,
        )

    @property
    def budget_bytes(self) -> int:
        """The budget in force."""
        return self.advisor.budget_bytes

    @property
    def agreement(self) -> Agreement | None:
        """How the ranks of a sharded model come to one plan, if it is one."""
        return self._decisions.agreement

    # --- attaching --------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Patch the units, and switch off what would defeat them.

        Raises:
            UnitsError: Every unit is checkpointed already.
        """
        self._attachment.attach()
        take_workspaces(self.device)

    def detach(self) -> None:
        """Leave the model as it was. What was learnt stays with the advisor."""
        with ExitStack() as last:  # each of these runs, whatever another one raises
            last.callback(self.advisor.planner.close)
            last.callback(self._attachment.detach)
            last.callback(self._inlets.detach)
            if self.tenancy is not None:
                last.callback(self.tenancy.close)
            self.abort_step()
            if self.agreement is not None:
                last.callback(self.agreement.close)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Name the optimizers; what their first update will allocate is reserved from now on.

        Raises:
            BudgetInfeasibleError: Parameters, gradients and optimizer state alone exceed the budget.
        """
        self._decisions.reserve(optimizers)

    # --- one step ---------------------------------------------------------------------------------------------

    def begin_step(
        self,
        batch: Any,
        *,
        batch_idx: int = 0,
        epoch: int = 0,
        zeroes_gradients: bool = True,
        accumulates: bool = False,
        updates: bool = True,
    ) -> None:
        """Choose a plan for a batch and put it in force, before its forward.

        Args:
            batch: The batch, on its device.
            batch_idx: Index in the epoch, for the record, and for kinds of step that come in the same places.
            epoch: Index of the epoch, for the record.
            zeroes_gradients: Whether gradients of the last step are set to None before this step's backward.
            accumulates: Whether this step's backward adds to gradients that are there.
            updates: Whether an update follows it, as far as is known.

        Raises:
            BudgetInfeasibleError: No plan keeps this batch inside the budget.
            SizeError: The batch has another type than before, or no tensors where its size has to be known by now.
        """
        told = {"zeroes_gradients": zeroes_gradients, "accumulates": accumulates, "updates": updates}
        step = self._decisions.decide(batch, batch_idx=batch_idx, epoch=epoch, **told)
        self.running.arm(step)
        if self.tenancy is not None and not self.tenancy.begin(step, self._update.rest_bytes(step.resident)):
            self.drop_step()
            self.begin_step(batch, batch_idx=batch_idx, epoch=epoch, **told)  # other jobs take more by now: plan anew

    def begin_forward(self) -> None:
        """The forward is about to run."""
        if self.tenancy is not None:
            self.tenancy.begin_forward()
        step = self.running.step
        if step is not None:
            self._metering.begin_forward(step)

    def begin_backward(self, loss: torch.Tensor | None = None) -> None:
        """The forward is done and gradients are zeroed; backward begins.

        Raises:
            RecomputeError: The input of a unit that is to be recomputed was changed in place after its forward.
        """
        step = self.running.step
        if step is None:
            return
        self._inlets.end_forward()
        changed = self.session.changed_inputs() if not step.updating else {}
        if changed:
            self.session.refuse(changed)
            raise RecomputeError(changed)
        self.session.given.clear()  # what is checked may be changed: another pass of the step may follow
        self.session.end_forward()
        if step.resident.zeroes_gradients and not (step.in_backward or step.updating):
            self.ledger.look_at_zeroed()
        step.in_backward = True
        if self.tenancy is not None:
            self.tenancy.begin_backward()
        # LBFGS evaluates the loss again inside its update, which is then more than an update.
        step.evaluated_again = step.updating
        self._metering.begin_backward(step, loss)

    def after_backward(self) -> None:
        """A backward pass is done, and nothing was let go of since; optional: something is learnt from it."""
        step = self.running.step
        if step is not None:
            self._metering.end_backward(step)

    def before_update(self) -> None:
        """Backward is done; an optimizer is about to update.

        Raises:
            BudgetInfeasibleError: The step was measured, and the most saving plan exceeded the budget.
            SizeError: There was nothing in the step to read its size in.
        """
        step = self.running.step
        if step is None or step.updating:
            return
        self._inlets.check(in_backward=step.in_backward)
        measured = step.measuring
        self._finish_together(step)
        step.updating = True
        lasting = step.resident.lasting_bytes
        if self._attachment.may_exceed and self._update.peak_bytes(lasting) > self.advisor.budget_bytes:
            self._attachment.exceed_budget()
        if self.tenancy is not None:
            self.tenancy.update()
        if measured:
            self._update.begins()
            self._metering.begin_update(step)

    def end_step(self, number: int = 0, *, sees_backward: bool = False) -> StepRecord | None:
        """The step is over; None if none was running.

        Args:
            number: Of the step, for the record.
            sees_backward: Whether a backward would have been told of: no prediction was made for a step without one.

        Raises:
            BudgetInfeasibleError: As `before_update`, for a step without an update.
            SizeError: Likewise.
        """
        step = self.running.step
        if step is None:
            return None
        if not step.updating:
            self._inlets.check(in_backward=step.in_backward)
            self._finish_together(step)
        elif step.recorder is not None:
            self._lessons.of_update(step)
        actions = self.session.actions
        if self.session.met:
            self._lessons.of_strangers(step)
        if step.learns:
            if self._lessons.in_vain(step.size):
                self._inlets.doubt("batches vary in too many dimensions")
            self._inlets.look(step.size)
        self.running.disarm(step)
        if self.tenancy is not None:
            self.tenancy.turn()
        self._metering.ran(step)
        record = step.record(number, self.advisor.tracker.named(step.size), self.advisor.budget_bytes, actions)
        return replace(record, predicted_peak_bytes=None) if sees_backward and not step.in_backward else record

    def drop_step(self) -> None:
        """The step that has begun will not run: another one begins in its place."""
        step = self.running.step
        if step is not None:
            self.running.disarm(step, ran=False)

    def abort_step(self) -> None:
        """An exception ended the step: stop measuring and disarm; nothing is learnt from it."""
        step = self.running.step
        if step is not None:
            try:
                self._metering.stop(step)
            finally:
                self.running.disarm(step)

    def _finish_together(self, step: Step) -> None:
        """Stop the meter; if a rank of a sharded model finds the budget broken, all refuse the step."""
        self._metering.end_passes(step)
        self._lessons.of_time(step)
        if step.recorder is None and not step.sheltered:
            return
        error = None
        try:
            self._lessons.of_backward(step)
        except BudgetInfeasibleError as found:
            error = found
        if step.sheltered:
            self._decisions.refuse_together(error)
