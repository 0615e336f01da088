"""What is left of a step of which parts are folded: its columns, and what its calls are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.shapes import CallShape

ROUNDS = ("first", "between", "last but one", "last")
"""Names of what is left of a loop."""


class Columns:
    """New columns, of which some are as old ones.

    Args:
        values: Shape (columns,), the old ones.
    """

    def __init__(self, values: NDArray[np.float64]) -> None:
        self._old = values
        self._values: list[float] = []
        self._columns: dict[int, int] = {}

    def _column(self, old: int) -> int:
        """The index of a column that is left."""
        if old < 0:
            return old
        if old not in self._columns:
            self._columns[old] = self._new(float(self._old[old]))
        return self._columns[old]

    def _new(self, value: float) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _sum(self, columns: Sequence[int]) -> int:
        """A column of what several are together; -1 where there is none."""
        return self._new(float(self._old[list(columns)].sum()))

    def _copy(self, old: int) -> int:
        """A column of its own that is as another one."""
        return self._new(float(self._old[old]))


class Keys:
    """What calls are named by: in a step of more rounds the last one's is the same.

    Args:
        calls: Every call.
        rounds: The calls of the first rounds of all loops, of the last ones but one, and of the last ones.
        middle: Call of a round in between -> which of its round it is.
    """

    def __init__(self, calls: Sequence[CallShape], rounds: Sequence[Sequence[int]], middle: Mapping[int, int]) -> None:
        self._calls, self._rounds, self._middle = calls, rounds, middle
        self.between = self._of(rounds[0], ROUNDS[1])
        """Of the calls that stand for those of the rounds in between."""

    def of_calls(self) -> dict[int, str]:
        """Call -> its key."""
        names = {i: self.between[member] for i, member in self._middle.items()}
        for name, members in zip((ROUNDS[0], *ROUNDS[2:]), self._rounds, strict=True):
            names |= zip(members, self._of(members, name), strict=True)
        looped = {self._calls[i].unit for i in names}
        beside = [i for i, call in enumerate(self._calls) if i not in names and call.unit in looped]
        names |= zip(beside, self._of(beside, "beside"), strict=True)
        return {i: names.get(i, call.key) for i, call in enumerate(self._calls)}

    def _of(self, members: Sequence[int], name: str) -> list[str]:
        ranks, found = Counter[str](), list[str]()
        for i in members:
            unit = self._calls[i].unit
            ranks[unit] += 1
            found.append(f"{unit}#{name} {ranks[unit]}" if ranks[unit] > 1 else f"{unit}#{name}")
        return found
