"""The meter of an accelerator: its allocator's own counters."""

from __future__ import annotations

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.interval import Allocator, Interval


class AcceleratorMeter:
    """Reads the caching allocator's own counters: what tensors ask for. Resets its peaks at every mark.

    Limitations:
        What is older than the step and goes in its midst (but for gradients) lowers the curve from there on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0
        self._level_bytes = 0
        self._intervals: list[Interval] = []
        self.sees_old_frees = True
        self.allocator: Allocator | None = None

    def start(self) -> None:
        """Reset the allocator's peaks and remember what there is."""
        counters.reset_peaks(self._device)
        self._start_bytes = self._level_bytes = counters.read(self._device).requested_bytes

    def mark(self) -> None:
        """Close the interval with the allocator's peak since the last mark."""
        now = counters.read(self._device)
        peak = now.requested_peak_bytes
        self._intervals.append(Interval(self._level_bytes - self._start_bytes, peak - self._start_bytes))
        held, reserved = self.allocator or (0, 0)
        self.allocator = Allocator(max(held, now.held_bytes), max(reserved, now.reserved_peak_bytes))
        counters.reset_peaks(self._device)
        self._level_bytes = now.requested_bytes

    def hold(self, owner: object, nbytes: int) -> None:
        """The host's memory is not the accelerator's."""

    def stop(self) -> list[Interval]:
        """Close the last interval."""
        self.mark()
        return self._intervals
