"""Scatter: by how much steps of one size differ, because something else than the size decides what they need.

How many proposals a detector keeps and how many tokens are routed to an expert depend on what is in a batch. No fit
knows of it where every size is measured once, and one that is measured again takes the place of what it was.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import largest_error
from lightning_mimose.predict.paths import Path
from lightning_mimose.predict.structure import Structure

KNOWN_PATHS = 64
REMEASURED = 8
"""Sizes measured again that are remembered: what a training's first steps had besides is forgotten with them."""


class Scatter:
    """What sizes that were measured again have shown, on every path that steps take.

    Example:
        >>> Scatter().error_on(Path(frozenset("ab"), frozenset()))
        0.0
    """

    def __init__(self) -> None:
        self._errors: dict[Path, deque[float]] = {}

    def error_on(self, path: Path) -> float:
        """The largest difference between two steps of one size on a path, as a share of the peak."""
        return max(self._errors.get(path, ()), default=0.0)

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
        if len(self._errors) >= KNOWN_PATHS and structure.path not in self._errors:
            del self._errors[next(iter(self._errors))]
        error = largest_error(before[None], structure.summary(now[None]), structure, resident_bytes)
        self._errors.setdefault(structure.path, deque(maxlen=REMEASURED)).append(error)
