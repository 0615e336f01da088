"""Ample room: batches that no fit describes yet, or ever will, but that fit into the budget whatever they keep.

Steps that run backward twice over one graph, texts that are packed to lengths which the batch's dimensions do not tell:
what they would take if everything were kept is not known to the percent, but what sheltered steps took and saved
together is more than they would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

PATIENCE_STEPS = 12
"""Sheltered steps after which bounds are used: by then fits have mostly come about."""
MUCH_LARGER = 1.5
"""How many times as large as all before no size may be."""
GROWTH = 3
"""The power of it that memory may grow with: attention over pairs takes as much."""
LEAST_SAFETY = 1.2
"""What a step may take, over the most that any other one would have: batches of the same size need not be alike. Twice
as much at first, and less the more steps were seen: the next of n + 1 is the largest once in n + 1 times."""


class Bounds:
    """What steps take at most if everything is kept.

    Beyond the sizes that were seen a step may grow with the cube of each, and nothing is known far beyond them.

    Example:
        >>> bounds = Bounds()
        >>> for _ in range(PATIENCE_STEPS):
        ...     bounds.add({"batch": 4, "ids:1": 60}, 1000)
        >>> bounds.of({"batch": 4, "ids:1": 50}), bounds.of({"batch": 4, "ids:1": 66}), bounds.of({"batch": 4})
        (2000, 2662, None)
    """

    def __init__(self) -> None:
        self._steps: Counter[frozenset[str]] = Counter()
        self._refuted = False
        self._most_bytes: dict[frozenset[str], int] = {}
        self._largest: dict[frozenset[str], dict[str, int]] = {}

    @property
    def knows_anything(self) -> bool:
        """Whether any step was seen."""
        return bool(self._steps)

    def add(self, dims: Mapping[str, int], kept_bytes: int) -> None:
        """Take in a sheltered step.

        Args:
            dims: Named dimensions of its batch.
            kept_bytes: Its peak and all it saved, above what is resident.
        """
        names = frozenset(dims)
        self._steps[names] += 1
        largest = self._largest.setdefault(names, dict(dims))
        for name, value in dims.items():
            largest[name] = max(value, largest[name])
        self._most_bytes[names] = max(kept_bytes, self._most_bytes.get(names, 0))

    def of(self, dims: Mapping[str, int]) -> int | None:
        """The bound for a size, in bytes above what is resident; None if there is none, or not yet."""
        names = frozenset(dims)
        if self._refuted or self._steps.total() < PATIENCE_STEPS or names not in self._largest:
            return None
        largest = self._largest[names]
        if any(value > MUCH_LARGER * largest[name] for name, value in dims.items()):
            return None
        larger = prod(max(1.0, value / largest[name]) for name, value in dims.items() if largest[name])
        if larger > MUCH_LARGER:
            return None
        safety = max(LEAST_SAFETY, min(2.0, 1 + PATIENCE_STEPS / self._steps[names]))
        return int(safety * larger**GROWTH * self._most_bytes[names])

    def refute(self) -> None:
        """A step took more, or may have: believe none of it any more."""
        self._refuted = True
