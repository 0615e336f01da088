"""Tilings: surfaces of images whose sides are rounded to strides, patches or whole windows, level by level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Side = TypeVar("Side", int, Integers)

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 7, 14, 28, 56, 112, 224, 12, 24, 48, 96, 192)
"""What sides are rounded to: strides, patches, and whole windows of them."""
STEMS = (1, 2, 4, 8, 14, 16, 32)
"""Sides of the patches that a first convolution without padding takes."""
EDGES: tuple[Literal["fine", "coarse"], ...] = ("fine", "coarse")


@dataclass(frozen=True)
class Tiling:
    """A surface in two roundings, their product, and what is added where the coarser one pads.

    Attributes:
        sides: Names of the dimensions that are multiplied: two, or one twice where images are square.
        batch: Name of the dimension that everything is proportional to, if it varies.
        fine: What sides are rounded up to multiples of, or down if it is negative.
        coarse: The same for the other surface; as `fine` for none.
        edges: Which surface is there once more where the coarse rounding pads a side, as a copy with or without edges.
        stem: What sides are rounded down to multiples of before all else: pixels that no patch takes.
        attends: Whether the product of both surfaces is there as well, or the square of one: scores of attention.
    """

    sides: tuple[str, ...]
    batch: str | None
    fine: int
    coarse: int
    edges: Literal["fine", "coarse"] | None = None
    stem: int = 1
    attends: bool = False

    def design(self, sizes: Sequence[Mapping[str, int]]) -> Floats:
        """The features of some sizes, shape (sizes, features).

        Example:
            >>> tiling = Tiling(("h", "w"), None, 2, 4, "fine")
            >>> tiling.design([{"h": 6, "w": 8}, {"h": 8, "w": 8}]).tolist()
            [[1.0, 48.0, 64.0, 48.0], [1.0, 64.0, 64.0, 0.0]]
        """
        found: Floats = designs([self], Surfaces(sizes))[0]
        return found

    def counts(self, dims: Mapping[str, int]) -> set[int]:
        """How many multiples of the coarse rounding the sides take.

        Example:
            >>> Tiling(("h", "w"), None, 224, 224).counts({"h": 227, "w": 449})
            {2, 3}
        """
        sides = [dims[name] // self.stem * self.stem for name in self.sides]
        return {_rounded(side, self.coarse) // self.coarse for side in sides}


class Surfaces:
    """The surfaces of some sizes in all roundings, each made once: there are hundreds of tilings of few of them.

    Args:
        sizes: The sizes.
    """

    def __init__(self, sizes: Sequence[Mapping[str, int]]) -> None:
        self.sizes = sizes
        self._sides: dict[str, Integers] = {}
        self._rounded: dict[tuple[str, int, int], Integers] = {}
        self._surfaces: dict[tuple[tuple[str, ...], int, int], Floats] = {}

    def side(self, name: str) -> Integers:
        """A dimension of all sizes, shape (sizes,)."""
        if name not in self._sides:
            self._sides[name] = np.array([dims[name] for dims in self.sizes])
        return self._sides[name]

    def of(self, tiling: Tiling, multiple: int) -> Floats:
        """The surfaces with sides rounded to a multiple, shape (sizes,)."""
        key = tiling.sides, tiling.stem, multiple
        if key not in self._surfaces:
            one, other = (self._rounded_side(name, tiling.stem, multiple) for name in tiling.sides)
            self._surfaces[key] = np.multiply(one, other, dtype=np.float64)
        return self._surfaces[key]

    def pads(self, tiling: Tiling) -> NDArray[np.bool_]:
        """Whether the coarse rounding adds anything to the fine one, shape (sizes,)."""
        one, other = (self._rounded_side(name, tiling.stem, tiling.fine) % tiling.coarse for name in tiling.sides)
        return np.logical_or(one, other)

    def _rounded_side(self, name: str, stem: int, multiple: int) -> Integers:
        key = name, stem, multiple
        if key not in self._rounded:
            self._rounded[key] = _rounded(self.side(name) // stem * stem, multiple)
        return self._rounded[key]


def designs(tilings: Sequence[Tiling], surfaces: Surfaces) -> Floats:
    """The features of some sizes in tilings that have equally many, shape (tilings, sizes, features)."""
    features = np.array([_columns(each, surfaces) for each in tilings])
    ones = np.ones((len(tilings), 1, features.shape[2]))
    if tilings[0].batch is not None:
        features = np.concatenate([ones, features], axis=1) * surfaces.side(tilings[0].batch)
    return np.ascontiguousarray(np.concatenate([ones, features], axis=1).transpose(0, 2, 1))


def _columns(tiling: Tiling, surfaces: Surfaces) -> list[Floats]:
    """What a tiling adds up, but for the constant and the batch."""
    fine, coarse = surfaces.of(tiling, tiling.fine), surfaces.of(tiling, tiling.coarse)
    found = [fine] if tiling.fine == tiling.coarse else [fine, coarse]
    if tiling.attends:
        found.append(fine * coarse)
    if tiling.edges is not None:
        found.append((fine if tiling.edges == "fine" else coarse) * surfaces.pads(tiling))
    return found


def _rounded(side: Side, multiple: int) -> Side:
    """Up to a multiple, or down if it is negative."""
    return -(-side // multiple) * multiple


def tilings(sides: tuple[str, ...], batch: str | None, stem: int = 1, most: int = 5) -> Iterator[list[Tiling]]:
    """Candidates, simplest first: those of each list have equally many features.

    Args:
        sides: See `Tiling`.
        batch: See `Tiling`.
        stem: See `Tiling`.
        most: How many features they may have: to make hundreds that too few sizes determine takes time.
    """
    every = (*MULTIPLES, *(-multiple for multiple in MULTIPLES[1:]))
    singles = [Tiling(sides, batch, each, each) for each in every]
    if stem > 1:
        every = tuple(multiple for multiple in MULTIPLES if multiple > stem and multiple % stem == 0)
        singles += [Tiling(sides, batch, each, each, stem=stem) for each in every]
        every = (stem, *every)
    yield singles
    features = 2 + (batch is not None)
    if most <= features:
        return
    pairs = [(fine, coarse) for coarse in every for fine in every if abs(fine) < abs(coarse) and coarse % fine == 0]
    doubles = [Tiling(sides, batch, fine, coarse, stem=stem) for fine, coarse in pairs]
    yield [*attending(singles), *doubles]
    if most > features + 1:
        edged = [replace(double, edges=edges) for double in doubles for edges in EDGES]
        yield [*attending(doubles), *edged]


def attending(tilings: Sequence[Tiling]) -> list[Tiling]:
    """The same with the product of both surfaces."""
    return [replace(tiling, attends=True) for tiling in tilings]
