"""The pace of a device: seconds per operation, from whole steps that ran as planned.

Where a step is measured unit by unit, Python looks at what is saved beside it, and counts operations: a layer of BERT
takes a tenth of the time when nobody looks (NVIDIA H100), linear attention in a loop a third (two CPU cores). A step
that only runs its plan has nobody beside it. On an accelerator, steps that waited for the host tell what that takes;
what operations take, as long as there are no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import OFFLOAD, RECOMPUTE, RECOMPUTE_LEAN, SPLITS
from lightning_mimose.predict.structure import Structure

STEP = 3
"""Operations of forward and backward, in those of the forward."""
FEWEST_LAPS, KNOWN_LAPS = 5, 32
"""Steps that are timed before they are believed, and how many are remembered."""
WAITS = 1.2
"""A step that takes no more than this times what the host took for it has waited for the host."""
CHANGED = 1.3
"""By how much the pace has to differ from what plans were made with for them to be made anew."""


class Pace:
    """Learns it.

    Args:
        seconds_per_operation: A first guess, until enough steps were timed.

    Attributes:
        seconds_per_operation: What it is; None as long as nobody knows.
        host_seconds: What the host takes for forward and backward of a step in which everything is kept, as in the
            quicker steps, for a host that is far ahead has to wait; None as long as nobody knows.

    Example:
        >>> pace = Pace()
        >>> for _ in range(6):
        ...     pace.add(1e12, 0.1)
        >>> pace.seconds_per_operation
        1e-13
    """

    def __init__(self, seconds_per_operation: float | None = None) -> None:
        self.seconds_per_operation = seconds_per_operation
        self.host_seconds: float | None = None
        self._on_host: deque[float] = deque(maxlen=KNOWN_LAPS)
        self._laps: deque[tuple[float, float, bool]] = deque(maxlen=KNOWN_LAPS)

    def anew(self) -> Pace:
        """One that knows no step yet, for another model, or other parts of it, on the same device."""
        return Pace(self.seconds_per_operation)

    def add(self, operations: float, seconds: float, host_seconds: float = 0.0, host_work: float = 0.0) -> None:
        """Take in the time of a step. The larger half of them decides: plans are made for those.

        Args:
            operations: What it did, see `operations_of`.
            seconds: What that took.
            host_seconds: What the host took for it; 0 where nobody knows.
            host_work: What its plan adds there, see `rates.host_work`.
        """
        if operations <= 0 or seconds <= 0:
            return
        if host_seconds > 0:
            self._on_host.append(host_seconds / (1 + host_work))
        self._laps.append((operations, seconds, seconds > WAITS * host_seconds))
        if len(self._laps) >= FEWEST_LAPS:
            laps = [lap for lap in self._laps if lap[2]]
            laps = sorted(laps if len(laps) >= FEWEST_LAPS else self._laps, reverse=True)
            large = laps[: max(FEWEST_LAPS, len(laps) // 2)]
            now, known = median(seconds / operations for operations, seconds, _ in large), self.seconds_per_operation
            if known is None or not known / CHANGED <= now <= known * CHANGED:
                self.seconds_per_operation = now
        if len(self._laps) >= FEWEST_LAPS and self._on_host:
            now, known = sorted(self._on_host)[len(self._on_host) // 4], self.host_seconds
            if known is None or not known / CHANGED <= now <= known * CHANGED:
                self.host_seconds = now


def operations_of(structure: Structure, values: NDArray[np.float64], actions: Mapping[str, str]) -> float | None:
    """Operations of a step that runs a plan: forward and backward, and what is made again.

    Args:
        structure: What the columns are.
        values: Shape (structure.columns,).
        actions: Unit -> what it does.

    Returns:
        How many; None where a step's time tells nothing of them: it waits for copies, or units run in parts.

    Limitations:
        Of what is outside units, and of what is not trained, nothing is known: it counts as nothing.
    """
    if not {OFFLOAD, *SPLITS}.isdisjoint(actions.values()):
        return None
    again = {RECOMPUTE, RECOMPUTE_LEAN}
    total = 0.0
    for call in structure.calls:
        operations = float(values[call.flops] + values[call.besides])
        total += operations * (STEP * call.region + (actions.get(call.unit) in again))
    for shape in structure.lean:
        if actions.get(structure.calls[shape.call].unit) == shape.action:
            total += float(values[shape.work])
    return total
