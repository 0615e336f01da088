"""Products of two sides that followed from other features in all sizes seen: what they take was told by these.

Of images that are scaled to one longest side, upright and broadsides, all heights or widths are the same: the area is a
sum of both sides then, and a basis without it describes them exactly. Of an image that is smaller both ways it says
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.features import Basis, monomial

_SAME = 1e-6
"""Features are shares of the largest ones."""


@dataclass(frozen=True, eq=False)
class Untold:
    """One such product.

    Attributes:
        product: It alone, as a basis.
        weights: How much of each feature it was in all sizes seen, shape (features,).
    """

    product: Basis
    weights: NDArray[np.float64]

    def is_another(self, features: NDArray[np.float64], dims: Mapping[str, int]) -> bool:
        """Whether it is something else at some size.

        Args:
            features: The features of that size, shape (features,).
            dims: The size.
        """
        return abs(float(self.product.features(dims)[0] - features @ self.weights)) > _SAME


def untold_products(
    basis: Basis, sizes: Sequence[Mapping[str, int]], design: NDArray[np.float64]
) -> tuple[Untold, ...]:
    """Those of a basis; with the batch, too.

    Args:
        basis: What describes the sizes.
        sizes: Those seen.
        design: Their features, shape (sizes, features).
    """
    if len(design) < design.shape[1]:
        return ()
    dims = basis.dims
    sides = [i for i, name in enumerate(dims) if name != "batch"]
    batches: list[tuple[int, ...]] = [(), (dims.index("batch"),)] if "batch" in dims else [()]
    found = []
    for i, j in combinations(sides, 2):
        for batch in batches:
            powers = (monomial(dims, i, j, *batch),)
            product = replace(basis, monomials=powers, granules=((1,) * len(dims),), shifts=())
            column = product.design(sizes)[:, 0]
            weights: NDArray[np.float64] = np.linalg.lstsq(design, column, rcond=None)[0].astype(np.float64)
            if np.abs(design @ weights - column).max() < _SAME / 1000:
                found.append(Untold(product, weights))
    return tuple(found)
