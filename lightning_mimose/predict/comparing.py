"""What it takes to compare recipes with what they rebuild, in calls in which that was not done before.

Each place at which a call saves a tensor is compared the first time that it is met. In a loop of another length, what
comes after it are other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import GRADES
from lightning_mimose.predict.structure import Structure

MOST_COUNTS = 4096
"""Numbers of places in the calls of a unit of which it is remembered that they were compared."""
NEARLY = 0.01
"""By how much a number that was fitted may miss a whole one."""
Comparing: TypeAlias = Mapping[int, tuple[int, int]]
"""Call -> up to which grade nothing needs to be compared, and the bytes that the others take."""


@dataclass
class Comparisons:
    """What was compared so far in the units of one model.

    Attributes:
        grades: Unit -> number of places that a call had -> up to which grade their recipes were compared.
        shares: Unit -> what comparing takes in calls whose number of places had not come before, as a share of what it
            would take in all places.
        news: Units of which something was compared since plans were last told of it.

    Example:
        >>> comparisons = Comparisons()
        >>> comparisons.made("block", 24, 5)
        >>> comparisons.missing("block", 32, 100, 400)
        >>> comparisons.grades, comparisons.shares, comparisons.news
        ({'block': {24: 5}}, {'block': 0.25}, {'block'})
    """

    grades: dict[str, dict[int, int]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    news: set[str] = field(default_factory=set)

    def made(self, unit: str, places: int, grade: int) -> None:
        """The recipes of a call were compared, as far as they were not before.

        Args:
            unit: Its unit.
            places: How many it had.
            grade: Up to which grade; 0 if none of its own were.
        """
        known = self.grades.setdefault(unit, {}) if grade else {}
        if grade > known.get(places, 0):
            if len(known) >= MOST_COUNTS:
                known.clear()
            known[places] = grade
            self.news.add(unit)

    def missing(self, unit: str, places: int, new_bytes: int, all_bytes: int) -> None:
        """A call was looked into that did not act, so that nothing was compared.

        Args:
            unit: Its unit.
            places: How many it had.
            new_bytes: What comparing would have taken in those that were not met before.
            all_bytes: And in all of them.
        """
        # In a shorter loop only what comes after it is new, in a longer one more rounds are, too.
        if all_bytes and places > max(self.grades.get(unit, ()), default=places):
            self.shares[unit] = max(new_bytes / all_bytes, self.shares.get(unit, 0.0))

    def to_come(
        self, structure: Structure, values: NDArray[np.float64], seen: Sequence[NDArray[np.float64]]
    ) -> Comparing:
        """What it will take in the calls of a step that save as often as none before.

        Args:
            structure: The step's shape.
            values: Shape (columns,); the fitted columns for its size.
            seen: Of each size that was measured, the same.

        Returns:
            Nothing of calls that save equally often in all sizes: where those of one unit do not (it is called again
            without gradients of its input, say), what is compared is spread over its forward. And nothing of units of
            which nothing was compared at all, which are not planned yet.
        """
        columns = structure.layout.columns
        counts = np.array([each[columns["places"]] for each in seen])
        loops = np.ptp(counts, axis=0) > 0 if counts.size else np.zeros(len(structure.calls), dtype=np.bool_)
        if not loops.any():  # as in most models
            return {}
        places = np.append(values, 0)[columns["places"]]
        comparing = np.append(values, 0)[columns["comparing"]]
        # How often a unit saves something that goes by what tensors hold is not known beforehand, nor where the fit,
        # which is made for bytes, does not hold for numbers of tensors.
        is_whole = np.abs(places - np.rint(places)) < NEARLY
        found: dict[int, tuple[int, int]] = {}
        for i in np.flatnonzero(loops & is_whole & (columns["places"] >= 0)).tolist():
            unit = structure.calls[i].unit
            if unit not in self.grades or unit in structure.dynamic:
                continue
            grade = self.grades[unit].get(round(float(places[i])), 0)
            if grade < len(GRADES):
                found[i] = grade, int(self.shares.get(unit, 1.0) * comparing[i])
        return found
