"""Misses: by how much steps were above what was predicted, and what plans keep free for it."""

from __future__ import annotations

from collections import deque

MISSED_SHARE = 0.008
"""A planned step that misses its prediction by more says that the fit is not what it seemed."""
SCRATCH_BYTES, SCRATCH_SHARE = 16 << 20, 0.03
"""What kernels of an accelerator take for a moment and no fit knows, and the share of a budget that it is at most.

The sum over a bias's rows took 12 MiB for 6144 rows on an NVIDIA H100, and 5 MiB for 6336. What a step is above its
prediction is kept free; up to here it is no reason to measure all sizes anew.
"""
UNRELATED_SHARE = 0.25
"""By how much a planned step may be below its prediction for that to have held, more or less."""
SURPLUS_LEFT = 0.9
"""What is left of the bytes that a step was above its prediction, with each step that does without them."""
HELD = 3
"""Planned steps in a row whose predictions have to hold before what is missing then counts as come back."""
RELAPSE, MOST_RELAPSES = 4, 2
"""How many times as long it is remembered then, and again the next time: it may be the nature of the model."""
RECENT = 20
"""Planned steps whose small misses are remembered: what fades stays as large as they are."""
FRAGMENTATION_LEFT = 0.999
"""The same of what the allocator held beyond what it was asked for."""
FRAGMENTATION_SHARE = 0.01
"""Share of the budget by which that has to fall for plans to be made anew."""
MUCH_LARGER = 1.5
"""A step that is so many times as large as all before shows anew how much of it there is."""
MOST_GROWTH, MOST_FRAGMENTED, MOST_PROVEN = 1.5, 0.15, 0.3
"""How much more of it than was seen, and what share of the budget, is reckoned with at most; and what share where the
allocator has failed for it, after it had given back what lay in no tensor's way."""
OUT_OF_MEMORY_SHARE = 0.05
"""Share of the budget that is kept free after the device ran out of memory under a plan that should have fitted."""


def scratch_bytes(budget_bytes: int) -> int:
    """By how much a step on an accelerator may miss its prediction for nothing but its kernels' scratch memory.

    Args:
        budget_bytes: The budget.

    Example:
        >>> scratch_bytes(8 * 10**9), scratch_bytes(10**8)
        (16777216, 3000000)
    """
    return min(SCRATCH_BYTES, int(SCRATCH_SHARE * budget_bytes))


class Misses:
    """What measured steps showed that no prediction knows.

    Attributes:
        surplus_bytes: What is left of the bytes by which steps were above their predictions.
        fragmentation_bytes: What the allocator may hold beyond what tensors ask it for, and not give back, in a step
            that fills the budget.
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
        self._small_bytes: deque[int] = deque(maxlen=RECENT)
        self.verified = 0
        self.left_free_bytes = 0
        self._largest_measured_bytes = self._seen_bytes = 0
        self._most_share = MOST_FRAGMENTED
        self._missed = False
        self._relapses = 0

    @property
    def kept_free_bytes(self) -> int:
        """What plans leave free because of it."""
        return self.surplus_bytes + self.fragmentation_bytes

    def trained_anew(self) -> None:
        """Other parameters are trained: predictions have yet to hold, or to fail."""
        self.verified, self._missed, self._relapses = 0, False, 0
        self._small_bytes.clear()

    def plans_forgotten(self) -> None:
        """All plans are made anew from now on."""
        self.left_free_bytes = self.kept_free_bytes

    def fade(self, least_bytes: int = 0) -> None:
        """A step did without what was missing before, or without all but a few bytes."""
        left_bytes = int(self.surplus_bytes * (1 - (1 - SURPLUS_LEFT) / RELAPSE**self._relapses))
        self.surplus_bytes = max(left_bytes, least_bytes)
        self.left_free_bytes = min(self.left_free_bytes, self.kept_free_bytes)

    def compare(self, predicted_bytes: int, measured_bytes: int) -> None:
        """Hold a planned step's peak against its prediction."""
        missed = measured_bytes - predicted_bytes
        if missed > MISSED_SHARE * predicted_bytes:
            self.surplus_bytes = max(missed, self.surplus_bytes)
            self._relapses = min(self._relapses + (self._missed and self.verified >= HELD), MOST_RELAPSES)
            self._missed = True
            self.verified = 0  # a prediction that was too low is no reason to look away from those that follow
            return
        self._small_bytes.append(max(0, missed))
        self.fade(max(self._small_bytes) if missed > 0 else 0)
        if -missed < UNRELATED_SHARE * predicted_bytes:  # else it had little to do with its step
            self.verified += 1

    def out_of_memory(self, budget_bytes: int) -> None:
        """The device had less than was planned with: keep a share of the budget free for a while."""
        self.surplus_bytes = max(self.surplus_bytes, int(OUT_OF_MEMORY_SHARE * budget_bytes))

    def held(self, measured_peak_bytes: int, held_bytes: int, budget_bytes: int) -> bool:
        """Take in what the allocator held beyond what it was asked for; returns whether plans are to be made anew.

        What it holds for an earlier, larger step is no fragmentation, so the largest step counts. Steps differ in it:
        what was seen once is believed for long. One that fills the budget has more of it than the first ones; on the
        other hand it fills gaps that those have left, and that others have (an evaluation).
        """
        self._most_share = max(MOST_FRAGMENTED, self._most_share * FRAGMENTATION_LEFT)
        now = max(0, held_bytes - max(self._largest_measured_bytes, measured_peak_bytes))
        if measured_peak_bytes <= MUCH_LARGER * self._largest_measured_bytes:
            now = max(now, int(self._seen_bytes * FRAGMENTATION_LEFT))
        self._largest_measured_bytes = max(self._largest_measured_bytes, measured_peak_bytes)
        return self._fragmented(now, budget_bytes)

    def ran_out(self, requested_peak_bytes: int, reserved_bytes: int, budget_bytes: int) -> None:
        """The allocator failed: what it had reserved by then and was not asked for, it could not use."""
        self._largest_measured_bytes = max(self._largest_measured_bytes, requested_peak_bytes)
        proven_bytes = reserved_bytes - requested_peak_bytes
        self._most_share = max(self._most_share, min(MOST_PROVEN, proven_bytes / budget_bytes))
        self._fragmented(max(self._seen_bytes, proven_bytes), budget_bytes)

    def _fragmented(self, seen_bytes: int, budget_bytes: int) -> bool:
        before, self._seen_bytes = self.fragmentation_bytes, seen_bytes
        grows = min(MOST_GROWTH, max(1.0, budget_bytes / max(1, self._largest_measured_bytes)))
        self.fragmentation_bytes = int(min(grows * seen_bytes, self._most_share * budget_bytes))
        self.left_free_bytes = min(self.left_free_bytes, self.kept_free_bytes)
        little = FRAGMENTATION_SHARE * budget_bytes
        return not before - little <= self.fragmentation_bytes <= 1.05 * before
