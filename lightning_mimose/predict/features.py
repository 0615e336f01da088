"""Input size -> features: the monomials in which bytes and operations are linear.

What a layer holds is a polynomial in the dimensions of the batch: tokens (`batch * length`), attention
(`batch * length ** 2`), pixels (`batch * height * width`). Several bases are offered, the plain ones first; the
estimator takes the first that predicts what it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEVELS = (2, 3, 4)
_FINEST = (4, 2, 16, 24, 28, 32, 48, 56)
"""Pyramids of images halve their sides level by level and round up, or pad to whole windows: side multiples of the
finest level (a stride, or patch times window) and of its doubles describe them."""

BLOCKS = (1024, 512, 256, 128, 64, 32, 16, 8)
"""What attention in windows or blocks pads sequences to: of those that describe what was seen, the largest."""

DEPTHS = 4
"""How many times strides may halve a sequence, and round up, before attention sees what is left."""

EXACT = 1e-9
"""How far from a line, as a share of the largest, sizes may lie for the sake of arithmetic."""

Monomial = tuple[int, ...]
"""Exponent of each varying dimension."""


@dataclass(frozen=True)
class Basis:
    """A set of monomials over some dimensions, each of which may see the dimensions rounded up.

    Attributes:
        dims: Names of the dimensions that vary and do not follow from others.
        monomials: Exponents, one tuple per feature; the constant comes first.
        granules: For each feature the multiple that each dimension is rounded up to.
        scales: Largest value of each dimension, so that features stay near one.
        shifts: For each feature how much is taken off what it rounds up; nothing by default.
    """

    dims: tuple[str, ...]
    monomials: tuple[Monomial, ...]
    granules: tuple[tuple[int, ...], ...]
    scales: tuple[float, ...]
    shifts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        exponents = np.array(self.monomials, dtype=np.float64).reshape(len(self.monomials), -1)
        granules = np.array(self.granules, dtype=np.float64).reshape(len(self.monomials), -1)
        object.__setattr__(self, "_exponents", exponents)
        object.__setattr__(self, "_granules", granules)
        object.__setattr__(self, "_scales", np.array(self.scales, dtype=np.float64))
        shifts = np.array(self.shifts or (0,) * len(self.monomials), dtype=np.float64).reshape(-1, 1)
        object.__setattr__(self, "_shifts", np.where(granules > 1, shifts, 0.0))

    @property
    def rounds(self) -> bool:
        """Whether any of the features sees dimensions rounded up."""
        return any(granule > 1 for granules in self.granules for granule in granules)

    @property
    def bends(self) -> bool:
        """Whether it has a square of each dimension but the batch."""
        highest = dict(zip(self.dims, map(max, zip(*self.monomials, strict=True)), strict=True))
        return all(degree > 1 for name, degree in highest.items() if name != "batch")

    @property
    def counts(self) -> bool:
        """Whether one side is only how many there are of another."""
        lengths = [i for i, name in enumerate(self.dims) if name != "batch"]
        return any(sorted(filter(None, (monomial[i] for i in lengths))) == [1, 2] for monomial in self.monomials)

    @property
    def padded(self) -> tuple[str, int] | None:
        """The one of two lengths that alone is rounded up, and to multiples of what; None where it is not so."""
        granules = [max(each) for each in zip(*self.granules, strict=True)]
        found = [(name, granule) for name, granule in zip(self.dims, granules, strict=True) if granule > 1]
        lengths = [name for name in self.dims if name != "batch"]
        return found[0] if len(found) == 1 and len(lengths) > 1 else None

    def blocks(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.int64] | None:
        """How many blocks the padded length is in some sizes, shape (sizes,); None where none of two is padded."""
        if self.padded is None:
            return None
        name, granule = self.padded
        return np.array([-(-size[name] // granule) for size in sizes])

    def features(self, dims: Mapping[str, int]) -> NDArray[np.float64]:
        """Shape (monomials,).

        Example:
            >>> Basis(("n",), ((0,), (1,), (2,)), ((1,), (1,), (4,)), (10.0,)).features({"n": 5}).round(2).tolist()
            [1.0, 0.5, 0.64]
        """
        row: NDArray[np.float64] = self.design([dims])[0]
        return row

    def design(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.float64]:
        """The features of several sizes: shape (sizes, monomials)."""
        values = np.array([[[size[name] for name in self.dims]] for size in sizes], dtype=np.float64)
        granules, scales, exponents = self._granules, self._scales, self._exponents  # type: ignore[attr-defined]
        shifts = self._shifts  # type: ignore[attr-defined]
        points = np.ceil((values - shifts) / granules) * granules / scales
        result: NDArray[np.float64] = np.prod(points**exponents, axis=2)
        return result


@dataclass(frozen=True)
class Relation:
    """How a dimension follows from others, in all sizes that were seen: tokens that have a mask, edges of grid graphs.

    Attributes:
        name: The dimension.
        others: Those it follows from.
        coefficients: The constant, and the factor of each of them.
    """

    name: str
    others: tuple[str, ...]
    coefficients: tuple[float, ...]

    def holds(self, dims: Mapping[str, int]) -> bool:
        """Whether it does so in a size, too."""
        return abs(self.value(dims) - dims[self.name]) <= 1e-6 * max(1, dims[self.name])

    def value(self, dims: Mapping[str, int]) -> float:
        """What it would be in a size."""
        constant, *factors = self.coefficients
        return constant + sum(factor * dims[other] for factor, other in zip(factors, self.others, strict=True))


def varying_dims(sizes: Sequence[Mapping[str, int]]) -> tuple[tuple[str, ...], tuple[Relation, ...]]:
    """The dimensions with more than one value, and those among them that follow from the ones before.

    A polynomial in all of them is one in the first. Nothing follows from the batch but what is equal to it: bytes are
    the batch times a polynomial of the rest, whose degree would rise.

    Example:
        >>> dims, relations = varying_dims([{"batch": 8, "x:1": n, "mask:1": n, "y:1": 2 * n + 1} for n in (5, 7, 8)])
        >>> dims, [relation.name for relation in relations]
        (('x:1',), ['mask:1', 'y:1'])
    """
    kept: dict[str, NDArray[np.float64]] = {}
    relations = []
    for name in sizes[0]:
        values = np.array([size[name] for size in sizes], dtype=np.float64)
        if (values == values[0]).all():
            continue
        relation = _relation(name, values, kept)
        if relation is None:
            kept[name] = values
        else:
            relations.append(relation)
    return tuple(kept), tuple(relations)


def _relation(name: str, values: NDArray[np.float64], kept: Mapping[str, NDArray[np.float64]]) -> Relation | None:
    equal = next((other for other, column in kept.items() if (column == values).all()), None)
    if equal is not None:
        return Relation(name, (equal,), (0.0, 1.0))
    if name == "batch":
        return None
    others = tuple(other for other in kept if other != "batch")
    for among in (*((other,) for other in others), others):
        if len(values) < len(among) + 2:  # so few always lie on a plane
            continue
        design = np.stack([np.ones(len(values)), *(kept[other] for other in among)], axis=1)
        coefficients = np.linalg.lstsq(design, values, rcond=None)[0]
        if np.abs(design @ coefficients - values).max() < EXACT * values.max():
            return Relation(name, among, tuple(coefficients.tolist()))
    return None


def may_be_surfaces(sizes: Sequence[Mapping[str, int]]) -> bool:
    """Whether two dimensions that vary may be the sides of images: those of one tensor, or names of the user's own.

    Lengths of texts, of which every tensor has one, are not rounded level by level.

    Example:
        >>> may_be_surfaces([{"ids:1": 5, "mask:1": 5}, {"ids:1": 7, "mask:1": 7}])
        False
        >>> may_be_surfaces([{"pixels:2": 32, "pixels:3": 32}, {"pixels:2": 64, "pixels:3": 64}])
        True
    """
    first, *rest = sizes
    varying = [name for name in first if name != "batch" and any(size[name] != first[name] for size in rest)]
    tensors = [name.rpartition(":")[0] for name in varying]
    return "" in tensors or len(set(tensors)) < len(tensors)


class Feature(NamedTuple):
    """One of a basis.

    Attributes:
        exponents: Of each dimension.
        granules: What each dimension is rounded up to a multiple of.
        shift: What is taken off before that.
    """

    exponents: Monomial
    granules: tuple[int, ...]
    shift: int = 0

    def times(self, dimension: int) -> Feature:
        """The product with a dimension, by its place."""
        raised = tuple(exponent + (i == dimension) for i, exponent in enumerate(self.exponents))
        return self._replace(exponents=raised)


Rung = Sequence[Feature]
"""Features of a basis."""


def bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]], *, rounds: bool = True) -> list[Basis]:
    """Candidate bases for the dimensions that vary and some sizes, simplest first; those that round if asked for."""
    others = [i for i, name in enumerate(dims) if name != "batch"]
    one = monomial(dims)
    linear = [one, *(monomial(dims, i) for i in others)]
    crossed = list(dict.fromkeys([*linear, *(monomial(dims, i, j) for i in others for j in others if i < j)]))
    pairs = list(combinations_with_replacement(others, 2))
    quadratic = list(dict.fromkeys([*linear, *(monomial(dims, *pair) for pair in pairs)]))
    # Attention over pixels: the square of an area.
    area = list(dict.fromkeys([*quadratic, *(monomial(dims, *pair, *pair) for pair in pairs)]))
    # Of two values (one image or two) a square says what the value and the constant do: no fit would come of it.
    two = {i for i in others if len({size[dims[i]] for size in sizes}) == 2}
    quadratic, area = (
        list(dict.fromkeys(tuple(min(e, 1) if i in two else e for i, e in enumerate(m)) for m in ladder))
        for ladder in (quadratic, area)
    )
    surfaces = may_be_surfaces(sizes)
    # Texts of a batch in rows of several (answers to choose from, passages): one side is only how many there are. There
    # may be another text beside them (a question).
    counted = [
        [
            *(one, monomial(dims, i), monomial(dims, i, j), monomial(dims, i, j, j)),
            *(monomial(dims, *(k,) * degree) for k in others if k not in (i, j) for degree in (1, 2)),
        ]
        for i in others
        for j in others
        if i != j and surfaces and (len(others) == 2 or (len(others) == 3 and of_one_tensor(dims[i], dims[j])))
    ]

    def rounded(exponents: Monomial, granule: int) -> Feature:
        return feature(exponents, granule, others)

    plain = [tuple(rounded(m, 1) for m in ladder) for ladder in (linear, crossed, *counted, quadratic, area)]
    rungs: list[Rung] = list(dict.fromkeys(plain))
    if not rounds:
        return scaled(dims, sizes, rungs)
    if 1 <= len(others) <= 2 and surfaces:
        surface = monomial(dims, *(others * (3 - len(others))))
        rungs += [
            (rounded(one, 1), *(rounded(surface, finest << k) for k in range(levels)))
            for levels in _LEVELS
            for finest in _FINEST
        ]
    elif len(others) == 1:
        # What is padded beside what is not.
        (length,) = others
        padded = monomial(dims, length)
        blocks = blocks_of(dims[length], sizes)
        lines = [(rounded(one, 1), rounded(padded, 1), rounded(padded, block)) for block in blocks]
        square = monomial(dims, length, length)
        rungs += lines
        rungs += [(*line, rounded(square, block)) for line, block in zip(lines, blocks, strict=True)]
        levels = (rounded(one, 1), *(rounded(padded, 1 << depth) for depth in range(DEPTHS + 1)))
        for depth in range(1, DEPTHS + 1):
            pyramid = levels[: depth + 2]
            rungs += [pyramid, (*pyramid, rounded(square, 1 << depth))]
    return scaled(dims, sizes, rungs)


def of_one_tensor(name: str, other: str) -> bool:
    """Whether two dimensions are sides of the same tensor, as far as their names tell."""
    return name.rpartition(":")[0] == other.rpartition(":")[0]


def monomial(dims: Sequence[str], *members: int) -> Monomial:
    """The product of some dimensions, by their places."""
    return tuple(members.count(i) for i in range(len(dims)))


def feature(exponents: Monomial, granule: int = 1, lengths: Sequence[int] = (), shift: int = 0) -> Feature:
    """Of some dimensions rounded up, and the others as they are."""
    return Feature(exponents, tuple(granule if i in lengths else 1 for i in range(len(exponents))), shift)


def blocks_of(length: str, sizes: Sequence[Mapping[str, int]]) -> list[int]:
    """What it may be padded to, for some sizes to be padded to one number and others to another."""
    longest = max(size[length] for size in sizes)
    return [block for block in BLOCKS if block < longest]


def scaled(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]], rungs: list[Rung]) -> list[Basis]:
    """As bases, times the batch where it varies."""
    if "batch" in dims:
        batch, constant = dims.index("batch"), feature(monomial(dims))
        times = [(constant, *(each.times(batch) for each in rung)) for rung in rungs]
        # Almost everything scales with the batch; what does not (a position bias) needs more sizes to be told apart.
        # A loss that holds everything of a batch against everything else goes with the batch's square.
        square = feature(monomial(dims, batch, batch))
        squared = [(*rung, square) for rung in times if all(max(each.granules) == 1 for each in rung)]
        rungs = [*times, *(tuple(dict.fromkeys([*rung, *more])) for rung, more in zip(rungs, times, strict=True))]
        rungs += squared
    scales = tuple(float(max(size[name] for size in sizes)) for name in dims)
    return [
        Basis(
            dims,
            tuple(each.exponents for each in rung),
            tuple(each.granules for each in rung),
            scales,
            tuple(each.shift for each in rung),
        )
        for rung in rungs
    ]
