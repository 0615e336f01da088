"""Features that followed from others in all sizes seen: what they take was told by these, and is another elsewhere.

Of images that are scaled to one longest side, upright and broadsides, all heights or widths are the same: the area is a
sum of both sides then, and a basis without it describes them exactly. Of an image that is smaller both ways it says
nothing. Likewise a square describes anything that has three sides, whatever it is of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.features import Basis, Monomial, may_be_surfaces, monomial

_SAME = 1e-6
"""Features are shares of the largest ones."""


@dataclass(frozen=True, eq=False)
class Untold:
    """One such feature.

    Attributes:
        feature: It alone, as a basis.
        weights: How much of each feature it was in all sizes seen, shape (features,).
    """

    feature: Basis
    weights: NDArray[np.float64]

    def is_another(self, features: NDArray[np.float64], dims: Mapping[str, int]) -> bool:
        """Whether it is something else at some size.

        Args:
            features: The features of that size, shape (features,).
            dims: The size.
        """
        return abs(float(self.feature.features(dims)[0] - features @ self.weights)) > _SAME


def untold(
    basis: Basis, sizes: Sequence[Mapping[str, int]], design: NDArray[np.float64], coefficients: NDArray[np.float64]
) -> tuple[Untold, ...]:
    """Those that a basis lacks: the next power of each length, of images products of two sides; and with the batch.

    Args:
        basis: What describes the sizes.
        sizes: Those seen.
        design: Their features, shape (sizes, features).
        coefficients: What of each feature is in each column, shape (features, columns). What hardly any is in is as
            good as lacking: where a square came out as none of three lengths, these have told that they lie on a line.
    """
    if len(design) < design.shape[1] or not coefficients.size:
        return ()
    amounts = np.abs(coefficients)  # of each column for itself: there are more operations than bytes
    counts = (amounts > _SAME * amounts.max(axis=0)).any(axis=1)
    lacking = [*_powers(basis, np.flatnonzero(counts)), *(_products(basis) if may_be_surfaces(sizes) else ())]
    if "batch" in basis.dims:
        lacking += [replace(each, monomials=(_with_batch(basis.dims, each.monomials[0]),)) for each in lacking]
    columns = np.hstack([each.design(sizes) for each in lacking]) if lacking else np.empty((len(design), 0))
    weights = np.zeros((design.shape[1], len(lacking)))
    weights[counts] = np.linalg.lstsq(design[:, counts], columns, rcond=None)[0]
    follow = np.abs(design @ weights - columns).max(axis=0, initial=0.0) < _SAME / 1000
    return tuple(Untold(each, weights[:, i]) for i, each in enumerate(lacking) if follow[i])


def _powers(basis: Basis, rows: Iterable[int]) -> Iterator[Basis]:
    """The power after the highest: with as few values as a polynomial has coefficients, it describes anything."""
    for i, name in enumerate(basis.dims):
        if name != "batch":
            power, row = max(((basis.monomials[row][i], row) for row in rows), default=(0, 0))
            grain = tuple(basis.granules[row][i] if j == i else 1 for j in range(len(basis.dims)))
            yield _alone(basis, monomial(basis.dims, *[i] * (power + 1)), grain)


def _products(basis: Basis) -> Iterator[Basis]:
    for pair in combinations([i for i, name in enumerate(basis.dims) if name != "batch"], 2):
        yield _alone(basis, monomial(basis.dims, *pair), (1,) * len(basis.dims))


def _alone(basis: Basis, powers: Monomial, grain: tuple[int, ...]) -> Basis:
    return replace(basis, monomials=(powers,), granules=(grain,), shifts=())


def _with_batch(dims: Sequence[str], powers: Monomial) -> Monomial:
    return tuple(power + (name == "batch") for name, power in zip(dims, powers, strict=True))
