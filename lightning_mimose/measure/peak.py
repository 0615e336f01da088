"""The peak of a step on an accelerator, and nothing else: for steps that only have to be held against a prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.interval import Allocator, Interval
from lightning_mimose.measure.trace import Mark, StepTrace


class PeakRecorder:
    """Takes the place of a `StepRecorder`, at the price of three looks at the allocator's counters.

    Args:
        device: The accelerator.
        lasting: Tells what of the bytes that are there at the start is not the step's own, nor gradients.

    Attributes:
        lasting_bytes: What it told.
    """

    sees_old_frees = True

    def __init__(self, device: torch.device, lasting: Callable[[int], int]) -> None:
        self._device, self._lasting = device, lasting
        self._start_bytes = self._held_bytes = self.lasting_bytes = 0

    def start(self) -> None:
        """From here on."""
        counters.reset_peaks(self._device)
        self._start_bytes = counters.read(self._device).requested_bytes
        self.lasting_bytes = self._lasting(self._start_bytes)

    def look(self) -> None:
        """See what the allocator holds now: between forward and backward most of what it will."""
        self._held_bytes = max(self._held_bytes, counters.read(self._device).held_bytes)

    def stop(self) -> StepTrace:
        """The step as a single interval, and what is left of it as another."""
        now = counters.read(self._device)
        held = max(self._held_bytes, now.held_bytes)
        opened = Mark("step", "start", self._start_bytes - self.lasting_bytes, 0)
        ended = Mark("step", "end", self._start_bytes - self.lasting_bytes, 0)
        interval = Interval(0, now.requested_peak_bytes - self._start_bytes)
        left = now.requested_bytes - self._start_bytes
        marks, intervals = (opened, ended), (interval, Interval(left, left))
        return StepTrace((), marks, intervals, allocator=Allocator(held, now.reserved_peak_bytes))
