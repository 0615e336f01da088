"""Whether a number of operations goes by some dimensions of sizes: what is padded for windows goes by an image's sides.

Sizes of such numbers lie in no range of their own, and few of them come a second time as a whole. Without one of their
dimensions (the batch, as a rule) many do; if each then has the number that it had, with numbers that differ, nothing
else than the size tells which one comes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from lightning_mimose.predict.paths import Key
from lightning_mimose.sizes import BatchSize

MOST_PARTS = 256
"""Sizes without a dimension that are remembered."""
PROVEN, CHANCE = 4, 0.01
"""How often a part of a size has to come again with its number, and how likely that may be by chance."""

Part: TypeAlias = tuple[int, Key]


class ToldBySize:
    """Follows it.

    Example:
        >>> told = ToldBySize()
        >>> for batch in (2, 4):
        ...     for side in (56, 60, 64, 72):
        ...         told.saw(BatchSize((("batch", batch), ("x:2", side))), side % 56 > 0, share=0.3)
        >>> told.holds
        True
    """

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Part, Hashable]] = {}
        """Dimension that is left out -> what remains of sizes -> their number of operations."""
        self._again: dict[str, int] = {}
        """How often it came again with the same number."""
        self._chance: dict[str, float] = {}
        """How likely that is if numbers come by chance."""
        self._refuted: set[str] = set()

    @property
    def holds(self) -> bool:
        """Whether numbers go by sizes without one of their dimensions."""
        return any(times >= PROVEN and self._chance[name] < CHANCE for name, times in self._again.items())

    def saw(self, size: Hashable, count: Hashable, share: float) -> None:
        """A step's passes are over.

        Args:
            size: Its batch's size; of one that is no `BatchSize` nothing is known.
            count: The number of its operations.
            share: In which share of the steps before it that number came.
        """
        if not isinstance(size, BatchSize):
            return
        for i, (name, _) in enumerate(size.dims):
            if name in self._refuted:
                continue
            numbers = self._numbers.setdefault(name, {})
            part = size.layout, (*size.dims[:i], *size.dims[i + 1 :])
            before = numbers.get(part)
            if before is None:
                if len(numbers) < MOST_PARTS:
                    numbers[part] = count
            elif before == count:
                self._again[name] = self._again.get(name, 0) + 1
                self._chance[name] = self._chance.get(name, 1.0) * share
            else:
                self._refuted.add(name)
                for known in (self._numbers, self._again, self._chance):
                    known.pop(name, None)
