"""Input size -> features: the monomials in which bytes and operations are linear.

What a layer holds is a polynomial in the dimensions of the batch: tokens (`batch * length`), attention
(`batch * length ** 2`), pixels (`batch * height * width`). Several bases are offered, the plain ones first; the
estimator takes the first that predicts what it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

Monomial = tuple[int, ...]
"""Exponent of each varying dimension."""


@dataclass(frozen=True)
class Basis:
    """A set of monomials over some dimensions.

    Attributes:
        dims: Names of the dimensions that vary, one of each group that always was equal.
        monomials: Exponents, one tuple per feature; the constant comes first.
        scales: Largest value of each dimension, so that features stay near one.
    """

    dims: tuple[str, ...]
    monomials: tuple[Monomial, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_exponents", np.array(self.monomials, dtype=np.float64).reshape(len(self.monomials), -1)
        )
        object.__setattr__(self, "_scales", np.array(self.scales, dtype=np.float64))

    def features(self, dims: Mapping[str, int]) -> NDArray[np.float64]:
        """Shape (monomials,).

        Example:
            >>> Basis(("n",), ((0,), (1,), (2,)), (10.0,)).features({"n": 5}).tolist()
            [1.0, 0.5, 0.25]
        """
        point = np.array([dims[name] for name in self.dims], dtype=np.float64) / self._scales  # type: ignore[attr-defined]
        result: NDArray[np.float64] = np.prod(point**self._exponents, axis=1)  # type: ignore[attr-defined]
        return result


def varying_dims(sizes: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """The dimensions with more than one value; of those that are equal in every size, the first.

    Example:
        >>> varying_dims([{"batch": 8, "x:1": 5, "mask:1": 5}, {"batch": 8, "x:1": 7, "mask:1": 7}])
        ('x:1',)
    """
    columns: dict[tuple[int, ...], str] = {}
    for name in sizes[0]:
        values = tuple(size[name] for size in sizes)
        if len(set(values)) > 1:
            columns.setdefault(values, name)
    return tuple(columns.values())


def bases(sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Candidate bases for some sizes, simplest first."""
    dims = varying_dims(sizes)
    scales = tuple(float(max(size[name] for size in sizes)) for name in dims)
    batch = dims.index("batch") if "batch" in dims else None
    others = [i for i in range(len(dims)) if i != batch]

    def monomial(*members: int) -> Monomial:
        return tuple(members.count(i) for i in range(len(dims)))

    one = monomial()
    linear = [one, *(monomial(i) for i in others)]
    crossed = list(dict.fromkeys([*linear, *(monomial(i, j) for i in others for j in others if i < j)]))
    quadratic = list(dict.fromkeys([*linear, *(monomial(*pair) for pair in combinations_with_replacement(others, 2))]))
    # Attention over pixels: the square of an area.
    area = list(
        dict.fromkeys([*quadratic, *(monomial(*pair, *pair) for pair in combinations_with_replacement(others, 2))])
    )
    ladders = list(dict.fromkeys(map(tuple, (linear, crossed, quadratic, area))))
    if batch is not None:
        by_batch = [(one, *(tuple(e + (i == batch) for i, e in enumerate(m)) for m in ladder)) for ladder in ladders]
        # Almost everything scales with the batch; what does not (a position bias) needs more sizes to be told apart.
        both = [tuple(dict.fromkeys([*ladder, *scaled])) for ladder, scaled in zip(ladders, by_batch, strict=True)]
        ladders = [*by_batch, *both]
    return [Basis(dims, tuple(ladder), scales) for ladder in ladders]
