"""The pace of an accelerator: seconds per operation, from whole steps that ran as planned.

Where a step is measured unit by unit, Python counts every operation beside it, and the accelerator waits for that: a
layer of BERT takes a tenth of the time when nobody looks (NVIDIA H100). A step that only runs its plan has nobody
beside it. Its time is also right where the host is what an accelerator waits for anyway: then that is what running a
part of it again costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import RECOMPUTE, RECOMPUTE_LEAN
from lightning_mimose.predict.structure import Structure

STEP = 3
"""Operations of forward and backward, in those of the forward."""
FEWEST_LAPS, KNOWN_LAPS = 5, 32
"""Steps that are timed before they are believed, and how many are remembered."""
LARGE_SHARE = 0.5
"""Share of the largest step's operations from which on steps count: plans are made for those."""
CHANGED = 1.3
"""By how much the pace has to differ from what plans were made with for them to be made anew."""


class Pace:
    """Learns it.

    Attributes:
        seconds_per_operation: What plans are made with; None as long as too few steps were timed.

    Example:
        >>> pace = Pace()
        >>> [pace.add(1e12, 0.1) for _ in range(6)]
        [False, False, False, False, True, False]
        >>> pace.seconds_per_operation
        1e-13
    """

    def __init__(self) -> None:
        self.seconds_per_operation: float | None = None
        self._laps: deque[tuple[float, float]] = deque(maxlen=KNOWN_LAPS)

    def add(self, operations: float, seconds: float) -> bool:
        """Take in the time of a step.

        Args:
            operations: What it did, see `operations_of`.
            seconds: What that took.

        Returns:
            Whether plans that were made before were made with quite another pace.
        """
        if operations <= 0 or seconds <= 0:
            return False
        self._laps.append((operations, seconds))
        if len(self._laps) < FEWEST_LAPS:
            return False
        large = LARGE_SHARE * max(operations for operations, _ in self._laps)
        now = median(seconds / operations for operations, seconds in self._laps if operations >= large)
        known = self.seconds_per_operation
        if known is not None and known / CHANGED <= now <= known * CHANGED:
            return False
        self.seconds_per_operation = now
        return True


def operations_of(structure: Structure, values: NDArray[np.float64], actions: Mapping[str, str]) -> float:
    """Operations of a step that runs a plan: forward and backward, and what is made again.

    Args:
        structure: What the columns are.
        values: Shape (structure.columns,).
        actions: Unit -> what it does.
    """
    again = {RECOMPUTE, RECOMPUTE_LEAN}
    total = 0.0
    for call in structure.calls:
        operations = float(values[call.flops] + values[call.besides])
        total += operations * (STEP * call.region + (actions.get(call.unit) in again))
    for shape in structure.lean:
        if actions.get(structure.calls[shape.call].unit) == shape.action:
            total += float(values[shape.work])
    return total
