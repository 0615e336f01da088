"""A fit: every column of a step's structure as a polynomial in the dimensions that vary, and how far that holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import EXACT_ERROR
from lightning_mimose.predict.features import Basis, Relation
from lightning_mimose.predict.local import LocalFit
from lightning_mimose.predict.maxima import Collapse
from lightning_mimose.predict.solving import LEVERAGE
from lightning_mimose.predict.untold import Untold

Value: TypeAlias = tuple[str, int]
"""A dimension and what it is."""
Blocks: TypeAlias = tuple[str, int, int]
"""A dimension, what it is taken to be rounded up to, and what it may be rounded up to instead."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A polynomial of every column, and what is known about how far it holds.

    Attributes:
        basis: Its features.
        coefficients: Shape (features, columns and more, see `collapsed`); of none where `local` describes them.
        error: The largest error of predicting one size from the others, as a share of the size's peak.
        sizes: How many it was made from.
        low: The least value of every dimension.
        high: The greatest.
        doubtful: Grades of lean saves whose peaks it does not follow.
        relations: How dimensions follow from others.
        inverse: Of the features' second moments: shape (features, features).
        leverage: The largest that any of the sizes has.
        local: What describes every column in a basis of its own, where that is better.
        sides: The dimensions that vary, but the batch.
        grains: What they are multiples of in all sizes that were seen, or in all but a few: of lengths of texts the
            blocks that attention may pad to.
        without: Values of sides that were left out, and with them all that are as small: kernels work in another way
            there.
        resting: Shape (features, directions); along these its features rest on single sizes that nothing checks.
        short: What is added to every column so that no moment of any of the sizes is predicted lower than what was seen
            by more than the error; 0 for none.
        collapsed: From what `coefficients` give to columns, where these are more.
        unused: The dimensions that vary and are left out.
        most_unused: The most that they came to together, see `fewer.together`.
        likewise: Smaller blocks than those that it rounds up to, which round all the sizes that it was made from alike.
        untold: Features that it lacks, and that followed from its own in all sizes that it was made from.
    """

    basis: Basis
    coefficients: NDArray[np.float64]
    error: float
    sizes: int
    low: Mapping[str, int]
    high: Mapping[str, int]
    doubtful: frozenset[str]
    relations: tuple[Relation, ...]
    inverse: NDArray[np.float64]
    leverage: float
    local: LocalFit | None = None
    sides: tuple[str, ...] = ()
    grains: tuple[Value, ...] = ()
    without: tuple[Value, ...] = ()
    resting: NDArray[np.float64] | None = None
    short: NDArray[np.float64] | float = 0.0
    collapsed: Collapse | None = None
    unused: tuple[str, ...] = ()
    most_unused: float = 0.0
    likewise: tuple[Blocks, ...] = ()
    untold: tuple[Untold, ...] = ()

    def values_at(self, dims: Mapping[str, int]) -> NDArray[np.float64]:
        """What is predicted for some size, shape (columns,)."""
        if self.local is not None:
            values = self.local.values_at(dims)
        else:
            values = self.basis.features(dims) @ self.coefficients
            values = values if self.collapsed is None else self.collapsed(values)
        return np.maximum(values, 0.0) + self.short

    def error_at(self, dims: Mapping[str, int], resident_bytes: int) -> float:
        """The error to expect at some size, as a share of its peak.

        Sizes that were all rounded alike tell nothing of others: if they were whole multiples (of a stride, a window),
        it is infinite where one is not. It is infinite, too, where a size has features that rest on a single other one,
        or where one that the basis lacks is another than followed from the rest in all sizes (see `untold`).
        Beyond the sizes seen it grows with the leverage, as if all of it were due to a wrong basis: from lengths that
        are nearly the same, what grows with their square cannot be told from what grows with them. Where the basis has
        squares and is right but for rounding, it grows with the root of that, as noise does. Where one of two lengths
        is rounded up, the other may be padded to blocks that are larger than all that was seen: nothing is known
        beyond.
        """
        if any(dims[name] % grain for name, grain in self.grains):
            return float("inf")
        if self.basis.padded is not None and any(dims[name] > self._known_to(name) for name in self.sides):
            return float("inf")
        if self.local is not None:
            return max(self.error, self.local.error_at(dims, resident_bytes))
        features = self.basis.features(dims)
        if self.resting is not None and (np.abs(features @ self.resting) > LEVERAGE).any():
            return float("inf")
        if any(each.is_another(features, dims) for each in self.untold):
            return float("inf")
        beyond = max(1.0, float(features @ self.inverse @ features) / self.leverage)
        is_right = self.basis.bends and not self.basis.rounds and self.error <= EXACT_ERROR
        return self.error * (beyond**0.5 if is_right else beyond)

    def torn_at(self, dims: Mapping[str, int]) -> dict[Blocks, NDArray[np.float64]]:
        """Of blocks that describe what was seen as well, those that round some size otherwise: what they predict."""
        found = {}
        for name, block, other in self.likewise:
            if not rounds_alike(dims[name], block, other):
                place = self.basis.dims.index(name)
                granules = tuple(
                    tuple(other if i == place and each == block else each for i, each in enumerate(row))
                    for row in self.basis.granules
                )
                found[name, block, other] = replace(
                    self, basis=replace(self.basis, granules=granules), likewise=()
                ).values_at(dims)
        return found

    def _known_to(self, name: str) -> int:
        """The greatest value of a length of which something is known, where one of two is padded."""
        padded, granule = self.basis.padded or ("", 1)
        return -(-self.high[name] // granule) * granule if name == padded else self.high[name]

    def covers(self, dims: Mapping[str, int]) -> bool:
        """Whether all that differs from what the fit has seen is a dimension that varied there, in the same way."""
        return (
            self.low.keys() == dims.keys()
            and all(self.low[name] < self.high[name] or self.low[name] == value for name, value in dims.items())
            and all(relation.holds(dims) for relation in self.relations)
            and not self.too_small(dims)
        )

    def too_small(self, dims: Mapping[str, int]) -> tuple[str, ...]:
        """The sides that are smaller than what is left, where smaller ones were left out.

        Any of them: where small heights have shown that kernels change, small widths may as well.
        """
        return tuple(name for name in self.sides if self.without and dims[name] < self.low[name])


def rounds_alike(length: int, block: int, other: int) -> bool:
    """Whether it is as long in whole blocks of one kind as of another.

    Example:
        >>> rounds_alike(60, 32, 16), rounds_alike(40, 32, 16)
        (True, False)
    """
    return -(-length // block) * block == -(-length // other) * other
