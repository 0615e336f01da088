"""How many operations with gradients a forward has: another number says that the loss, or the model, is another one."""

from __future__ import annotations

from collections.abc import Hashable

import torch

MOST = 256
"""Sizes whose number is remembered."""
STEADY = 6
"""Steps in a row that had the number that was to be expected, for another one to tell something: in many models it goes
by what a batch holds, or by chance."""


class Nodes:
    """Compares a step's number with that of steps of its size; of all steps, where it never went by the size.

    Example:
        >>> nodes, weight = Nodes(), torch.ones(2, requires_grad=True)
        >>> differed = []
        >>> for factors in (1, 1, 1, 1, 1, 1, 1, 2):
        ...     nodes.begin()
        ...     loss = sum((weight * 2).sum() for _ in range(factors))
        ...     differed.append(nodes.differ("a size"))
        >>> differed.index(True)
        7
    """

    def __init__(self) -> None:
        self._began: int | None = None
        self._of: dict[Hashable, int] = {}
        self._usual: int | None = None
        """The number of all sizes that are remembered; None where they differ."""
        self._steady = 0

    def begin(self) -> None:
        """The forward begins, in this thread."""
        self._began = torch._C._autograd._get_sequence_nr()

    def differ(self, size: Hashable) -> bool:
        """The forward is over; returns whether it was another one than those before it, which were all as expected.

        Args:
            size: The batch's size.
        """
        if self._began is None:
            return False
        count, self._began = torch._C._autograd._get_sequence_nr() - self._began, None
        expected, steady = self._of.get(size, self._usual), self._steady
        differs = expected is not None and count != expected
        if (differs and size in self._of) or len(self._of) >= MOST:
            self._of.clear()
        if not self._of:
            self._usual = count
        elif count != self._usual:
            self._usual = None
        self._of[size] = count
        self._steady = 0 if differs else steady + (expected is not None)
        return differs and steady >= STEADY
