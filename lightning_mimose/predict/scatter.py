"""Scatter: by how much steps of one size differ, because something else than the size decides what they need.

How many proposals a detector keeps and how many tokens are routed to an expert depend on what is in a batch. No fit
knows of it where every size is measured once, and one that is measured again takes the place of what it was.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import largest_error
from lightning_mimose.predict.structure import Structure

REMEASURED = 8
"""Sizes measured again that are remembered: what a training's first steps had besides is forgotten in time."""


class Scatter:
    """What sizes that were measured again have shown.

    Example:
        >>> Scatter().error
        0.0
    """

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=REMEASURED)

    @property
    def error(self) -> float:
        """The largest difference between two steps of one size, as a share of the peak."""
        return max(self._errors, default=0.0)

    def add(
        self, structure: Structure, before: NDArray[np.float64], now: NDArray[np.float64], resident_bytes: int
    ) -> None:
        """A size was measured again.

        Args:
            structure: What the columns are.
            before: What it was, shape (columns,).
            now: What it is, shape (columns,).
            resident_bytes: What is resident besides activations: errors are shares of a step's whole peak.
        """
        truth = structure.summary(now[None])
        self._errors.append(largest_error(before[None], truth, structure, resident_bytes))
