"""Misses: by how much steps were above what was predicted, and what plans keep free for it."""

from __future__ import annotations

MISSED_SHARE = 0.008
"""A planned step that misses its prediction by more says that the fit is not what it seemed."""
UNRELATED_SHARE = 0.25
"""By how much a planned step may be below its prediction for that to have held, more or less."""
SURPLUS_LEFT = 0.9
"""What is left of the bytes that a step was above its prediction, with each step that does without them."""
OUT_OF_MEMORY_SHARE = 0.05
"""Share of the budget that is kept free after the device ran out of memory under a plan that should have fitted."""


class Misses:
    """What measured steps showed that no prediction knows.

    Attributes:
        surplus_bytes: What is left of the bytes by which steps were above their predictions.
        fragmentation_bytes: What the allocator reserves beyond what is allocated.
        verified: Planned steps in a row whose prediction held, more or less.
        left_free_bytes: What all plans leave free at least that were made since plans were last forgotten.

    Example:
        >>> misses = Misses()
        >>> misses.compare(1000, 1020)
        >>> misses.surplus_bytes, misses.verified
        (20, 0)
        >>> misses.compare(1000, 990)
        >>> misses.surplus_bytes, misses.verified, misses.kept_free_bytes
        (18, 1, 18)
    """

    def __init__(self) -> None:
        self.surplus_bytes = 0
        self.fragmentation_bytes = 0
        self.verified = 0
        self.left_free_bytes = 0
        self._largest_allocated_bytes = 0

    @property
    def kept_free_bytes(self) -> int:
        """What plans leave free because of it."""
        return self.surplus_bytes + self.fragmentation_bytes

    def plans_forgotten(self) -> None:
        """All plans are made anew from now on."""
        self.left_free_bytes = self.kept_free_bytes

    def fade(self) -> None:
        """A step did without what was missing before."""
        self.surplus_bytes = int(self.surplus_bytes * SURPLUS_LEFT)
        self.left_free_bytes = min(self.left_free_bytes, self.kept_free_bytes)

    def compare(self, predicted_bytes: int, measured_bytes: int) -> None:
        """Hold a planned step's peak against its prediction."""
        missed = measured_bytes - predicted_bytes
        if missed > 0:
            self.surplus_bytes = max(missed, self.surplus_bytes)
        else:
            self.fade()
        # One that was too low, or had little to do with its step, is no reason to look away from those that follow.
        if missed > MISSED_SHARE * predicted_bytes:
            self.verified = 0
        elif -missed < UNRELATED_SHARE * predicted_bytes:
            self.verified += 1

    def out_of_memory(self, budget_bytes: int) -> None:
        """The device had less than was planned with: keep a share of the budget free for a while."""
        self.surplus_bytes = max(self.surplus_bytes, int(OUT_OF_MEMORY_SHARE * budget_bytes))

    def reserved(self, allocated_peak_bytes: int, reserved_peak_bytes: int) -> bool:
        """Take in what the allocator reserved beyond what was allocated; returns whether that is more than was known.

        What it reserved for an earlier, larger step is no fragmentation, so the largest step counts.
        """
        self._largest_allocated_bytes = max(self._largest_allocated_bytes, allocated_peak_bytes)
        before = self.fragmentation_bytes
        self.fragmentation_bytes = max(0, reserved_peak_bytes - self._largest_allocated_bytes)
        self.left_free_bytes = min(self.left_free_bytes, self.kept_free_bytes)
        return self.fragmentation_bytes > 1.05 * before
