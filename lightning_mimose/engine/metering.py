"""Which steps are measured, and when their meter runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from lightning_mimose.actions.session import Session
from lightning_mimose.engine.lessons import Lessons
from lightning_mimose.engine.passes import Passes
from lightning_mimose.engine.step import Step
from lightning_mimose.measure import counters
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.gradients import GradientLedger
from lightning_mimose.measure.inputs import InputWatch
from lightning_mimose.measure.peak import PeakRecorder
from lightning_mimose.measure.resident import ResidentLedger

VERIFIED_STEPS = 3
"""Planned steps that are measured where measuring costs time, besides every `MEASURE_EVERY`th."""
MEASURE_EVERY = 50
MEASURE_BOUNDED_EVERY = 10
"""The same for steps of which only a bound is known."""
LEARNING_STEPS = 8
"""Steps without a size that are recorded as if they were to be sheltered, since the last one that was."""
WATCHED_STEPS = 20
"""Planned steps in whose forward the units' inputs are followed, besides those that are measured."""


class Metering:
    """Measures the steps that learn, and as many others as costs nothing or little.

    Args:
        device: Where the steps run; to measure the peak of one on an accelerator is free, or nearly.
        session: Records the units' calls.
        ledger: Knows the parameters.
        lessons: Knows how many planned steps were held against their predictions.
        profile: Whether torch's profiler is free to be used.
        compiles: Tells whether compiled code runs, see `measure.meter.make_meter`.

    Attributes:
        planned: Planned steps so far.
    """

    def __init__(
        self,
        device: torch.device,
        session: Session,
        ledger: ResidentLedger,
        lessons: Lessons,
        *,
        profile: bool,
        compiles: Callable[[], bool],
    ) -> None:
        self._device, self._session, self._ledger, self._lessons = device, session, ledger, lessons
        self._profile, self._compiles = profile, compiles
        self._is_free = counters.exist(device)
        self.planned = self._bounded = 0
        self._due = LEARNING_STEPS
        self._passes = Passes()
        self._fates: Mapping[frozenset[str], Sequence[str | None]] | None = None
        """What became of the units' inputs in this step's forward."""

    def arm(self, step: Step) -> None:
        """See whether a step is to be measured."""
        self._bounded += step.advice.bounded
        step.learns = step.sheltered and (self._due > 0 or not step.undecided) and not self._lessons.rest(step)
        if step.undecided:
            step.is_measured = step.learns or self._is_free or self._measures_undecided()
        else:
            step.is_measured = step.learns or self._is_free or (not step.sheltered and self._measures_planned(step))

    def ran(self, step: Step) -> None:
        """Count a step that is over."""
        self.planned += not step.sheltered
        self._lessons.ran(step)

    def decided(self, step: Step) -> None:
        """A step that has begun without a size has one: what is decided about it is known."""
        self._due = LEARNING_STEPS if step.is_untrusted else max(0, self._due - 1)
        if step.sheltered:
            return
        self._bounded += step.advice.bounded
        due = self._is_free or self._measures_planned(step)
        step.by_the_way = step.learns and not due
        if due and not step.is_measured:  # too late for this one
            self._due += 1
        step.learns = False
        self._follow_inputs(step)

    def begin_late(self, step: Step) -> None:
        """Start the meter of a step that turns out to be of a kind that is hardly known, as its first unit is called.

        By a mode of our own, for a profiler may run by now; not where another mode does, which would end before it.
        """
        if step.updating or step.learns or self._lessons.rest(step):
            return
        if step.measuring and isinstance(step.recorder, StepRecorder):
            step.learns = step.begun_late = True
            self._session.record(step.recorder)
        elif not torch._C._len_torch_dispatch_stack():
            self.stop(step)
            step.is_measured = step.learns = step.begun_late = True
            self._give_recorder(step, profile=False)
            self._start(step)

    def _give_recorder(self, step: Step, *, profile: bool) -> None:
        if self._is_free and not step.learns:
            step.recorder = PeakRecorder(self._device, partial(self._without_gradients, step))
            return
        step.gradients = GradientLedger(
            self._ledger.parameters(), follow=step.learns, anytime=not step.resident.zeroes_gradients
        )
        if step.retried and step.accumulates:  # what the failed attempt had added to was put aside
            step.gradients.aside_bytes = max(0, step.resident.old_gradient_bytes - step.gradients()[0])
        known = step.known() if step.learns else ()
        # DDP's buckets stay when gradients that lie in them are set to None (`gradient_as_bucket_view`).
        stay = self._ledger.bucket_bytes > 0 and step.gradients.are_windows
        step.recorder = StepRecorder(
            self._device,
            known,
            step.gradients,
            profile=profile,
            compiles=self._compiles,
            gradients_stay=stay,
            renewed=self._ledger.model_tensors,
        )

    def _measures_planned(self, step: Step) -> bool:
        if not step.resident.zeroes_gradients and not step.accumulates:
            # A loop that frees old gradients when it likes: no meter on CPU sees that, and no unit marks the time.
            return False
        if step.advice.bounded:
            return self._measures_bounded()
        if step.advice.predicted_peak_bytes is None or step.advice.to_be_proven:
            return True  # a plan for a size that is not trusted yet, or not for all that it does
        return self._measures_now()

    def _measures_undecided(self) -> bool:
        # As long as nothing but bounds is known, no prediction will ever be held against a step.
        return self._measures_bounded() if self._bounded > VERIFIED_STEPS else self._measures_now()

    def _measures_bounded(self) -> bool:
        return self._bounded % MEASURE_BOUNDED_EVERY == 0 or self._bounded <= VERIFIED_STEPS

    def _measures_now(self) -> bool:
        return self.planned % MEASURE_EVERY == 0 or self._lessons.verified < VERIFIED_STEPS

    def begin_forward(self, step: Step) -> None:
        """Start the step's meter, if it has one.

        Not in `arm`: torch's optimizers run their closure inside a `record_function`, and a profiler that is started
        outside it and stopped inside leaves it with a pointer to memory that is gone.
        """
        if step.is_measured and not step.measuring:
            self._give_recorder(step, profile=self._profile)
            self._start(step)
        if (step.undecided or not step.sheltered) and not (step.updating or isinstance(step.recorder, StepRecorder)):
            # To follow inputs takes time on a CPU: such steps tell the pace only as long as no others have.
            by_the_way = not self._is_free and self.planned < WATCHED_STEPS
            step.began = self._lessons.begin_lap(
                anyway=by_the_way or self.planned % MEASURE_EVERY == 1, counts=not by_the_way
            )
        if not step.sheltered:
            self._follow_inputs(step)
        self._session.own_nodes = 0  # those of calls before the step's forward do not count either
        self._session.ran.clear()
        self._passes.begin()
        self._fates = None

    def _start(self, step: Step) -> None:
        assert step.recorder is not None
        step.measuring = True
        self._start_recorder(step.recorder)
        if isinstance(step.recorder, PeakRecorder):
            step.began_bytes = step.recorder.lasting_bytes
        elif self._is_free:
            step.began_bytes = self._without_gradients(step, counters.read(self._device).requested_bytes)
        if step.learns and isinstance(step.recorder, StepRecorder):
            self._session.record(step.recorder)

    def _start_recorder(self, recorder: StepRecorder | PeakRecorder) -> None:
        recorder.start()
        if isinstance(recorder, StepRecorder) and not self._is_free:  # an accelerator's counters see all that goes
            recorder.follow(self._ledger.lasting_tensors())

    def _follow_inputs(self, step: Step) -> None:
        if self.planned < WATCHED_STEPS or self._watches(step):
            self._session.follow_inputs(InputWatch(step.known(), self._ledger.model_tensors))

    def _without_gradients(self, step: Step, there_bytes: int) -> int:
        """What of the bytes that are there at a step's start is no gradient."""
        if not step.retried or step.accumulates:
            return there_bytes - step.resident.old_gradient_bytes
        # Those of the step before may be gone, as the attempt that failed had let go of them.
        return there_bytes - sum(size for each, size in self._ledger.parameters() if each.grad is not None)

    def _watches(self, step: Step) -> bool:
        return self.planned % MEASURE_EVERY == 0 if self._is_free else step.measuring

    def begin_backward(self, step: Step, loss: torch.Tensor | None) -> None:
        """The forward is done and gradients are zeroed."""
        if not step.updating:
            self._passes.begin_backward(loss, self._session.own_nodes)
        if self._session.watch is not None:
            self._fates, self._session.watch = self._session.watch.fates(), None
        if isinstance(step.recorder, PeakRecorder) and step.measuring:
            step.recorder.look()
        if step.gradients is not None and isinstance(step.recorder, StepRecorder) and step.measuring:
            step.gradients.begin_backward()
            step.recorder.begin_backward(loss if step.learns and not step.updating else None)

    def end_backward(self, step: Step) -> None:
        """A backward pass is done; a sheltered step learns who still holds what."""
        self._session.own_nodes = 0
        self._passes.end_backward()
        if step.learns and isinstance(step.recorder, StepRecorder) and not step.updating:
            step.recorder.end_backward()

    def end_passes(self, step: Step) -> None:
        """All backward passes of a step are done, as far as they do not belong to its update."""
        what = self._passes.end(self._session.own_nodes)
        # Parts of a batch have operations of their own. What tells of a penalty tells its steps from the rest already.
        if not (what is None or self._session.splits or step.foretold):
            self._lessons.of_kind(step, what)
        self._tell_fates(step)

    def failed(self, step: Step) -> None:
        """A step failed and will run again: what its forward has shown holds all the same."""
        self._tell_fates(step)
        self.stop(step)

    def _tell_fates(self, step: Step) -> None:
        fates, self._fates = self._fates, None
        if fates is not None:
            step.inputs_taught = self._lessons.of_inputs(step, fates)

    def begin_update(self, step: Step) -> None:
        """Measure the update of a step whose forward and backward were measured."""
        if self._is_free:
            began_bytes = step.began_bytes
            step.recorder = PeakRecorder(self._device, lambda _: began_bytes)
        else:
            step.gradients = GradientLedger(self._ledger.parameters(), follow=False)
            step.recorder = StepRecorder(
                self._device, (), step.gradients, profile=self._profile, compiles=self._compiles
            )
        self._start_recorder(step.recorder)
        if isinstance(step.recorder, StepRecorder):
            # The step's own gradients, which an update that evaluates the loss again (SAM's) may let go of first.
            step.recorder.adopt(each.grad for each, _ in self._ledger.parameters() if each.grad is not None)

    def stop(self, step: Step) -> None:
        """Stop a meter of which nothing is learnt, and take it from the step."""
        try:
            if step.recorder is not None and step.measuring:
                step.recorder.stop()
        finally:
            self._close(step)

    def close(self, step: Step) -> None:
        """The step is over: leave no hooks behind."""
        self._passes.drop()
        self._close(step)

    def _close(self, step: Step) -> None:
        if step.gradients is not None:
            step.gradients.close()
        step.recorder, step.gradients, step.measuring = None, None, False
