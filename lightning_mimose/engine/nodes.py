"""How many operations with gradients a forward has: another number says that the loss, or the model, is another one."""

from __future__ import annotations

import torch


class Nodes:
    """Counts those of a forward in this thread.

    Example:
        >>> nodes, weight = Nodes(), torch.ones(2, requires_grad=True)
        >>> nodes.begin()
        >>> loss = (weight * 2).sum()
        >>> nodes.end(), nodes.end()
        (2, None)
    """

    def __init__(self) -> None:
        self._began: int | None = None

    def begin(self) -> None:
        """The forward begins."""
        self._began = torch._C._autograd._get_sequence_nr()

    def end(self, own: int = 0) -> int | None:
        """The forward is over: the number, or None if none has begun since the last one was over.

        Args:
            own: How many of them were ours.
        """
        if self._began is None:
            return None
        count, self._began = torch._C._autograd._get_sequence_nr() - self._began - own, None
        return count
