"""The numbers of a measured step: one column each, in the order in which they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_mimose.predict.maxima import Groups, moved


@dataclass
class Columns:
    """The columns so far.

    Attributes:
        values: One each.
        maxima: Column -> what it is the largest of, where that is more than one.

    Example:
        >>> columns = Columns()
        >>> columns.add(7), columns.add(-1), columns.add_highest(((9, 12), (10,)), above=2)
        (0, 1, 2)
        >>> columns.values, columns.maxima
        ([7.0, 0.0, 10.0], {2: ((7, 10), (8,))})
    """

    values: list[float] = field(default_factory=list)
    maxima: dict[int, Groups] = field(default_factory=dict)

    def add(self, value: float) -> int:
        """Add one that cannot be below zero; returns its column."""
        return self.add_signed(max(0.0, float(value)))

    def add_signed(self, value: float) -> int:
        """Add one that can."""
        self.values.append(float(value))
        return len(self.values) - 1

    def add_highest(self, groups: Groups, above: int = 0) -> int:
        """Add the largest of some local maxima; all of them less what they are measured from."""
        column = self.add(max(map(max, groups)) - above)
        if len(groups) > 1 or len(groups[0]) > 1:
            self.maxima[column] = moved(groups, -above)
        return column
