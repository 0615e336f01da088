"""Solving: least squares in hundreds of bases at once, and what of each the sizes at hand do check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.tilings import Surfaces, Tiling

Floats = NDArray[np.float64]

SPARE = 1.5
"""How many different sizes more than there are features have to be seen, more or less: two."""
PAIRS = 1 << 20
"""Numbers that are compared at once to find sizes that are alike."""
LEVERAGE = 1e-6
"""What a size must leave to the others for them to check it: else a feature rests on it alone."""


class Design(Protocol):
    """Features of sizes."""

    def design(self, sizes: Sequence[Mapping[str, int]]) -> Floats:
        """Shape (sizes, features)."""


@dataclass(frozen=True, eq=False)
class Solved:
    """Least squares in one basis.

    Attributes:
        basis: It.
        orthogonal: Shape (sizes, features); spans what it can describe.
        inverse: Shape (features, sizes); from values to coefficients.
        free: Shape (sizes,); what each size, and those like it, leave to the others.
        unchecked: Shape (features, directions); features along these rest on sizes that nothing checks.
    """

    basis: Any
    orthogonal: Floats
    inverse: Floats
    free: Floats
    unchecked: Floats

    def residuals(self, targets: Floats) -> Floats:
        """What it does not describe."""
        found: Floats = targets - self.orthogonal @ (self.orthogonal.T @ targets)
        return found


def all_solved(bases: Sequence[Design], surfaces: Surfaces) -> list[Solved]:
    """Those that the sizes determine, with two to spare; all of them have equally many features."""
    designs = np.stack(list(designs_of(bases, surfaces)))
    _, sizes, features = designs.shape
    if sizes < features + 2:
        return []
    scales = np.abs(designs).max(axis=1)
    whole = np.flatnonzero(scales.all(axis=1))
    scales, designs = scales[whole], designs[whole] / scales[whole, None]
    # All at once: there are hundreds, and training waits for them.
    orthogonals, extents, rights = np.linalg.svd(designs, full_matrices=False)
    determined = np.flatnonzero(extents[:, -1] > extents[:, 0] * sizes * np.finfo(np.float64).eps)
    whole, scales, designs = whole[determined], scales[determined], designs[determined]
    orthogonals, extents, rights = orthogonals[determined], extents[determined], rights[determined]
    likes = likes_of(designs)
    frees = 1 - likes * (orthogonals**2).sum(axis=2)
    spares = (1 / likes).sum(axis=1) > features + SPARE
    # As nearly always, and what it would say then.
    checked = (frees.min(axis=1) > LEVERAGE) & (extents[:, -1] > LEVERAGE * extents[:, 0])
    inverses = (rights.transpose(0, 2, 1) / extents[:, None]) @ orthogonals.transpose(0, 2, 1) / scales[:, :, None]
    found = []
    for i in np.flatnonzero(spares | ~checked).tolist():
        unchecked = np.zeros((features, 0)) if checked[i] else _unchecked(designs[i])
        if unchecked is not None:
            basis = bases[whole[i]]
            found.append(Solved(basis, orthogonals[i], inverses[i], frees[i], unchecked / scales[i, :, None]))
    return found


def designs_of(bases: Iterable[Design], surfaces: Surfaces) -> Iterator[Floats]:
    """The features of some sizes in many bases."""
    for basis in bases:
        yield basis.design_in(surfaces) if isinstance(basis, Tiling) else basis.design(surfaces.sizes)


def distinct_rows(design: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """The features that differ, and of each size which of them it has.

    Sizes that a basis cannot tell apart (a portrait and its landscape) must not vouch for each other.
    """
    distinct, group = np.unique(design.round(9), axis=0, return_inverse=True)
    return distinct, group.reshape(-1)


def likes_of(designs: Floats) -> NDArray[np.intp]:
    """How many sizes have the same features as each, shape (bases, sizes); see `distinct_rows`."""
    rows = designs.round(9)
    return np.concatenate([(each[:, :, None] == each[:, None]).all(axis=3).sum(axis=2) for each in _few(rows)])


def _few(rows: Floats) -> list[Floats]:
    """So many at a time that pairs of sizes take little memory."""
    sizes = rows.shape[1]
    return np.array_split(rows, 1 + rows.size * sizes // PAIRS)


def _unchecked(design: Floats) -> Floats | None:
    """What no size checks, because it rests on one alone: shape (features, directions); None if nothing is checked."""
    rows = design
    while len(rows):
        left, size, right = np.linalg.svd(rows, full_matrices=True)
        rank = int((size > LEVERAGE * size[0]).sum())
        like = likes_of(rows[None])[0]
        alone = like * (left[:, :rank] ** 2).sum(axis=1) >= 1 - LEVERAGE
        if not alone.any():
            return right[rank:].T if (1 / like).sum() > rank + SPARE else None
        rows = rows[~alone]
    return None
