"""The step that is running: what was decided about it, and what is being measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_mimose.advise.advice import Advice
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.gradients import GradientLedger
from lightning_mimose.measure.peak import PeakRecorder
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.report.record import StepRecord
from lightning_mimose.sizes import BatchSize


@dataclass(slots=True)
class Step:
    """The step that is running.

    Attributes:
        size: The batch's size.
        batch_idx: Index in the epoch.
        epoch: Index of the epoch.
        advice: What the advisor said.
        resident: What is resident.
        batch_bytes: The batch's part of it.
        others_bytes: The part of what is on the device besides.
        actions: The plan in force.
        planning_seconds: What planning took.
        accumulates: Whether backward adds to gradients that are there.
        known: Looks up the tensors that are no activations.
        recorder: Measures the step, in those that are measured.
        gradients: Follows its gradients, likewise.
        measured_peak_bytes: What was measured so far.
        left_bytes: What its backward left behind besides gradients, for the meter of the update, which does not see it.
        reserved_peak_bytes: What the allocator reserved at most.
        began_bytes: What tensors had asked an accelerator for when the meter began to run, without gradients.
        began: The point of the device's time at which it begins, if it is timed.
        is_measured: Whether it is measured.
        measuring: Whether the meter runs.
        inputs_taught: Whether its forward has shown that inputs of units live longer than was predicted.
        updating: Whether the update has begun.
        retried: Whether it runs again after a failure.
        in_backward: Whether backward has begun.
        unfilled_bytes: Part of what counts as resident that is only reserved.
        evaluated_again: Whether the loss was evaluated again inside the update.
        undecided: Whether its size shows only when the model is called: nothing is planned before.
        learns: Whether what its units do is recorded, to learn from.
        by_the_way: Whether it is planned, and measured only because it might have been sheltered.
        begun_late: Whether its meter began to run when its first unit was called.
        mixed: Whether its size turned out to be larger when some units had run: only the others were sheltered.
        spare_bytes: Part of what counts as resident for as long as it is planned: others on the device may take it.
        kind: Of which kind it was taken to be, see `predict.kinds`.
        strange: Whether it turned out to be of another.
        foretold: Whether the first unit's input told that it may run backward in its midst, see `predict.penalties`.
    """

    size: BatchSize
    batch_idx: int
    epoch: int
    advice: Advice
    resident: Resident
    batch_bytes: int
    others_bytes: int
    actions: dict[str, str]
    planning_seconds: float
    accumulates: bool
    known: Callable[[], Sequence[torch.Tensor]]
    recorder: StepRecorder | PeakRecorder | None = None
    gradients: GradientLedger | None = None
    measured_peak_bytes: int | None = None
    left_bytes: int = 0
    reserved_peak_bytes: int | None = None
    began_bytes: int = 0
    began: Any = None
    is_measured: bool = False
    measuring: bool = False
    inputs_taught: bool = False
    updating: bool = False
    retried: bool = False
    in_backward: bool = False
    unfilled_bytes: int = 0
    evaluated_again: bool = False
    undecided: bool = False
    learns: bool = False
    by_the_way: bool = False
    begun_late: bool = False
    mixed: bool = False
    spare_bytes: int = 0
    kind: int = 0
    strange: bool = False
    foretold: bool = False

    @property
    def sheltered(self) -> bool:
        """Whether it runs under the most saving plan because nothing trustworthy is known yet."""
        return self.advice.plan is None

    @property
    def is_untrusted(self) -> bool:
        """Whether nothing trustworthy is known yet: it is sheltered, but for units that may be kept for sure."""
        return self.sheltered or (self.advice.bounded and bool(self.actions))

    @property
    def own_lasting_bytes(self) -> int:
        """What lasts at its start of the training itself, as `ResidentLedger.lasting_bytes` has it."""
        return self.resident.lasting_bytes - self.batch_bytes - self.others_bytes

    def record(self, number: int, size: dict[str, int], budget_bytes: int, actions: dict[str, str]) -> StepRecord:
        """The step's record.

        Args:
            number: Of the step.
            size: The batch's size, by name.
            budget_bytes: The budget in force.
            actions: What the units did.
        """
        return StepRecord(
            step=number,
            batch_idx=self.batch_idx,
            epoch=self.epoch,
            size=size,
            sheltered=self.sheltered,
            cache_hit=self.advice.cache_hit,
            retried=self.retried,
            budget_bytes=budget_bytes,
            resident_bytes=self.resident.total_bytes - self.unfilled_bytes,
            predicted_peak_bytes=self.advice.predicted_peak_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            actions=actions,
            planning_seconds=self.planning_seconds,
        )
