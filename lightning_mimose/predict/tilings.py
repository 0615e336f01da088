"""Tilings: surfaces of images whose sides are rounded to strides, patches or whole windows, level by level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    def design(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.float64]:
        """The features of some sizes, shape (sizes, features).

        Example:
            >>> Tiling(("h", "w"), None, 2, 4, "fine").design([{"h": 6, "w": 8}, {"h": 8, "w": 8}]).tolist()
            [[1.0, 48.0, 64.0, 48.0], [1.0, 64.0, 64.0, 0.0]]
        """
        values = self._sides_of(sizes)
        surface = _rounded(values, self.fine).prod(axis=1)
        features = [np.ones(len(values)), surface]
        if self.coarse != self.fine:
            features.append(_rounded(values, self.coarse).prod(axis=1))
        if self.edges is not None:
            features.append(features[1 if self.edges == "fine" else 2] * self.pads(sizes))
        block = np.stack(features, axis=1)
        if self.batch is None:
            return block
        rows = np.array([[size[self.batch]] for size in sizes], dtype=np.float64)
        return np.concatenate([np.ones((len(values), 1)), rows * block], axis=1)

    def pads(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.bool_]:
        """Shape (sizes,): whether the coarse rounding adds anything to the fine one."""
        padded: NDArray[np.bool_] = (_rounded(self._sides_of(sizes), self.fine) % self.coarse != 0).any(axis=1)
        return padded

    def _sides_of(self, sizes: Sequence[Mapping[str, int]]) -> NDArray[np.float64]:
        values = np.array([[size[name] for name in self.sides] for size in sizes], dtype=np.float64)
        return _rounded(values, -self.stem)


def _rounded(values: NDArray[np.float64], multiple: int) -> NDArray[np.float64]:
    """Up to a multiple, or down if it is negative: `ceil(v / -m) * -m` is `floor(v / m) * m`."""
    found: NDArray[np.float64] = np.ceil(values / multiple) * multiple
    return found


def count_of(sizes: Sequence[Mapping[str, int]], sides: Sequence[str], stem: int, multiple: int) -> set[int]:
    """How many multiples the sides of some sizes take, rounded up.

    Example:
        >>> count_of([{"h": 227, "w": 448}], ("h", "w"), 4, 224), count_of([{"h": 227, "w": 449}], ("h", "w"), 1, 224)
        ({1, 2}, {2, 3})
    """
    return {-(-(size[name] // stem * stem) // multiple) for size in sizes for name in sides}


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
