"""No meter: where each there is would change what it measures."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_mimose.measure.interval import Allocator, Interval


class BlindMeter:
    """Sees nothing, so that whoever stops it has measured nothing.

    While a profiler of the user's own is running, memory can be counted on a CPU by a dispatch mode only, and under one
    torch.compile runs what it would have compiled operator by operator, with other last bits.
    """

    def __init__(self) -> None:
        self.sees_old_frees = False
        self.allocator: Allocator | None = None
        self.older: list[bool] = []

    def start(self) -> None:
        """Nothing begins."""

    def mark(self) -> None:
        """Nothing ends."""

    def hold(self, owner: object, nbytes: int) -> None:
        """It counts for nothing."""

    def ask(self, storage: torch.UntypedStorage) -> None:
        """There is no answer."""

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """They are followed by nobody."""

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """They are followed by nobody."""

    def expect_free(self) -> None:
        """Nobody will see it."""

    def stop(self) -> list[Interval]:
        """No interval, however many were opened."""
        return []
