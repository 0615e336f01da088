"""Tilings: surfaces of images whose sides are rounded to strides, patches or whole windows, level by level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 7, 14, 28, 56, 112, 224, 12, 24, 48, 96, 192)
"""What sides are rounded to: strides, patches, and whole windows of them."""
STEMS = (1, 2, 4, 8, 14, 16, 32)
"""Sides of the patches that a first convolution without padding takes."""
EDGES: tuple[Literal["fine", "coarse"], ...] = ("fine", "coarse")


@dataclass(frozen=True)
class Tiling:
    """A surface in two roundings, and what is added where the coarser one pads.

    Attributes:
        sides: Names of the dimensions that are multiplied: two, or one twice where images are square.
        batch: Name of the dimension that everything is proportional to, if it varies.
        fine: What sides are rounded up to multiples of, or down if it is negative.
        coarse: The same for the other surface; as `fine` for none.
        edges: Which surface is there once more where the coarse rounding pads a side, as a copy with or without edges.
        stem: What sides are rounded down to multiples of before all else: pixels that no patch takes.
    """

    sides: tuple[str, ...]
    batch: str | None
    fine: int
    coarse: int
    edges: Literal["fine", "coarse"] | None = None
    stem: int = 1

    def features(self, dims: Mapping[str, int]) -> list[float]:
        """The features of a size.

        Example:
            >>> tiling = Tiling(("h", "w"), None, 2, 4, "fine")
            >>> tiling.features({"h": 6, "w": 8}), tiling.features({"h": 8, "w": 8})
            ([1.0, 48.0, 64.0, 48.0], [1.0, 64.0, 64.0, 0.0])
        """
        fine, coarse = self._surface(dims, self.fine), self._surface(dims, self.coarse)
        found = [1.0, fine]
        if self.coarse != self.fine:
            found.append(coarse)
        if self.edges is not None:
            found.append((fine if self.edges == "fine" else coarse) * self.pads(dims))
        return found if self.batch is None else [1.0, *(dims[self.batch] * each for each in found)]

    def design(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.float64]:
        """The features of some sizes, shape (sizes, features)."""
        return np.array([self.features(dims) for dims in sizes])

    def pads(self, dims: Mapping[str, int]) -> bool:
        """Whether the coarse rounding adds anything to the fine one."""
        return any(_rounded(side, self.fine) % self.coarse for side in self._sides_of(dims))

    def counts(self, dims: Mapping[str, int]) -> set[int]:
        """How many multiples of the coarse rounding the sides take.

        Example:
            >>> Tiling(("h", "w"), None, 224, 224).counts({"h": 227, "w": 449})
            {2, 3}
        """
        return {_rounded(side, self.coarse) // self.coarse for side in self._sides_of(dims)}

    def _surface(self, dims: Mapping[str, int], multiple: int) -> float:
        return float(prod(_rounded(side, multiple) for side in self._sides_of(dims)))

    def _sides_of(self, dims: Mapping[str, int]) -> list[int]:
        return [dims[name] // self.stem * self.stem for name in self.sides]


def _rounded(side: int, multiple: int) -> int:
    """Up to a multiple, or down if it is negative."""
    return -(-side // multiple) * multiple


def tilings(sides: tuple[str, ...], batch: str | None, stem: int = 1) -> Iterator[list[Tiling]]:
    """Candidates, simplest first: those of each list have equally many features."""
    every = (*MULTIPLES, *(-multiple for multiple in MULTIPLES[1:]))
    singles = [Tiling(sides, batch, each, each) for each in every]
    if stem > 1:
        every = tuple(multiple for multiple in MULTIPLES if multiple > stem and multiple % stem == 0)
        singles += [Tiling(sides, batch, each, each, stem=stem) for each in every]
        every = (stem, *every)
    yield singles
    pairs = [(fine, coarse) for coarse in every for fine in every if abs(fine) < abs(coarse) and coarse % fine == 0]
    yield [Tiling(sides, batch, fine, coarse, stem=stem) for fine, coarse in pairs]
    yield [Tiling(sides, batch, fine, coarse, edges, stem) for fine, coarse in pairs for edges in EDGES]
