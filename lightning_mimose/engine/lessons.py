"""What a measured step teaches: the advisor is told, and the user where a promise could not be kept."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from math import comb
from typing import Any

import torch
from torch import nn

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advice import with_reserve
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.advise.hints import allocator_hint, attention_hint, size_hint, update_hint
from lightning_mimose.engine.judge import Judge, named_shortly
from lightning_mimose.engine.refusal import Refuser
from lightning_mimose.engine.step import Step
from lightning_mimose.engine.unlike import Unlike
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.laps import Laps
from lightning_mimose.measure.observe import observe
from lightning_mimose.measure.resident import ResidentLedger
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.measure.update import UpdateReserve
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.resting import Resting
from lightning_mimose.predict.rows import held_in_update
from lightning_mimose.sizes import BatchSize, Place

UNMEASURED_STEPS = 3
"""Steps in a row that could not be measured before the user is told."""

TIMED_STEPS = 20
"""Steps that are timed at first, of those that are not measured unit by unit."""
VAIN_STEPS, MOST_DIMENSIONS, FEW_DIMENSIONS, MANY_LAYOUTS = 20, 5, 2, 3
"""Sheltered steps that were learnt from before sizes in more dimensions than these are read elsewhere, if they can; and
before those in more than a few are, for which plans may be made unless a maximum of them decides, twice as many as a
quadratic form of them has terms."""
PLANNED_COUNTS = 3
"""How many of these one makes up for that is planned: now and then one is, whose size had been measured."""
SHELTERED_STEPS = 60
"""Sheltered steps that were learnt from before the user is told: far more than sizes in two dimensions take."""


class Lessons:
    """Learns from the steps of one model.

    Args:
        model: The model.
        advisor: Who learns.
        session: What the units did.
        ledger: What is resident.
        update: What updates need.
        refuser: Refuses what broke the budget under the most saving plan.
        device: Where the steps run.
    """

    def __init__(
        self,
        model: nn.Module,
        advisor: Advisor,
        session: Session,
        ledger: ResidentLedger,
        update: UpdateReserve,
        refuser: Refuser,
        device: torch.device,
    ) -> None:
        self._model, self._advisor, self._session = model, advisor, session
        self._ledger, self._update, self._refuser = ledger, update, refuser
        self._laps: Laps[tuple[BatchSize, dict[str, str]]] = Laps(device)
        """Planned steps, forward and backward: size and actions of each."""
        self._timed = self._timed_since = 0
        self._unreached = self._told_apart = False
        self._evaluates = False
        """Whether updates evaluate the loss again."""
        self._unmeasured = self._learnt = 0
        self._learnt_of: Counter[int] = Counter()
        """Layout of sizes -> steps of it that were learnt from, less those that the planned ones make up for."""
        self._read_at = Place(0)
        self._resting = Resting()
        self.renews = False
        self.unlike = Unlike(advisor)
        self._judge = Judge(advisor, session, self.unlike)

    @property
    def verified(self) -> int:
        """Planned steps in a row whose prediction held, more or less; no more than there were of this mode and kind."""
        return min(self._advisor.misses.verified, self._advisor.estimator.verified)

    def of_kind(self, step: Step, what: Hashable) -> None:
        """A step's passes are over: learn of which kind it was.

        Args:
            step: The step.
            what: Stands for what it did with gradients, see `engine.passes`.
        """
        units = self._session.path()
        seen = self._advisor.postures.saw(step.batch_idx, step.size, what, units)
        step.strange = seen.kind not in (None, step.kind)
        if not step.strange:
            self._advisor.called(step.size, units)
        if seen.doubts and not step.sheltered:
            self._advisor.misses.verified = 0  # the next are held against theirs
            if seen.is_new:
                self._advisor.wait_for(step.size)
        for size in seen.mixed:
            self._advisor.unlearn(size)
        if seen.renews:
            self.renews = True
            self._advisor.announce(
                "mimose: forwards had different operations, so what was learnt of steps is learnt anew"
            )
        self.unlike.ran(step.size, what)

    def begin_lap(self, *, anyway: bool, counts: bool) -> Any:
        """The point of the device's time at which a step begins; None where it is not timed.

        Args:
            anyway: Whether it is timed although some were.
            counts: Whether it is one of these from now on.
        """
        if self._timed_since != self._advisor.forgotten:
            self._timed_since, self._timed = self._advisor.forgotten, 0
            self._laps.forget()
        if not self._advisor.owns_allocator or (self._timed >= TIMED_STEPS and not anyway):
            return None  # of others' work on the device its time tells as much
        self._timed += counts
        return self._laps.now()

    def rest(self, step: Step) -> bool:
        """Whether a step is not learnt from, though it is sheltered: too many of its like were, in vain."""
        return self._resting.rests(self._way, () if step.undecided else step.size.dims)

    def ran(self, step: Step) -> None:
        """A step is over, learnt from or not."""
        self._resting.ran(self._way, step.size.dims, sheltered=step.is_untrusted)

    @property
    def _way(self) -> tuple[object, int]:
        # Another one wherever something is learnt anew, and each mode and kind of step has its own.
        return self._advisor.estimator.token, self._advisor.forgotten

    def in_vain(self, size: BatchSize) -> bool:
        """Whether many steps were learnt from and none of their layouts planned, for sizes tell hardly anything."""
        learnt = self._learnt_of.total()
        if learnt < VAIN_STEPS or self._advisor.tracker.entries:
            return False
        dims = len(self._advisor.independent_dims(size))
        # Few of these, and not for there are that many (lists of another number of tensors each time).
        if self._learnt_of[size.layout] <= dims and len(self._learnt_of) < MANY_LAYOUTS:
            return False
        return dims > MOST_DIMENSIONS or (dims > FEW_DIMENSIONS and learnt >= 2 * comb(dims + 2, 2))

    def of_inputs(self, step: Step, fates: Mapping[frozenset[str], Sequence[str | None]]) -> bool:
        """Learn what became of the units' inputs in a planned step's forward; returns whether that was news."""
        if step.strange:
            return False
        return self._advisor.learn_inputs(step.size, self._session.actions, fates)

    def of_time(self, step: Step) -> None:
        """Learn how long planned steps took, of those that are over by now; this one's backward is."""
        if step.began is None or isinstance(step.recorder, StepRecorder):
            return
        strange = step.strange or step.mixed or step.retried
        usual = not (step.sheltered or strange or self._session.compared or self._session.met)
        if usual and step.in_backward:
            self._laps.end(step.began, (step.size, dict(step.actions)))
        step.began = None
        for (size, actions), seconds, host_seconds in self._laps.over():
            self._advisor.learn_pace(size, actions, seconds, host_seconds)

    def of_backward(self, step: Step) -> None:
        """Stop the meter after backward, learn, and see whether the promise was kept.

        Raises:
            BudgetInfeasibleError: The step ran under the most saving plan and exceeded the budget.
        """
        if not step.is_untrusted:
            if self._learnt_of:
                self._learnt_of -= Counter({step.size.layout: PLANNED_COUNTS})
            if self._learnt:
                self._learnt = 0
                self._advisor.hint("size", None)
        if step.recorder is None or not step.measuring:
            return
        if marks := isinstance(step.recorder, StepRecorder):
            if step.gradients is not None:
                step.gradients.look()
            step.recorder.mark("step", "end")
        trace, step.recorder = step.recorder.stop(), None
        self._session.recorder = None  # a closure that runs again (LBFGS) is no call to learn from
        if step.gradients is not None:
            step.gradients.close()
        if not trace.marks:
            self._count_unmeasured()
            return
        self._unmeasured = 0
        peak = self._take_peak(step, trace)
        step.left_bytes = held_in_update(step.resident, trace.left_bytes) if marks else 0
        if not step.sheltered or step.mixed:
            self._judge.compare(step, peak, whole=not self._evaluates)
            return
        learnt = step.learns and self._observe(step, trace)
        if peak > self._advisor.budget_bytes:
            how = "with every unit recomputed"
            # As it was learnt from, more is known now than when the shelter was cut.
            if learnt and self._advisor.has_leaner(step.size, self._update.later(step.resident)):
                how += (
                    ", as sizes of which nothing is known run (plans that also keep units lean hold this budget in "
                    'such batches from now on: on_infeasible="warn" goes on with them)'
                )
            self._refuser.refuse(step.size, step.resident, peak, with_reserve(peak), how)

    def of_update(self, step: Step) -> None:
        """Stop the meter after the update."""
        if step.recorder is None or not step.measuring:
            return
        step.evaluated_again |= self._update.evaluates
        again, on_cpu = step.evaluated_again or self._evaluates, isinstance(step.recorder, StepRecorder)
        if isinstance(step.recorder, StepRecorder):
            step.recorder.mark("step", "end")
        trace, step.recorder = step.recorder.stop(), None
        if on_cpu and not trace.marks:  # nothing could be measured
            return
        if again and on_cpu and self._update.grows:
            step.measured_peak_bytes = None  # what it has made counts as resident already
            return
        before_update = step.measured_peak_bytes or 0
        if again or not on_cpu:  # a forward that runs anew lets go of it, unseen; a device's counters have it
            step.left_bytes = 0
        self._take_peak(step, trace)
        if again and trace.marks and not self._update.grows:
            self._evaluates = True
            peak, planned = step.measured_peak_bytes or 0, not step.sheltered or step.mixed
            self._update.evaluated(before_update, peak, planned=planned)
            if planned:
                self._judge.compare(step, peak, whole=True)
        if (step.measured_peak_bytes or 0) > before_update > 0:
            transient = self._update.cost.transient_bytes
            optimizers = self._ledger.optimizers
            self._advisor.hint(
                "update", update_hint(optimizers, transient, step.measured_peak_bytes or 0, before_update)
            )
        if trace.marks and not (again or step.retried):
            self._update.reached(trace.peak_bytes, trace.intervals[-1].level_bytes)
        if self._ledger.lasting_bytes() == step.own_lasting_bytes and not step.evaluated_again:
            self._update.measured(max((interval.peak_bytes for interval in trace.intervals), default=0))

    def of_strangers(self, step: Step) -> None:
        """Learn that a planned step called units that its plan knew nothing of."""
        if step.strange:
            return
        predicted, measured = step.advice.predicted_peak_bytes, step.measured_peak_bytes
        missed = 0 if predicted is None or measured is None or self._session.compared else measured - predicted
        if self._advisor.learn_strangers(step.size, missed):
            self._advisor.announce(
                f"mimose: batch {step.batch_idx} called {named_shortly(self._session.met)}, of which its plan knew "
                "nothing; the next steps are measured, to learn what that takes"
            )

    def _count_unmeasured(self) -> None:
        self._unmeasured += 1
        if self._unmeasured == UNMEASURED_STEPS:
            warnings.warn(
                f"{UNMEASURED_STEPS} steps in a row could not be measured: their backward runs in another thread, "
                "or a profiler starts inside them. Until some can be, every step recomputes all it may. Run "
                "backward in the thread of the forward, or start the profiler before the step.",
                stacklevel=5,
            )

    def _take_peak(self, step: Step, trace: StepTrace) -> int:
        began_bytes = step.resident.lasting_bytes + step.left_bytes
        peak = began_bytes + trace.peak_bytes
        reached = max(peak, began_bytes + trace.aside_peak_bytes)
        step.measured_peak_bytes = max(reached - step.unfilled_bytes, step.measured_peak_bytes or 0)
        if trace.allocator is not None:
            step.reserved_peak_bytes = max(trace.allocator.reserved_bytes, step.reserved_peak_bytes or 0)
            if not step.retried:  # what is left of an attempt that failed is in the allocator, too
                self._advisor.learn_held(step.measured_peak_bytes, trace.allocator.held_bytes)
            fragmented = self._advisor.misses.fragmentation_bytes
            self._advisor.hint("allocator", allocator_hint(fragmented, self._advisor.budget_bytes))
        return peak

    def _observe(self, step: Step, trace: StepTrace) -> bool:
        """A sheltered step: learn what every unit costs; returns whether it was of a kind that is planned then."""
        if self._session.wants_gradient is not None:
            self._advisor.penalties.saw(self._session.wants_gradient, came=trace.passes_apart)
        if trace.passes_apart and not self._told_apart:
            self._told_apart = True
            warnings.warn(
                "A step ran backward twice over one graph (retain_graph or create_graph), or in the midst of its "
                "forward (torch.autograd.grad, or a backward of its own in the loss): what is kept lives to "
                "another end than predictions describe, so such steps recompute as much as they can, but "
                "where the budget has ample room for all of it.",
                stacklevel=5,
            )
        if step.begun_late or step.strange:
            return False  # some of it had been there before the meter ran; or it was not what it was taken for
        made_state = self._made_state(step)
        # A bound may have the optimizer's state twice, as that of a very first step.
        went_on = made_state and step.resident.old_gradient_bytes > 0
        if not (step.undecided or step.retried or went_on):
            dims, bounds = dict(step.size.dims), self._advisor.estimator.bounds
            bounds.add(dims, trace.kept_bytes, trace.peak_bytes, trace.spared)
        if trace.passes_apart:
            return False
        went_back = any(mark.name == "backward" for mark in trace.marks)
        # Though no unit may have: of a network that is frozen up to its head, or called without gradients.
        ran = went_back and bool(trace.calls or self._session.passed_by)
        if step.retried or made_state:  # recorded for its peak, not to learn from
            if made_state and ran:
                self._advisor.heed(step.size, observe(trace, step.batch_bytes, None, GRADES).structure)
            return False
        if ran:
            kept = None if step.resident.zeroes_gradients else step.resident.old_gradient_bytes
            observation = observe(trace, step.batch_bytes, kept, GRADES)
            bare, units = not step.resident.old_gradient_bytes, self._session.path()
            self._advisor.learn(step.size, observation, bare=bare, units=units)
            self._advisor.hint("attention", attention_hint(self._model, observation.structure, observation.values))
            if self._read_at != (place := self._advisor.tracker.place):
                self._read_at, self._learnt = place, 0
                self._learnt_of.clear()
            self._learnt += 1
            self._learnt_of[step.size.layout] += 1
            if self._learnt % SHELTERED_STEPS == 0:
                self._advisor.hint("size", size_hint(self._learnt, self._advisor.independent_dims(step.size)))
                if self._learnt == SHELTERED_STEPS:
                    warnings.warn(self._advisor.hints["size"], stacklevel=5)
            return True
        if went_back and not self._unreached:
            self._unreached = True
            warnings.warn(
                f"No unit of {type(self._model).__name__} was called in a step, so nothing can be recomputed. If the "
                "step runs inside torch.compile, compile each block instead (block.compile()); if it does not call "
                "the modules themselves, name those that it calls by units=.",
                stacklevel=5,
            )
        return False

    def _made_state(self, step: Step) -> bool:
        """Whether something has come in a step's midst that stays: the optimizer's state, larger buffers."""
        swung_bytes = self._ledger.swung_bytes()
        return self._ledger.lasting_bytes() - swung_bytes > step.own_lasting_bytes
