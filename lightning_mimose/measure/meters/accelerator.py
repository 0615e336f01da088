"""The meter of an accelerator: its allocator's own counters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.interval import Allocator, Interval

LOOKS = 50
"""How many calls of functions are waited for until memory has gone that was about to."""


class AcceleratorMeter:
    """Reads the caching allocator's own counters: what tensors ask for. Resets its peaks at every mark.

    Limitations:
        What is older than the step and goes in its midst (but for gradients) lowers the curve from there on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0
        self._level_bytes = 0
        self._peak_before_bytes: int | None = None
        self._intervals: list[Interval] = []
        self._looks = self._thread = 0
        self.sees_old_frees = True
        self.allocator: Allocator | None = None
        self.older: list[bool] = []

    def start(self) -> None:
        """Reset the allocator's peaks and remember what there is."""
        self._thread = threading.get_ident()
        counters.reset_peaks(self._device)
        self._start_bytes = self._level_bytes = counters.read(self._device).requested_bytes

    def mark(self) -> None:
        """Close the interval with the allocator's peak since the last mark."""
        self._look_no_more()
        now, start = counters.read(self._device), self._start_bytes
        peak, rest = now.requested_peak_bytes, None
        if self._peak_before_bytes is not None:
            peak, rest, self._peak_before_bytes = max(peak, self._peak_before_bytes), peak - start, None
        self._intervals.append(Interval(self._level_bytes - start, peak - start, rest))
        held, reserved = self.allocator or (0, 0)
        self.allocator = Allocator(max(held, now.held_bytes), max(reserved, now.reserved_peak_bytes))
        counters.reset_peaks(self._device)
        self._level_bytes = now.requested_bytes

    def hold(self, owner: object, nbytes: int) -> None:
        """The host's memory is not the accelerator's."""

    def ask(self, storage: torch.UntypedStorage) -> None:
        """It counts, whenever it was made."""
        self.older.append(False)

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """All memory is seen to go."""

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """All memory is seen to go."""

    def expect_free(self) -> None:
        """Look again when the memory has gone: until then a peak is no less than what there is now.

        It goes when whoever tells of it has returned. The next function that is called after that is the first chance
        to look, and Python tells a profiler of its calls; one of the user's own is left alone.
        """
        if sys.getprofile() is None and threading.get_ident() == self._thread:
            self._looks = LOOKS
            sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        if self._looks:  # else there was a mark in another thread
            self._looks -= 1
            now = counters.read(self._device)
            if now.requested_bytes < self._level_bytes:
                self._peak_before_bytes = now.requested_peak_bytes
                counters.reset_peaks(self._device)
                self._looks = 0
        if not self._looks:
            sys.setprofile(None)

    def _look_no_more(self) -> None:
        if self._looks:
            self._looks = 0
            if sys.getprofile() == self._look:
                sys.setprofile(None)

    def stop(self) -> list[Interval]:
        """Close the last interval."""
        self.mark()
        return self._intervals
