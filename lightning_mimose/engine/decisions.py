"""From a batch to the step that will run: its size, what is resident, the advice, and the actions in force."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_mimose.actions.session import REPEATING, Session
from lightning_mimose.advise.advice import Advice
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.advise.hints import staying_hint
from lightning_mimose.advise.room import may_prove
from lightning_mimose.agreement import Agreement
from lightning_mimose.budget import format_bytes
from lightning_mimose.engine.attachment import Attachment
from lightning_mimose.engine.consensus import Consensus
from lightning_mimose.engine.inlets import Inlets
from lightning_mimose.engine.posture import Posture
from lightning_mimose.engine.refusal import Refuser
from lightning_mimose.engine.step import Step
from lightning_mimose.engine.tenancy import Tenancy
from lightning_mimose.engine.trials import Trials
from lightning_mimose.errors import BudgetInfeasibleError
from lightning_mimose.measure.others import Others
from lightning_mimose.measure.resident import ResidentLedger, batch_bytes
from lightning_mimose.measure.saved import resident_tensors
from lightning_mimose.measure.update import UpdateReserve
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sharding import reshard, sharded_modules
from lightning_mimose.sizes import UNSIZED, BatchSize


class Decisions:
    """Decides about the steps of one model.

    Args:
        model: The model.
        advisor: Plans.
        session: Knows what units were tried.
        ledger: What is resident.
        update: What updates need.
        refuser: Refuses what fits no plan.
        trials: Tells plans what was tried.
        attachment: Tells plans what is never recomputed.
        inlets: Reads sizes.
        agreement: How the ranks of a sharded model come to one plan, if it is one.
        tenancy: The part of a shared budget, if it is one.
        others: What else is on the device; None where nobody can tell (CPU), or a shared budget does.
    """

    def __init__(
        self,
        model: nn.Module,
        advisor: Advisor,
        session: Session,
        ledger: ResidentLedger,
        update: UpdateReserve,
        refuser: Refuser,
        trials: Trials,
        attachment: Attachment,
        inlets: Inlets,
        agreement: Agreement | None,
        tenancy: Tenancy | None,
        others: Others | None,
    ) -> None:
        self._model, self._advisor, self._session, self._ledger = model, advisor, session, ledger
        self._update, self._refuser, self._trials = update, refuser, trials
        self._inlets, self.agreement, self._tenancy = inlets, agreement, tenancy
        self._attachment = attachment
        self._consensus = Consensus(advisor, refuser, session, attachment)
        self._sharded = sharded_modules(model)
        self._trained: tuple[bool, ...] | None = None
        self._left_out: frozenset[int] = frozenset()
        self._posture = Posture(model)
        self._modes: tuple[bool, ...] | None = None
        """The posture of the steps that the advisor now knows of."""
        self._told_of: set[tuple[bool, ...]] = set()
        """Postures, with what is trained in them, that the user was told of."""
        self._told = {0}
        """Kinds of step that the user was told of."""
        self._others = others

    def reserve(self, optimizers: Sequence[Optimizer]) -> None:
        """Name the optimizers; what the first update of what is trained will allocate is reserved from now on.

        Raises:
            BudgetInfeasibleError: Parameters, gradients and optimizer state alone, with what else is on the device,
                exceed the budget.
        """
        self._update.watch(optimizers)
        ledger, cost = self._ledger, self._update.cost
        lasting = ledger.lasting_bytes()
        parts = (
            f"parameters, buffers and state {format_bytes(lasting)}, gradients "
            f"{format_bytes(ledger.gradient_capacity_bytes)}, state still to come "
            f"{format_bytes(cost.state_bytes)}, temporaries {format_bytes(cost.transient_bytes)}"
        )
        least = self._update.peak_bytes(lasting)
        if self._tenancy is not None:
            self._tenancy.settle(least - cost.transient_bytes)
        if self._others is not None and (beside := self._others.count(ledger.there_bytes())[0]):
            least, parts = least + beside, f"{parts}, what else is on the device {format_bytes(beside)}"
        self.refuse_together(self._refuser.update(lasting, ledger.gradient_bytes, least, parts))

    def refuse_together(self, error: BudgetInfeasibleError | None) -> None:
        """Raise an error, on all ranks of a sharded model if one of them has one."""
        if self.agreement is not None:
            self.agreement.refuse_together(error)
        elif error is not None:
            raise error

    def decide(
        self, batch: Any, *, batch_idx: int, epoch: int, zeroes_gradients: bool, accumulates: bool, updates: bool
    ) -> Step:
        """The step of a batch, see `Engine.begin_step`; undecided where its size shows only later."""
        began = time.perf_counter()
        advisor, ledger = self._advisor, self._ledger
        if self._sharded and not accumulates:
            reshard(self._sharded)  # what an evaluation has left gathered is none of this step's
        size = self._inlets.size_of(batch)
        if self._attachment.lost_units():
            ledger.refresh()
            self._trained = ()  # others, whichever of them are trained
        ledger.count_gradients()
        if ledger.trained is not self._trained:
            before, self._trained = self._trained, ledger.trained
            if before not in (None, ledger.trained):
                if len(before) != len(ledger.trained or ()) or not advisor.postures.follows:
                    advisor.forget()  # else what was learnt while others were trained is laid aside, as of any posture
                    advisor.misses.trained_anew()
                    self._posture.look()
                self.reserve(ledger.optimizers)
        stay = bool(ledger.left_out)
        if ledger.left_out != self._left_out or stay != advisor.beside_staying:
            # In the steps before, gradients were made that stay now, or stayed.
            self._left_out, advisor.beside_staying = ledger.left_out, stay
            advisor.forget()
            hint = staying_hint(ledger.staying_bytes, len(ledger.left_out))
            advisor.hint("staying", hint)
            if hint is not None:
                advisor.announce(f"mimose: {hint}")
        modes = self._posture.expected(ledger.trained or ())
        kind = advisor.postures.foresee(modes, batch_idx)
        self._take_posture(modes, kind, batch_idx, epoch)
        data = batch_bytes(batch)
        others, reckoned = self._others.count(ledger.there_bytes() + data) if self._others is not None else (0, 0)
        lasting = ledger.lasting_bytes() + data + reckoned
        zeroes_gradients |= accumulates and not ledger.gradient_bytes  # after a batch that was skipped
        update = self._update
        resident = Resident(
            lasting,
            ledger.gradient_bytes,
            zeroes_gradients,
            update.peak_bytes(lasting),
            update.again_bytes,
            counts_held=self._others is not None,
            updates=updates or self._tenancy is not None,  # what a claim ends with are the gradients, too
        )
        step = Step(
            size or UNSIZED,
            batch_idx,
            epoch,
            Advice(None, None, False),
            resident,
            data,
            others,
            {},
            time.perf_counter() - began,
            accumulates,
            partial(resident_tensors, self._model, batch),
            unfilled_bytes=ledger.unfilled_bytes(),
            undecided=size is None,
            spare_bytes=reckoned - others,
            kind=kind,
        )
        if size is not None:
            self.settle(step, size)
        return step

    @property
    def claims(self) -> bool:
        """Whether what a step may take is claimed before it begins, for several trainings share the budget."""
        return self._tenancy is not None

    def turns(self, step: Step) -> bool:
        """A step's first unit is called; returns whether modules were switched otherwise than was expected."""
        trained = self._ledger.trained_now()
        turned = self._posture.turned(trained) and self._advisor.postures.follows
        if not turned:
            return False
        modes = self._posture.now(trained)
        step.kind = self._advisor.postures.foresee(modes, step.batch_idx, begins=False)
        # Of several ranks the plan stays in force: it was made for what had been tried.
        self._take_posture(modes, step.kind, step.batch_idx, step.epoch, may_try=self.agreement is None, begins=False)
        return True

    def _take_posture(
        self,
        modes: tuple[bool, ...],
        kind: int,
        batch_idx: int,
        epoch: int,
        *,
        may_try: bool = True,
        begins: bool = True,
    ) -> None:
        """Take up what is known of steps in which modules are set like that, of the kind that is foreseen."""
        is_new, switched = self._advisor.take_posture(modes, kind, begins=begins), False
        if self._advisor.postures.follows and may_try:
            switched = self._session.take_modes(self._posture.of_modules(modes))
        before, self._modes = self._modes, modes
        first = len(self._posture.of_modules(modes))  # of the parameters
        if is_new and before is not None and before[first:] != modes[first:]:
            self._advisor.misses.trained_anew()
            if modes not in self._told_of:
                self._told_of.add(modes)
                self._advisor.announce(
                    f"mimose: other parameters are trained since batch {batch_idx} of epoch {epoch}: what steps take "
                    "is learnt for itself"
                )
        elif is_new and switched:
            self._advisor.announce(
                f"mimose: modules were switched between training and evaluation, or dropout on or off, before batch "
                f"{batch_idx} of epoch {epoch}: what steps take is learnt anew"
            )
        elif kind not in self._told and self._advisor.postures.kinds.is_sure(kind):
            self._told.add(kind)
            self._advisor.announce(
                f"mimose: before batch {batch_idx} of epoch {epoch} a step had other operations than most (a loss "
                "that is added, or goes back twice, in some steps?): what such steps take is learnt for itself"
            )

    def settle(self, step: Step, size: BatchSize | None) -> None:
        """Decide about a step whose size is known by now; None: it runs sheltered, for it cannot be.

        Raises:
            BudgetInfeasibleError: No plan keeps it inside the budget.
        """
        if size is None:
            step.actions = self._advisor.shelter
            self._session.unproven.clear()
            return
        began = time.perf_counter()
        resident, data = step.resident, step.batch_bytes
        step.size, step.undecided = size, False
        if self._session.news:
            self._trials.limit_menu()
        if self._tenancy is not None:
            self._tenancy.allow(size, resident)
        advice, error = self._advisor.advise(size, resident, data), None
        if advice.infeasible or self._cannot_update(resident, advice):
            try:
                if advice.infeasible:
                    self._refuser.by_prediction(size, resident)
                else:  # nothing is known of its size, but what updates took that were made
                    self._refuser.by_update(size, resident)
            except BudgetInfeasibleError as found:
                error = found
        elif (advice.predicted_peak_bytes or 0) > self._advisor.budget_bytes:  # as was said of its size before
            self._refuser.exceed()
        actions = None
        if self.agreement is not None:
            advice, actions = self._consensus.reach(self.agreement, size, resident, advice, error)
        elif error is not None:
            raise error
        elif self._session.unproven and not self._may_prove(size, resident, advice):
            advice = Advice(None, None, False)
        if advice.plan is None:
            actions = self._advisor.shelter
            self._session.unproven.clear()
        elif actions is None:
            actions = self._advisor.actions_of(advice.plan)
        if step.spare_bytes:
            if advice.predicted_peak_bytes is not None:
                advice = advice._replace(predicted_peak_bytes=advice.predicted_peak_bytes - step.spare_bytes)
            step.resident = resident.without(step.spare_bytes)
        step.advice, step.actions = advice, actions
        step.planning_seconds += time.perf_counter() - began

    def _cannot_update(self, resident: Resident, advice: Advice) -> bool:
        """Whether the update of a step breaks the budget for sure, if it is like the latest ones."""
        if self._tenancy is not None and advice.predicted_peak_bytes is not None:
            return False  # what was granted is for its plan, and more may be
        return self._update.surely_bytes(resident.lasting_bytes)[0] > self._advisor.budget_bytes

    def _may_prove(self, size: BatchSize, resident: Resident, advice: Advice) -> bool:
        """Whether units that act for the first time may be proven beside a step; if not, a sheltered one does that."""
        if advice.plan is None:
            return True
        actions = self._advisor.actions_of(advice.plan)
        units = {unit for unit, action in actions.items() if action in REPEATING} & self._session.unproven
        may = not units or may_prove(self._advisor, size, resident, actions, units)
        return may or not self._advisor.may_shelter(size, resident)
