"""The step that is running: its plan put in force, once more where the step failed, and taken out of force again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advice import Advice
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.budget import DeviceMemory, device_memory
from lightning_mimose.dims import dims_text
from lightning_mimose.engine.attachment import Attachment
from lightning_mimose.engine.decisions import Decisions
from lightning_mimose.engine.inlets import Inlets
from lightning_mimose.engine.lessons import Lessons
from lightning_mimose.engine.metering import Metering
from lightning_mimose.engine.refusal import device_memory_error
from lightning_mimose.engine.step import Step
from lightning_mimose.engine.tenancy import Tenancy
from lightning_mimose.engine.trials import Trials
from lightning_mimose.errors import DeviceMemoryError
from lightning_mimose.measure import counters
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.peak import PeakRecorder
from lightning_mimose.measure.resident import ResidentLedger
from lightning_mimose.measure.update import UpdateReserve
from lightning_mimose.sizes import BatchSize


class Running:
    """The step that is running, whichever that is, and how it is made to run again where it failed.

    Args:
        device: Where it runs.
        memory: What the device has.
        advisor: Knows the most saving plan.
        session: What the units consult.
        ledger: What is resident.
        update: What updates need.
        decisions: Decides about it, and knows whether several ranks come to one plan.
        attachment: Tells plans what is never recomputed.
        trials: Names the units that are tried.
        inlets: Reads its size, where that shows only when the model is called.
        lessons: Learns from what it called.
        metering: Measures it.
        tenancy: The part of a shared budget, if it is one.

    Attributes:
        step: The step; None between steps.
    """

    def __init__(
        self,
        device: torch.device,
        memory: DeviceMemory,
        advisor: Advisor,
        session: Session,
        ledger: ResidentLedger,
        update: UpdateReserve,
        decisions: Decisions,
        attachment: Attachment,
        trials: Trials,
        inlets: Inlets,
        lessons: Lessons,
        metering: Metering,
        tenancy: Tenancy | None,
    ) -> None:
        self._device, self._memory = device, memory
        self._advisor, self._session = advisor, session
        self._ledger, self._update = ledger, update
        self._decisions, self._attachment, self._trials = decisions, attachment, trials
        self._inlets, self._lessons, self._metering, self._tenancy = inlets, lessons, metering, tenancy
        self.step: Step | None = None

    @property
    def stepping(self) -> bool:
        """Whether a step is under way whose update has not begun."""
        return self.step is not None and not self.step.updating

    def in_backward(self) -> bool:
        """Whether the step that is running has begun its backward."""
        return self.step is not None and self.step.in_backward

    @property
    def learning(self) -> bool:
        """Whether the step that is running is one of those in which things are learnt."""
        return self.step is not None and (self.step.learns or self._session.learning_steps > 0)

    @property
    def gradients(self) -> Literal["freed", "zeroed", "kept"]:
        """What becomes of older gradients before this step's backward."""
        if self.step is None or self.step.accumulates:
            return "kept"
        return "freed" if self.step.resident.zeroes_gradients else "zeroed"

    @property
    def latest_region(self) -> str | None:
        """The unit that was recomputed last."""
        return self._session.latest

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Never recompute some units."""
        self._session.refuse(reasons)

    def arm(self, step: Step) -> None:
        """Put the plan of a step in force: it is the one that is running."""
        self.step = step
        self._inlets.close()
        self._keep_some(step)
        self._metering.arm(step)
        if step.undecided:
            self._session.arm({}, None)
            self._inlets.wait(self)
        else:
            self._put_in_force(step)

    def _keep_some(self, step: Step) -> None:
        """Of a sheltered step that nothing would be learnt from keep what there is room for, for sure."""
        alone = self._decisions.agreement is None and self._tenancy is None
        if not alone or step.retried or step.undecided or not step.sheltered or not self._lessons.rest(step):
            return
        advice = self._advisor.keeping_some(step.size, step.resident)
        if advice is not None and advice.plan is not None:
            step.advice, step.actions = advice, self._advisor.actions_of(advice.plan)

    def _put_in_force(self, step: Step, recorder: StepRecorder | None = None) -> None:
        advisor, session = self._advisor, self._session
        strangers: frozenset[str] = frozenset()
        if step.advice.plan is not None and self._decisions.agreement is None:  # a rank recomputes nothing alone
            strangers = advisor.strangers_to(step.advice.plan)
        session.arm(step.actions, recorder, strangers)
        handing = advisor.estimator.observed.handing
        session.hand_on(advisor.handed_on, handing.takers, handing.places)
        if step.undecided:
            return
        self._trials.arm(step)
        if not step.retried:
            self._inlets.watch(self, step.size, learns=step.learns)

    def decide(self, size: BatchSize | None) -> None:
        """The size of the step that is running is known, before its units are given tensors; None: it cannot be."""
        step = self.step
        assert step is not None
        self._decisions.settle(step, size)
        if not step.is_measured:
            self._keep_some(step)
        records = step.learns and step.sheltered and step.measuring and not step.updating
        recorder = step.recorder if records and isinstance(step.recorder, StepRecorder) else None
        self._put_in_force(step, recorder)
        self._metering.decided(step)

    def shelter(self) -> None:
        """The size of the step that is running has told something else than the model is given; no unit has run yet."""
        step, session = self.step, self._session
        if step is None or step.sheltered:  # nothing is learnt from it, for all is forgotten
            return
        step.advice, step.actions = Advice(None, None, False), dict(self._advisor.shelter)
        session.arm(step.actions, None)
        session.unproven.clear()
        session.tries, session.split_tries = set(), set()  # what has room beside the step is not known

    def distrust(self) -> None:
        """The step that is running may run backward in its midst, as no plan expects; no unit has run yet."""
        step, wants = self.step, self._session.wants_gradient
        if step is None or wants is None or self._decisions.agreement is not None:  # a rank recomputes nothing alone
            return
        step.foretold = True
        # What bounds tell was learnt from such steps, too, if any was measured.
        if not (step.advice.bounded and self._advisor.penalties.knows(wants)):
            self.shelter()
            self._metering.begin_late(step)

    def look_at_posture(self) -> None:
        """Plan the step that is running anew if the model was switched since it began; no unit has run yet.

        Raises:
            BudgetInfeasibleError: No plan keeps it inside the budget as the model is set now.
        """
        step = self.step
        if step is None or step.updating or not self._decisions.turns(step):
            return
        if step.undecided or self._decisions.agreement is not None:  # a rank recomputes nothing alone
            return
        if step.spare_bytes or self._decisions.claims:
            self.shelter()
        else:
            self.decide(step.size)

    def shelter_rest(self) -> None:
        """As `shelter`, of the units that are still to run."""
        step = self.step
        if step is not None and not step.sheltered:
            step.advice, step.mixed = Advice(None, None, False), True
            self._session.unproven.clear()
            self._session.act_from_now(dict(self._advisor.shelter))

    def resize(self, size: BatchSize) -> None:
        """The forward of the step that is running is over, and this was its size."""
        step = self.step
        if step is not None and size != step.size:
            advice, step.undecided = step.advice, False
            if advice.plan is not None and advice.predicted_peak_bytes is not None:
                peak = self._advisor.peak_under(advice.plan, size, step.resident)
                step.advice = advice._replace(predicted_peak_bytes=peak)
            step.size = size

    def disarm(self, step: Step, *, ran: bool = True) -> None:
        """Take the plan out of force: the step is over.

        Args:
            step: The step that is running.
            ran: Whether it ran, and no other one begins in its place.
        """
        self._metering.close(step)
        self._inlets.close()
        session, self.step = self._session, None
        if not ran:
            session.cut_short()
        armed = session.armed
        session.disarm(ran=ran)
        if self._tenancy is not None:
            self._tenancy.end()
        # Else the next one may be like it, and would have to fail first.
        if (step.measured_peak_bytes or 0) <= self._advisor.budget_bytes:
            self._attachment.keep_budget()
        if self._attachment.has_news:
            self._attachment.take_refusals()
        if armed:  # else no unit can have been tried
            self._trials.disarm()
            if session.comparisons.news:
                self._advisor.compared_at(step.size, session.comparisons.news)
                session.comparisons.news.clear()
        if session.surprised:
            session.surprised = self._lessons.renews = self._lessons.unlike.renews = False
            self._advisor.different = dict(session.different)
            self._advisor.spoiled = frozenset(session.spoiled)
            self._advisor.forget()
        elif self._lessons.renews or self._lessons.unlike.renews:  # not in mid-step: its plan's grounds are to judge it
            self._advisor.forget(everywhere=self._lessons.unlike.renews)
            self._lessons.renews = self._lessons.unlike.renews = False

    def again(self, *, leaner: bool, why: str, allocator_failed: bool = False) -> bool:
        """Make the step that failed ready to run again.

        Args:
            leaner: Whether it needs the most saving plan, and not just one without the units refused meanwhile.
            why: What happened, for the log.
            allocator_failed: Whether it was the device's allocator that had no more.

        Returns:
            Whether it may; not if it ran under the most saving plan already.
        """
        step, advisor, session = self.step, self._advisor, self._session
        if step is None or (step.undecided and leaner and step.retried):
            return False
        before = {unit: action for unit, action in session.actions.items() if unit not in session.met}
        if session.met:
            self._lessons.of_strangers(step)
        # A step that learns has put the peak back at every mark.
        counted = allocator_failed and isinstance(step.recorder, PeakRecorder)
        failed = counters.read(self._device) if counted else None
        self._metering.failed(step)
        session.cut_short()
        step.in_backward, step.retried, mixed, step.mixed = False, True, step.mixed, False
        self._attachment.take_refusals()
        if leaner and not session.compared:  # a trial beside the step was not what had been planned
            advisor.learn_out_of_memory(step.advice.predicted_peak_bytes, failed)
            if step.advice.bounded:
                advisor.estimator.bounds.refute()
        step.advice = Advice(None, None, False)
        if leaner and not step.undecided:
            step.advice = advisor.most_saving(step.size, step.resident)
        step.actions = dict(advisor.shelter if step.advice.plan is None else step.advice.plan)
        if leaner and step.actions == before and not (mixed or step.undecided or self._attachment.exceed_budget()):
            return False
        advisor.announce(
            f"mimose: batch {step.batch_idx} ({dims_text(advisor.tracker.named(step.size))}) runs again with "
            f"{len(step.actions)} units recomputed: {why}"
        )
        self.arm(step)
        if self._tenancy is not None:
            self._tenancy.again(step, self._update.rest_bytes(step.resident))
        return True

    def out_of_memory(self, error: BaseException, hint: str) -> DeviceMemoryError:
        """What to raise when the device is out of memory and the step cannot run again: where the memory went.

        Args:
            error: What the device said.
            hint: Why the step was not run again.
        """
        step, advisor = self.step, self._advisor
        resident = step.resident.total_bytes if step is not None else self._ledger.lasting_bytes()
        holds = None
        if step is not None and step.undecided:
            hint = "It ended before the model was called: nothing is planned before that."
        if step is not None and not step.undecided:
            holds = advisor.holds(step.size, step.resident, self._session.actions)
        capped = self._attachment.is_capped and isinstance(error, torch.OutOfMemoryError)
        beyond = device_memory(self._device).free_bytes if capped else 0
        place = self._memory.description
        return device_memory_error(advisor.budget_bytes, place, resident, holds, error, hint, beyond_bytes=beyond)
