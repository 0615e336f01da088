"""Meters: the live bytes of one step as a curve, cut by marks.

A meter is started, marked at points of interest, and stopped; it returns one `Interval` per mark. On an
accelerator the allocator's counters are read on the host, so measuring costs no synchronisation. On CPU torch
has no such counter: the profiler's memory events are exact and cost about a tenth of the step, more where
kernels have little to do. While a profiler of the user's own is running, which a nested one would silently
empty, a dispatch mode counts instead; nothing does where that would change what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.interval import Allocator, Interval
from lightning_mimose.measure.meters.accelerator import AcceleratorMeter
from lightning_mimose.measure.meters.dispatch import BlindMeter, DispatchMeter
from lightning_mimose.measure.meters.profiler import ProfilerMeter, is_free


class Meter(Protocol):
    """What a meter can do; `start` opens the first interval, every `mark` another, `stop` returns them all.

    Attributes:
        sees_old_frees: Whether freeing memory that is older than the start lowers the curve.
        allocator: What the device's allocator had at most, None where none counts.
        older: For each storage that was asked about, whether the curve counts nothing of it, for it is older than the
            start; complete once it has stopped.
    """

    sees_old_frees: bool
    allocator: Allocator | None
    older: list[bool]

    def start(self) -> None:
        """Begin, and open the first interval."""

    def mark(self) -> None:
        """Close the current interval and open the next."""

    def hold(self, owner: object, nbytes: int) -> None:
        """Told of bytes that no operator returns and that live as long as their owner: a generator's state."""

    def ask(self, storage: torch.UntypedStorage) -> None:
        """Asked whether a storage is older than the start."""

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Told, at the start, what is older and lowers the curve all the same when it goes."""

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Told, at the start, what is resident and may be replaced: when it goes, the curve is lowered from there on.

        Nothing is kept alive by that, and after the stop nothing is told any more.
        """

    def expect_free(self) -> None:
        """Told at a mark that memory goes right after it."""

    def stop(self) -> list[Interval]:
        """End, and return every interval in order."""


def make_meter(device: torch.device, *, profile: bool = True, compiles: Callable[[], bool] = bool) -> Meter:
    """The best meter for a device at this moment.

    Args:
        device: What is measured.
        profile: False where somebody else's profiler may start at any time; torch allows one.
        compiles: Tells whether compiled code runs, which torch would not run as such under a mode.
    """
    if counters.exist(device):
        return AcceleratorMeter(device)
    if profile and is_free():
        return ProfilerMeter()
    return BlindMeter() if compiles() else DispatchMeter()


def has_memory_counters(device: torch.device) -> bool:
    """Whether peaks can be measured on this device at all."""
    return not counters.exist(device) or counters.can_be_read(device)
