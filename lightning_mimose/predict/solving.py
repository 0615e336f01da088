"""Solving: least squares in hundreds of bases at once, and what of each the sizes at hand do check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_mimose.predict.tilings import Surfaces, Tiling, designs

Floats = NDArray[np.float64]

SPARE = 1.5
"""How many different sizes more than there are features have to be seen, more or less: two."""
PAIRS = 1 << 20
"""Numbers that are compared at once to find sizes that are alike."""
MISSED = 1e-4
"""Share of a column's largest value by which coefficients that are not negative may miss it."""
LEVERAGE = 1e-6
"""What a size must leave to the others for them to check it: else a feature rests on it alone."""


def described(design: Floats, values: Floats) -> Floats:
    """What of some columns least squares by a design describe, shape (sizes, columns)."""
    orthogonal = np.linalg.qr(design)[0]
    found: Floats = orthogonal @ (orthogonal.T @ values)
    return found


def unseen_residuals(designs: Floats, values: Floats) -> Floats:
    """What least squares by all other sizes would miss each size by, as far as others check it.

    Args:
        designs: Shape (..., sizes, features).
        values: Shape (sizes, columns).

    Returns:
        Shape (..., sizes, columns).

    Example:
        >>> line = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
        >>> unseen_residuals(line, np.array([[0.0], [1.0], [5.0]]))[:, 0].round(6).tolist()
        [3.0, -1.5, 3.0]
    """
    orthogonal = np.linalg.qr(designs)[0]
    left = values - orthogonal @ (orthogonal.swapaxes(-1, -2) @ values)
    free = np.maximum(1 - np.einsum("...ij,...ij->...i", orthogonal, orthogonal), LEVERAGE)
    residuals: Floats = left / free[..., None]
    return residuals


def monotone(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares per column; non-negative (so that extrapolation is monotone) where that fits as well."""
    inverse = np.linalg.pinv(design)
    free: NDArray[Any] = inverse @ values
    scale = np.abs(values).max(axis=0)
    # Coefficients differ by no more than what the values may be missed by allows: where one is further below zero than
    # that, no other ones fit as well, and need not be looked for.
    close = np.abs(design @ free - values).max(axis=0) + MISSED * scale
    reach = np.abs(inverse).sum(axis=1)[:, None] * close
    negative = np.flatnonzero((free < -1e-9 * scale).any(axis=0) & (free >= -reach).all(axis=0))
    if negative.size:
        # What scikit-learn's LinearRegression(positive=True) calls: that one takes a quarter of a second to import, and
        # five times as long, in the middle of training. Units that are alike have columns that are equal.
        targets, which = np.unique(values[:, negative], axis=1, return_inverse=True)
        bound = np.array([nnls(design, target)[0] for target in targets.T]).T[:, which.reshape(-1)]
        worse = np.abs(design @ bound - values[:, negative]).max(axis=0) > MISSED * scale[negative]
        free[:, negative] = np.where(worse, free[:, negative], bound)
    return free


class Design(Protocol):
    """Features of sizes."""

    def design(self, sizes: Sequence[Mapping[str, int]]) -> Floats:
        """Shape (sizes, features)."""


@dataclass(frozen=True, eq=False)
class Solved:
    """Least squares in one basis.

    Attributes:
        basis: It.
        design: The features of all sizes, each at most 1, shape (sizes, features).
        scale: What they were divided by, shape (features,).
        orthogonal: Shape (sizes, features); spans what it can describe.
        inverse: Shape (features, sizes); from values to coefficients.
        free: Shape (sizes,); what each size, and those like it, leave to the others.
        checked: Whether every feature rests on sizes that others check.
    """

    basis: Any
    design: Floats
    scale: Floats
    orthogonal: Floats
    inverse: Floats
    free: Floats
    checked: bool

    @cached_property
    def unchecked(self) -> Floats | None:
        """Features along these directions rest on sizes that nothing checks, shape (features, directions).

        None where nothing is checked. Only asked for of a basis that describes something: it takes long.
        """
        if self.checked:
            return np.zeros((len(self.scale), 0))
        found = _unchecked(self.design)
        return None if found is None else found / self.scale[:, None]

    def residuals(self, targets: Floats) -> Floats:
        """What it does not describe."""
        found: Floats = targets - self.orthogonal @ (self.orthogonal.T @ targets)
        return found

    def describes(self, targets: Floats, close: Floats) -> NDArray[np.bool_]:
        """Which columns it misses by no more than they may be missed by."""
        spanned = self.orthogonal.T @ targets
        likely: NDArray[np.bool_] = np.abs(targets[0] - self.orthogonal[0] @ spanned) <= close
        if likely.any():  # as for few bases, and few columns
            missed = np.abs(targets[:, likely] - self.orthogonal @ spanned[:, likely])
            likely[likely] = (missed <= close[likely]).all(axis=0)
        return likely


def all_solved(bases: Sequence[Design], surfaces: Surfaces) -> list[Solved]:
    """Those that the sizes determine, with two to spare; all of them have equally many features."""
    if not bases:
        return []
    _, sizes, features = designs_of(bases[:1], surfaces).shape
    if sizes < features + 2:
        return []
    every = designs_of(bases, surfaces)
    scales = np.abs(every).max(axis=1)
    whole = np.flatnonzero(scales.all(axis=1))
    scales, rows = scales[whole], every[whole] / scales[whole, None]
    # All at once: there are hundreds, and training waits for them.
    orthogonals, extents, rights = np.linalg.svd(rows, full_matrices=False)
    determined = np.flatnonzero(extents[:, -1] > extents[:, 0] * sizes * np.finfo(np.float64).eps)
    whole, scales, rows = whole[determined], scales[determined], rows[determined]
    orthogonals, extents, rights = orthogonals[determined], extents[determined], rights[determined]
    likes = likes_of(rows)
    frees = 1 - likes * (orthogonals**2).sum(axis=2)
    spares = (1 / likes).sum(axis=1) > features + SPARE
    # As nearly always, and what `_unchecked` would say then.
    checked = (frees.min(axis=1) > LEVERAGE) & (extents[:, -1] > LEVERAGE * extents[:, 0])
    inverses = (rights.transpose(0, 2, 1) / extents[:, None]) @ orthogonals.transpose(0, 2, 1) / scales[:, :, None]
    return [
        Solved(bases[whole[i]], rows[i], scales[i], orthogonals[i], inverses[i], frees[i], bool(checked[i]))
        for i in np.flatnonzero(spares | ~checked).tolist()
    ]


def designs_of(bases: Sequence[Design], surfaces: Surfaces) -> Floats:
    """The features of some sizes in bases that have equally many, shape (bases, sizes, features)."""
    tilings = [basis for basis in bases if isinstance(basis, Tiling)]
    if len(tilings) == len(bases):
        return designs(tilings, surfaces)
    return np.array([basis.design(surfaces.sizes) for basis in bases])


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
