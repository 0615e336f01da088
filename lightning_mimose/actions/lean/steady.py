"""Places where a unit's calls keep the tensor because of its operations alone: the next call looks for no recipe there.

To look once more at every call, only to find again that a matrix product is not made anew at this grade, is a good part
of what lean saves cost on the host. Nothing is learnt where a recipe failed for any other reason (sizes, a parameter
that is frozen, autocast's memory of casts, values that somebody wrote): the next call may have it. What is kept is
right whatever else a call does; but once one has saved anything else than those before it, it could have been spared
something there, and so nothing of this is relied on again.
"""

from __future__ import annotations

from typing import Any


class Steady:
    """What is known over all calls of a unit, up to one grade of lean saves.

    Attributes:
        kept: Number of a place -> the operation that made the tensor, "" for none.
        count: How many tensors every call saved; None before the first.
        is_over: Whether calls differ.

    Example:
        >>> steady = Steady()
        >>> for _ in range(2):
        ...     call = SteadyCall(steady)
        ...     keeps = call.keeps(1, None)
        ...     call.was_kept(1, None)
        ...     call.end(1)
        >>> keeps, SteadyCall(steady).keeps(2, None)
        (True, False)
    """

    def __init__(self) -> None:
        self.kept: dict[int, str] = {}
        self.count: int | None = None
        self.is_over = False


class SteadyCall:
    """One call.

    Args:
        steady: What is known, and what it adds to.
    """

    def __init__(self, steady: Steady) -> None:
        self._steady = steady
        self._kept: dict[int, str] = {}
        self._differs = False
        self._is_small = False

    def keeps(self, number: int, node: Any) -> bool:
        """Whether a tensor is one that all calls keep.

        Args:
            number: How many were saved before it, and one.
            node: What made it.
        """
        made_by = self._steady.kept.get(number)
        if made_by is None or self._differs:
            return False
        self._differs = made_by != _name(node)
        return not self._differs

    def was_kept(self, number: int, node: Any) -> None:
        """A tensor was kept because of the operations that lead to it."""
        self._kept[number] = _name(node)

    def is_small(self) -> None:
        """A tensor was kept because it is small: others may be rebuilt by way of it where it is not."""
        self._is_small = True

    def end(self, count: int) -> None:
        """The forward is over.

        Args:
            count: How many tensors it saved.
        """
        steady = self._steady
        if self._differs or steady.count not in (None, count):
            steady.is_over = True
            steady.kept.clear()
        elif not self._is_small and not steady.is_over:
            steady.count = count
            steady.kept.update(self._kept)


def _name(node: Any) -> str:
    return "" if node is None else str(node.name())
