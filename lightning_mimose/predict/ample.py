"""Ample room: batches that no fit describes yet, or ever will, but that fit into the budget whatever they keep.

Steps that run backward twice over one graph, texts that are packed to lengths which the batch's dimensions do not tell:
what they would take if everything were kept is not known to the percent, but it is bounded by what sheltered steps were
seen to take and to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

PATIENCE_STEPS = 12
"""Sheltered steps after which bounds are used: by then fits have mostly come about."""
SAFETY = 1.5
"""What a step may take, over the bound from another one: batches of the same size need not be alike."""
MAX_SIZES = 48


def growth(dims: Mapping[str, int], seen: Mapping[str, int]) -> float:
    """What a batch takes over what another one was seen to take, at most: quadratically more, as attention does.

    Args:
        dims: Its named dimensions.
        seen: The other's.

    Example:
        >>> growth({"batch": 4, "ids:1": 20, "mask:1": 20}, {"batch": 4, "ids:1": 10, "mask:1": 10})
        4.0
    """
    # Dimensions of the same lengths are one: tokens and their mask.
    return prod(max(1.0, now / max(then, 1)) ** 2 for now, then in {(dims[name], seen[name]) for name in seen})


class Bounds:
    """What steps take at most if everything is kept.

    Example:
        >>> bounds = Bounds()
        >>> for _ in range(PATIENCE_STEPS):
        ...     bounds.add({"batch": 4}, 1000, calls=12)
        >>> bounds.of({"batch": 4}), bounds.of({"batch": 8}), bounds.of({"batch": 4, "ids:1": 9})
        (1500, 6000, None)
    """

    def __init__(self) -> None:
        self._steps = self._calls = 0
        self._most: dict[tuple[tuple[str, int], ...], int] = {}
        self._refuted = False

    def add(self, dims: Mapping[str, int], kept_bytes: int | None, *, calls: int) -> None:
        """Take in a sheltered step.

        Args:
            dims: Named dimensions of its batch.
            kept_bytes: Its peak and all it saved, above what is resident; None if that is not known.
            calls: How many calls of units it made: one that leaves some out says nothing about one that does not.
        """
        self._steps += 1
        if calls > self._calls:
            self._calls = calls
            self._most.clear()
        if kept_bytes is None or calls < self._calls:
            return
        key = tuple(dims.items())
        self._most[key] = max(kept_bytes, self._most.pop(key, 0))
        if len(self._most) > MAX_SIZES:
            del self._most[next(iter(self._most))]

    def of(self, dims: Mapping[str, int]) -> int | None:
        """The bound for a size, in bytes above what is resident; None if there is none, or not yet."""
        if self._refuted or self._steps < PATIENCE_STEPS:
            return None
        alike = [(dict(key), most) for key, most in self._most.items() if dict(key).keys() == dims.keys()]
        return min((int(SAFETY * growth(dims, seen) * most) for seen, most in alike), default=None)

    def refute(self) -> None:
        """The device had less: believe none of it any more."""
        self._refuted = True
