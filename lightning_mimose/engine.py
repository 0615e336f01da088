"""The engine: one step from batch to record. It knows no Lightning; every door is a thin wrapper around it.

batch -> input size -> plan cache -> (miss) estimator -> planner -> plan -> units -> forward, backward
-> meter -> estimator
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.actions.caches import CacheSwitch, checkpointed_layers, checkpointing_way_out
from lightning_mimose.actions.lean.recipes import GRADES
from lightning_mimose.actions.menu import OFFLOAD, check_actions
from lightning_mimose.actions.offload import HostMemory, Offloader
from lightning_mimose.actions.patch import is_patched, unpatch
from lightning_mimose.actions.proof import COLLECTIVE
from lightning_mimose.actions.session import Session, patch_unit
from lightning_mimose.actions.split import SPLITS
from lightning_mimose.advisor import Advice, Advisor, with_reserve
from lightning_mimose.agreement import Agreement, Choices, Judgement, Refusal, Word
from lightning_mimose.budget import device_memory, format_bytes, parse_budget
from lightning_mimose.errors import (
    BudgetInfeasibleError,
    DeviceMemoryError,
    RecomputeError,
    UnitsError,
    UnsupportedError,
)
from lightning_mimose.hints import attention_hint, update_hint
from lightning_mimose.measure.cap import ReservedCap
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.gradients import GradientLedger
from lightning_mimose.measure.link import measure_link
from lightning_mimose.measure.observe import observe
from lightning_mimose.measure.resident import OptimizerCost, ResidentLedger, batch_bytes, probe_optimizer
from lightning_mimose.measure.saved import resident_tensors
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.plan import Plan, PlannerChoice
from lightning_mimose.predict.structure import Resident
from lightning_mimose.refusal import device_memory_error, infeasible_error
from lightning_mimose.report.record import StepRecord
from lightning_mimose.sharding import gathers_inside, reshard, sharded_modules, sharing_ranks
from lightning_mimose.shared.budget import AnyBudget, Job, SharedBudget
from lightning_mimose.shared.tenancy import Tenancy
from lightning_mimose.sizes import BatchSize, dims_text
from lightning_mimose.step import Step
from lightning_mimose.units import Unit, find_units, fingerprint, related, runs_torchscript, whole_graphs

VERIFIED_STEPS = 3
"""Planned steps that are measured where measuring costs time, besides every `MEASURE_EVERY`th."""
MEASURE_EVERY = 50

SCRIPTED = "it runs TorchScript, whose first runs differ from later ones in their last bits"
"""Why a scripted unit is left alone."""
GATHERS = "its parts gather their parameters from other ranks"
"""Why a unit with `fully_shard` inside it is left alone."""

UNMEASURED_STEPS = 3
"""Steps in a row that could not be measured before the user is told."""


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
        self.device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
        self.on_infeasible = on_infeasible
        ranks = sharing_ranks(model)
        self._sharded = sharded_modules(model)
        # The profiler misses what gloo's threads let go of; a dispatch mode does not.
        self.profile = profile and len(ranks) < 2
        self.actions = check_actions(actions)
        self.units: tuple[Unit, ...] = find_units(model, units)
        self.ledger = ResidentLedger(model, bucket_bytes)
        self.memory = device_memory(self.device)
        if isinstance(budget, (SharedBudget, Job)):
            budget_bytes = budget.resolve(self.device)
        else:
            budget_bytes = parse_budget(budget).resolve(self.memory, held_bytes=self._held_bytes())
        self.advisor = Advisor(
            budget_bytes,
            size_fn=size_fn,
            planner=planner,
            actions=self.actions,
            fingerprint=fingerprint(model, self.device, f"{precision} {len(ranks)}", self.units),
        )
        self.session = Session(
            lean=any(action in GRADES for action in self.actions),
            splits=any(action in SPLITS for action in self.actions),
        )
        self.host: HostMemory | None = None
        if OFFLOAD in self.actions:
            self.host = HostMemory(self._host_bytes(host_budget))
            self.session.offloader = Offloader(self.host, self.device)
            self.advisor.link = measure_link(self.device, self.host.budget_bytes)
        self.tenancy: Tenancy | None = None
        if isinstance(budget, (SharedBudget, Job)):
            self.tenancy = Tenancy(*budget.open(self.device), self.advisor, self.session)
            weakref.finalize(self, self.tenancy.close)
        self._patched: tuple[Unit, ...] = ()
        self._caches = CacheSwitch()
        self._cap = ReservedCap(self.device, budget_bytes)
        self._update_cost = OptimizerCost(0, 0)
        self._costs: list[tuple[Optimizer, OptimizerCost]] = []
        self._entries: dict[int, int] = {}
        self._step: Step | None = None
        self._trained: tuple[bool, ...] | None = None
        self._planned = 0
        self._left_out: set[str] = set()
        self._told: set[str] = set()
        self._warned = self._unreached = self._told_retained = False
        self._verified = 0
        self._unmeasured = 0
        self.agreement = Agreement(ranks) if len(ranks) > 1 else None

    @property
    def budget_bytes(self) -> int:
        """The budget in force."""
        return self.advisor.budget_bytes

    def _host_bytes(self, host_budget: str | int | float | None) -> int:
        memory = device_memory(torch.device("cpu"))
        if host_budget is not None:
            return parse_budget(host_budget).resolve(memory)
        return memory.free_bytes // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # every rank takes its own

    def _held_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        return self.ledger.lasting_bytes() + self.ledger.gradient_bytes

    # --- attaching --------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Patch the units, and switch off what would defeat them.

        Raises:
            UnitsError: Every unit is checkpointed already.
        """
        if any(is_patched(unit.module) for unit in self.units):
            raise UnsupportedError(
                f"{type(self.model).__name__} is planned by another Mimose or MimoseCallback already. Close that one "
                "first (mimose.close(), or let trainer.fit end)."
            )
        own = checkpointed_layers(self.model)
        left_out = {unit.name for unit in self.units if any(related(unit.name, layer) for layer in own if layer)}
        usable = [unit for unit in self.units if unit.name not in left_out]
        if not usable:
            raise UnitsError(
                f"All {len(self.units)} units of {type(self.model).__name__} are checkpointed by Hugging Face's own "
                f"switch. {checkpointing_way_out(self.model)} to let the budget decide."
            )
        if left_out:
            warnings.warn(
                f"Hugging Face gradient checkpointing is switched on in {len(own)} modules ({own[-1]!r}, ...): they "
                "recompute on every batch, whether it fits or not, and are left alone. "
                f"{checkpointing_way_out(self.model)} to let the budget decide.",
                stacklevel=3,
            )
        for name, blocks in whole_graphs(self.model, usable).items():
            warnings.warn(
                f"{name!r} is one torch.compile graph of {len(blocks)} blocks ({blocks[0]!r}, ...): plans are made "
                "outside compiled code, so it can only be recomputed as a whole, which lowers no peak. Compile each "
                "block instead (block.compile()), or use torch._functorch.config.activation_memory_budget.",
                stacklevel=3,
            )
        self._caches.off(self.model)
        self._cap.apply()
        self._patched = tuple(usable)
        for unit in usable:
            patch_unit(unit, self.session)
        self._left_out = left_out
        self.session.parts = {
            unit.name: [part.name for part in self.units if part.parent == index and part.name not in left_out]
            for index, unit in enumerate(self.units)
        }
        # Statistics reduced over all ranks: every rank would have to recompute in the same steps.
        synced = [u.name for u in usable if any(isinstance(m, nn.SyncBatchNorm) for m in u.module.modules())]
        scripted = [unit.name for unit in usable if runs_torchscript(unit.module)]
        known = dict.fromkeys(synced, COLLECTIVE) | dict.fromkeys(scripted, SCRIPTED)
        known |= {unit.name: GATHERS for unit in usable if gathers_inside(unit.module)}
        self.refuse(known | self.advisor.refused)
        self._take_refusals()

    def _take_refusals(self) -> None:
        """Let plans and shelter do without the units that turned out not to be repeatable."""
        self.advisor.refused = dict(self.session.refused)
        self.advisor.leave_out(self._left_out | self.session.refused.keys())
        cut = {unit.name: "recompute" for unit in self._patched if unit.shelter}
        self.advisor.shelter = self.session.standing(cut)
        by_reason: dict[str, list[str]] = {}
        for unit in [name for name in self.session.refused if name not in self._told]:
            self._told.add(unit)
            by_reason.setdefault(self.session.refused[unit], []).append(unit)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.advisor.announce(f"mimose: never recomputed: {', '.join(names[:3])}{more} ({reason})")

    def detach(self) -> None:
        """Leave the model as it was. What was learnt stays with the advisor."""
        with ExitStack() as last:  # each of these runs, whatever another one raises
            last.callback(self.advisor.planner.scheduler.close)
            last.callback(self._cap.restore)
            last.callback(self._caches.restore)
            for unit in self._patched:
                last.callback(unpatch, unit.module)
            self._patched = ()
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
        self._entries = {id(optimizer): len(optimizer.state) for optimizer in optimizers}
        self._costs = [(optimizer, probe_optimizer(optimizer)) for optimizer in optimizers]
        self.ledger.watch(optimizers, sum(cost.growing_bytes for _, cost in self._costs))
        self._update_cost = OptimizerCost(
            sum(cost.state_bytes for _, cost in self._costs),
            max((cost.transient_bytes for _, cost in self._costs), default=0),
        )
        lasting = self.ledger.lasting_bytes()
        least = self._update_bytes(lasting)
        if self.tenancy is not None:
            self.tenancy.settle(least - self._update_cost.transient_bytes)
        error = None
        if least > self.budget_bytes and self.on_infeasible == "raise":
            error = infeasible_error(
                self.budget_bytes,
                lasting + self.ledger.gradient_bytes,
                least,
                f"the optimizer's update alone needs {format_bytes(least)} (parameters, buffers and state "
                f"{format_bytes(lasting)}, gradients {format_bytes(self.ledger.gradient_capacity_bytes)}, state still "
                f"to come {format_bytes(self._update_cost.state_bytes)}, temporaries "
                f"{format_bytes(self._update_cost.transient_bytes)}), before any activation",
            )
        self._refuse_together(error)

    def _refuse_together(self, error: BudgetInfeasibleError | None) -> None:
        """Raise an error, on all ranks of a sharded model if one of them has one."""
        if self.agreement is not None:
            self.agreement.refuse_together(error)
        elif error is not None:
            raise error

    def _update_bytes(self, lasting_bytes: int) -> int:
        # Every optimizer's state is still to come until its own first update (`watch` may find one that has some).
        pending = sum(
            cost.state_bytes for optimizer, cost in self._costs if len(optimizer.state) == self._entries[id(optimizer)]
        )
        return lasting_bytes + self.ledger.gradient_capacity_bytes + pending + self._update_cost.transient_bytes

    # --- one step ---------------------------------------------------------------------------------------------

    def begin_step(
        self,
        batch: Any,
        *,
        batch_idx: int = 0,
        epoch: int = 0,
        zeroes_gradients: bool = True,
        accumulates: bool = False,
    ) -> None:
        """Choose a plan for a batch and put it in force, before its forward.

        Args:
            batch: The batch, on its device.
            batch_idx: Index in the epoch, for the record.
            epoch: Index of the epoch, for the record.
            zeroes_gradients: Whether gradients of the last step are set to None before this step's backward.
            accumulates: Whether this step's backward adds to gradients that are there.

        Raises:
            BudgetInfeasibleError: No plan keeps this batch inside the budget.
            SizeError: The batch has no tensors, or another type than before.
        """
        began = time.perf_counter()
        if not accumulates:
            reshard(self._sharded)  # what an evaluation has left gathered is none of this step's
        size = self.advisor.tracker.observe(batch)
        self.ledger.count_gradients()
        if self._trained not in (None, self.ledger.trained):
            self.advisor.forget()
        self._trained = self.ledger.trained
        data = batch_bytes(batch)
        lasting = self.ledger.lasting_bytes() + data
        resident = Resident(lasting, self.ledger.gradient_bytes, zeroes_gradients, self._update_bytes(lasting))
        self._limit_menu()
        if self.tenancy is not None:
            self.tenancy.allow(size, resident)
        advice, error = self.advisor.advise(size, resident, data), None
        if advice.infeasible:
            try:
                self._infeasible_by_prediction(size, resident)
            except BudgetInfeasibleError as found:
                error = found
        actions = None
        if self.agreement is not None:
            advice, actions = self._agree(self.agreement, size, resident, advice, error)
        elif error is not None:
            raise error
        if advice.plan is None:
            actions = self.advisor.shelter
        elif actions is None:
            actions = dict(advice.plan)
        known = resident_tensors(self.model, batch) if advice.plan is None else ()
        self._step = Step(
            size, batch_idx, epoch, advice, resident, data, actions, time.perf_counter() - began, accumulates, known
        )
        self._step.unfilled_bytes = self.ledger.unfilled_bytes()
        self._arm(self._step)
        lasts = resident.update_bytes - self._update_cost.transient_bytes
        if self.tenancy is not None and not self.tenancy.begin(self._step, lasts):
            self._clear(self._step)
            self.begin_step(  # other jobs take more by now: plan anew
                batch, batch_idx=batch_idx, epoch=epoch, zeroes_gradients=zeroes_gradients, accumulates=accumulates
            )

    def _agree(
        self,
        agreement: Agreement,
        size: BatchSize,
        resident: Resident,
        advice: Advice,
        error: BudgetInfeasibleError | None,
    ) -> tuple[Advice, Mapping[str, str] | None]:
        """Come to one plan with the other ranks, see `agreement`; returns what it is here, and what all ranks do."""
        sheltered = Advice(None, None, False)
        own = None if advice.plan is None else advice.plan.choices
        words: list[Word] = agreement.tell(Word(dict(self.session.refused), own, Refusal.of(error)))
        agreement.raise_first([word.refusal for word in words], error)
        known = {unit: reason for word in words for unit, reason in word.refused.items()}
        if any(word.refused.keys() != known.keys() for word in words):
            self.refuse(known)
            self._take_refusals()
            return sheltered, None
        plans = [word.choices for word in words if word.choices is not None]
        if len(plans) < len(words) or advice.plan is None:
            return sheltered, None
        if len(set(plans)) == 1:
            return advice, None
        judged = self.advisor.judge(size, resident)

        def judge(choices: Choices) -> Judgement | None:
            found = judged(choices)
            # This rank's own is what it would do alone, whatever it leaves free.
            return replace(found, fits=True) if found is not None and choices == own else found

        def within(choices: Choices) -> Judgement | None:
            found = judged(choices)
            return None if found is None else replace(found, fits=found.peak_bytes <= self.budget_bytes)

        chosen = agreement.choose(plans, judge)
        if chosen is None:
            least = self.advisor.most_saving(size, resident).plan
            last = (None if least is None else least.choices, self.advisor.may_shelter(size, resident))
            told: list[tuple[Choices | None, bool]] = agreement.tell(last)
            plans += [choices for choices, _ in told if choices is not None]
            chosen = agreement.choose(plans, within)
            if chosen is None and all(sheltered_fits for _, sheltered_fits in told):
                return sheltered, None
        found = judged(chosen) if chosen is not None else None
        if chosen is None or found is None:
            needed = min((each.peak_bytes for choices in plans if (each := judged(choices)) is not None), default=0)
            self._infeasible(size, resident, needed, with_reserve(needed), "under a plan that all ranks share")
            return sheltered, None
        plan = Plan(found.choices, advice.plan.units, found.peak_bytes, found.added_seconds)
        return Advice(plan, found.peak_bytes, advice.cache_hit), dict(chosen)

    def _arm(self, step: Step) -> None:
        if step.sheltered or self._measures_planned_step(step):
            step.gradients = GradientLedger(
                self.ledger.parameters(), follow=step.sheltered, anytime=not step.resident.zeroes_gradients
            )
            step.recorder = StepRecorder(self.device, step.known, step.gradients, profile=self.profile)
        self.session.arm(step.actions, None)
        session, waiting = self.session, self._untried()
        session.tries, session.split_tries = set(), set()
        if step.retried or step.advice.cache_hit:
            return  # a plan that is known had its room looked at when it was made
        if waiting:
            session.tries = waiting & self.advisor.room_to_try(step.size, step.resident, step.advice)
            session.armed = session.armed or bool(session.tries)
        if session.unsplit:
            room = self.advisor.room_to_try(step.size, step.resident, step.advice, split=True)
            session.split_tries = session.unsplit & self.advisor.shelter.keys() & room

    def _limit_menu(self) -> None:
        """Plan no action that a unit was not tried with."""
        self.advisor.indivisible = self.session.indivisible
        self.advisor.limit(self._untried(), self.session.divisible)

    def _untried(self) -> set[str]:
        """Units that could be kept lean but for a trial: lean saves are surveyed in what the shelter recomputes."""
        return self.session.untried & self.advisor.shelter.keys()

    def begin_forward(self) -> None:
        """The forward is about to run; a meter starts here, if this step has one.

        Not in `begin_step`: torch's optimizers run their closure inside a `record_function`, and a profiler that is
        started outside it and stopped inside leaves it with a pointer to memory that is gone.
        """
        step = self._step
        if step is not None and step.recorder is not None and not step.measuring:
            step.measuring = True
            step.recorder.start()
            if step.sheltered:
                self.session.record(step.recorder)

    def _measures_planned_step(self, step: Step) -> bool:
        if self.device.type != "cpu":
            return True
        if not step.resident.zeroes_gradients and not step.accumulates:
            # A loop that frees old gradients when it likes: no meter on CPU sees that, and no unit marks the time.
            return False
        return self._planned % MEASURE_EVERY == 0 or self._verified < VERIFIED_STEPS

    def begin_backward(self, loss: torch.Tensor | None = None) -> None:
        """The forward is done and gradients are zeroed; backward begins.

        Raises:
            RecomputeError: The input of a unit that is to be recomputed was changed in place after its forward.
        """
        step = self._step
        if step is None:
            return
        changed = self.session.changed_inputs() if not step.updating else {}
        if changed:
            self.refuse(changed)
            raise RecomputeError(changed)
        self.session.given.clear()  # what is checked may be changed: another pass of the step may follow
        step.in_backward = True
        if self.tenancy is not None:
            self.tenancy.begin_backward()
        # LBFGS evaluates the loss again inside its update, which is then more than an update.
        step.evaluated_again = step.updating
        if step.gradients is not None and step.recorder is not None and step.measuring:
            step.gradients.begin_backward()
            step.recorder.begin_backward(loss if step.sheltered and not step.updating else None)

    def before_update(self) -> None:
        """Backward is done; an optimizer is about to update.

        Raises:
            BudgetInfeasibleError: The step was measured, and the most saving plan exceeded the budget.
        """
        step = self._step
        if step is None or step.updating:
            return
        measured = step.measuring
        self._finish_together(step)
        step.updating = True
        if self.tenancy is not None:
            self.tenancy.update()
        if measured:
            step.gradients = GradientLedger(self.ledger.parameters(), follow=False)
            step.recorder = StepRecorder(self.device, (), step.gradients, profile=self.profile)
            step.recorder.start()

    def end_step(self) -> StepRecord | None:
        """The step is over; None if none was running.

        Raises:
            BudgetInfeasibleError: As `before_update`, for a step without an update.
        """
        step = self._step
        if step is None:
            return None
        if step.updating:
            self._finish_update(step)
        else:
            self._finish_together(step)
        actions = dict(self.session.actions)
        self._clear(step)
        self._planned += not step.sheltered
        return StepRecord(
            step=0,
            batch_idx=step.batch_idx,
            epoch=step.epoch,
            size=self.advisor.tracker.named(step.size),
            sheltered=step.sheltered,
            cache_hit=step.advice.cache_hit,
            retried=step.retried,
            budget_bytes=self.budget_bytes,
            resident_bytes=step.resident.total_bytes - step.unfilled_bytes,
            predicted_peak_bytes=step.advice.predicted_peak_bytes,
            measured_peak_bytes=step.measured_peak_bytes,
            reserved_peak_bytes=step.reserved_peak_bytes,
            actions=actions,
            planning_seconds=step.planning_seconds,
        )

    def abort_step(self) -> None:
        """An exception ended the step: stop measuring and disarm; nothing is learnt from it."""
        step = self._step
        if step is not None:
            try:
                if step.recorder is not None and step.measuring:
                    step.recorder.stop()
            finally:
                self._clear(step)

    def _clear(self, step: Step) -> None:
        if step.gradients is not None:
            step.gradients.close()
        step.recorder = step.gradients = None
        self.session.disarm()
        self._step = None
        if self.tenancy is not None:
            self.tenancy.end()
        if len(self.session.refused) != len(self._told):
            self._take_refusals()
        self.session.tries, self.session.split_tries = set(), set()
        self._limit_menu()
        if self.session.surprised:
            self.session.surprised = False
            self.advisor.different = dict(self.session.different)
            self.advisor.forget()

    def _finish_together(self, step: Step) -> None:
        """Stop the meter; if a rank of a sharded model finds the budget broken, all refuse the step."""
        error = None
        try:
            self._finish_measuring(step)
        except BudgetInfeasibleError as found:
            error = found
        if step.sheltered:
            self._refuse_together(error)

    def _finish_measuring(self, step: Step) -> None:
        """Stop the meter after backward, learn, and see whether the promise was kept."""
        if step.recorder is None or step.gradients is None or not step.measuring:
            return
        step.recorder.mark("step", "end")
        trace, step.recorder = step.recorder.stop(), None
        self.session.recorder = None  # a closure that runs again (LBFGS) is no call to learn from
        step.gradients.close()
        if not trace.marks:
            self._unmeasured += 1
            if self._unmeasured == UNMEASURED_STEPS:
                warnings.warn(
                    f"{UNMEASURED_STEPS} steps in a row could not be measured: their backward runs in another thread, "
                    "or a profiler starts inside them. Until some can be, every step recomputes all it may. Run "
                    "backward in the thread of the forward, or start the profiler before the step.",
                    stacklevel=4,
                )
            return
        self._unmeasured = 0
        peak = self._take_peak(step, trace)
        if not step.sheltered:
            plan, predicted = step.advice.plan, step.advice.predicted_peak_bytes
            exact = plan is not None and dict(plan) == step.actions  # not a bound for what another rank has planned
            if plan is not None and predicted is not None and exact and not self.session.compared:
                # The prediction covers the whole step, of which the update is still to come.
                whole = max(peak, step.resident.update_bytes)
                self.advisor.verify(step.size, step.resident, plan, predicted, whole)
                self._verified += 1
            if predicted is not None and predicted <= self.budget_bytes < peak and not self._warned:
                self._warned = True
                warnings.warn(
                    f"A batch of {self.advisor.tracker.named(step.size)} reached {format_bytes(peak)}, above the "
                    f"budget of {format_bytes(self.budget_bytes)}, under a plan predicted to stay inside it. The next "
                    "batches are planned with what was missing kept free.",
                    stacklevel=4,
                )
            return
        if trace.retained:
            if not self._told_retained:
                self._told_retained = True
                warnings.warn(
                    "A step ran backward twice over one graph (retain_graph or create_graph): what is kept lives until "
                    "the last pass, which no prediction describes, so such steps recompute as much as they can.",
                    stacklevel=4,
                )
        elif step.retried:
            pass  # a retry is recorded for its peak, not to learn from
        elif any("backward" in call.marks for call in trace.calls):
            kept = None if step.resident.zeroes_gradients else step.resident.old_gradient_bytes
            observation = observe(trace, step.batch_bytes, kept, GRADES)
            self.advisor.learn(step.size, observation)
            self._hint("attention", attention_hint(self.model, observation.structure, observation.values))
        elif not trace.calls and not self._unreached and any(mark.name == "backward" for mark in trace.marks):
            self._unreached = True
            warnings.warn(
                f"No unit of {type(self.model).__name__} was called in a step, so nothing can be recomputed. If the "
                "step runs inside torch.compile, compile each block instead (block.compile()); if it does not call "
                "the modules themselves, name those that it calls by units=.",
                stacklevel=4,
            )
        if peak > self.budget_bytes:
            self._infeasible(step.size, step.resident, peak, with_reserve(peak), "with every unit recomputed")

    def _hint(self, about: str, text: str | None) -> None:
        self.advisor.hints.pop(about, None)
        if text is not None:
            self.advisor.hints[about] = text

    def _finish_update(self, step: Step) -> None:
        if step.recorder is None or not step.measuring:
            return
        state_before = step.resident.lasting_bytes - step.batch_bytes
        seen = step.recorder.sees_old_frees or not step.evaluated_again
        trace, step.recorder = step.recorder.stop(), None
        if not seen:
            step.measured_peak_bytes = None  # much of the memory that such an update frees is older than the step
            return
        before_update = step.measured_peak_bytes or 0
        self._take_peak(step, trace)
        if (step.measured_peak_bytes or 0) > before_update > 0:
            transient = self._update_cost.transient_bytes
            optimizers = [optimizer for optimizer, _ in self._costs]
            self._hint("update", update_hint(optimizers, transient, step.measured_peak_bytes or 0, before_update))
        if self.ledger.lasting_bytes() == state_before and not step.evaluated_again:
            # The update as it really is replaces what was measured on small copies.
            transient = max((interval.peak_bytes for interval in trace.intervals), default=0)
            self._update_cost = OptimizerCost(self._update_cost.state_bytes, transient)

    def _take_peak(self, step: Step, trace: StepTrace) -> int:
        peak = step.resident.lasting_bytes + trace.peak_bytes
        reached = max(peak, step.resident.lasting_bytes + trace.aside_peak_bytes)
        step.measured_peak_bytes = max(reached - step.unfilled_bytes, step.measured_peak_bytes or 0)
        if trace.reserved_peak_bytes is not None:
            step.reserved_peak_bytes = max(trace.reserved_peak_bytes, step.reserved_peak_bytes or 0)
            self.advisor.learn_reserved(step.measured_peak_bytes, step.reserved_peak_bytes)
        return peak

    # --- running a step again ---------------------------------------------------------------------------------

    @property
    def stepping(self) -> bool:
        """Whether a step is under way whose update has not begun."""
        return self._step is not None and not self._step.updating

    def in_backward(self) -> bool:
        """Whether the step that is running has begun its backward."""
        return self._step is not None and self._step.in_backward

    @property
    def learning(self) -> bool:
        """Whether the step that is running is one of those in which things are learnt."""
        return self._step is not None and (self._step.sheltered or self.session.learning_steps > 0)

    @property
    def gradients(self) -> Literal["freed", "zeroed", "kept"]:
        """What becomes of older gradients before this step's backward."""
        if self._step is None or self._step.accumulates:
            return "kept"
        return "freed" if self._step.resident.zeroes_gradients else "zeroed"

    @property
    def latest_region(self) -> str | None:
        """The unit that was recomputed last."""
        return self.session.latest

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Never recompute some units."""
        self.session.refuse(reasons)

    def again(self, *, leaner: bool, why: str) -> bool:
        """Make the step that failed ready to run again.

        Args:
            leaner: Whether it needs the most saving plan, and not just one without the units refused meanwhile.
            why: What happened, for the log.

        Returns:
            Whether it may; not if it ran under the most saving plan already.
        """
        step = self._step
        if step is None:
            return False
        before = dict(self.session.actions)
        if step.recorder is not None and step.measuring:
            step.recorder.stop()
        if step.gradients is not None:
            step.gradients.close()
        step.recorder, step.gradients, step.measuring, step.in_backward, step.retried = None, None, False, False, True
        self._take_refusals()
        if leaner and not self.session.compared:  # a trial beside the step was not what had been planned
            self.advisor.learn_out_of_memory(step.advice.predicted_peak_bytes)
        step.advice = self.advisor.most_saving(step.size, step.resident) if leaner else Advice(None, None, False)
        step.actions = dict(self.advisor.shelter if step.advice.plan is None else step.advice.plan)
        if leaner and step.actions == before:
            return False
        self.advisor.announce(
            f"mimose: batch {step.batch_idx} ({dims_text(self.advisor.tracker.named(step.size))}) runs again with "
            f"{len(step.actions)} units recomputed: {why}"
        )
        self._arm(step)
        if self.tenancy is not None:
            self.tenancy.again(step, step.resident.update_bytes - self._update_cost.transient_bytes)
        return True

    def out_of_memory(self, error: BaseException, hint: str) -> DeviceMemoryError:
        """What to raise when the device is out of memory and the step cannot run again: where the memory went."""
        step = self._step
        resident = step.resident.total_bytes if step is not None else self.ledger.lasting_bytes()
        holds = self.advisor.holds(step.size, step.resident, self.session.actions) if step is not None else None
        return device_memory_error(self.budget_bytes, self.memory.description, resident, holds, error, hint)

    # --- refusing ---------------------------------------------------------------------------------------------

    def _infeasible_by_prediction(self, size: BatchSize, resident: Resident) -> None:
        timeline, _ = self.advisor.timeline(dict(size.dims))
        plan, sure = self.advisor.least(timeline), self.advisor.sure_bytes(timeline)
        where = timeline.peak_position(dict(plan))
        least = min(sure, plan.predicted_peak_bytes)
        self._infeasible(size, resident, least, sure, f"under the most saving plan (at: {where})")

    def _infeasible(self, size: BatchSize, resident: Resident, needed: int, sure: int, how: str) -> None:
        what = f"a batch of {self.advisor.tracker.named(size)} needs {format_bytes(needed)} {how}"
        if self.on_infeasible == "raise":
            # A loop that goes on after the error must be refused again, not find the plan.
            self.advisor.planner.forget()
            what += self.tenancy.beside() if self.tenancy is not None else ""
            raise infeasible_error(self.budget_bytes, resident.total_bytes, sure, what)
        warnings.warn(
            f"The budget of {format_bytes(self.budget_bytes)} cannot be kept: {what}. Going on with that plan.",
            stacklevel=4,
        )
