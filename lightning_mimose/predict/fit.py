"""A fit: every column of a step's structure as a polynomial in the dimensions that vary, checked on sizes left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_mimose.predict.features import Basis, Relation, bases, varying_dims
from lightning_mimose.predict.local import LocalFit, fit_locally
from lightning_mimose.predict.solving import LEVERAGE, distinct_rows
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.tilings import MULTIPLES

LEAN_ERROR = 1e-3
"""Share of the step's peak by which that of a grade of lean saves may be mispredicted for plans to use it."""
EXACT_ERROR = 1e-4
"""An error of this share is rounding: the basis is the right one."""
BETTER = 0.75
"""What the error of a basis must be of a simpler one's to be chosen in its place: less is chance, of so many."""
FEW_ODD = 2
"""Sizes that are no multiples of a stride or a window, beside others that are, of which as many tell nothing sure."""
GOOD_ERROR = 0.005
"""Share of the step's peak by which a left-out size may be mispredicted for a fit to be trusted at once."""
USABLE_ERROR = 0.05
"""The same, once there are enough sizes: the error is then added to every prediction as a margin."""
FEWEST_LARGER = 5
"""Sizes that have to be left where the smallest are left out; and half of them."""
MANY_SIZES = 8
"""Sizes after which a fit of every column in a basis of its own is believed although it is not exact."""

Value: TypeAlias = tuple[str, int]
"""A dimension and what it is."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A polynomial of every column, and what is known about how far it holds.

    Attributes:
        basis: Its features.
        coefficients: Shape (features, columns).
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
        grains: Where these are two (sides of images, as a rule): what they are multiples of in all sizes that were
            seen, or in all but a few.
        without: Values of sides that were left out, and with them all that are as small: kernels work in another way
            there.
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
    grains: tuple[int, ...] = ()
    without: tuple[Value, ...] = ()

    def values_at(self, dims: Mapping[str, int]) -> NDArray[np.float64]:
        """What is predicted for some size, shape (columns,)."""
        values = self.basis.features(dims) @ self.coefficients if self.local is None else self.local.values_at(dims)
        return np.maximum(values, 0.0)

    def error_at(self, dims: Mapping[str, int], resident_bytes: int) -> float:
        """The error to expect at some size, as a share of its peak.

        Sizes that were all rounded alike tell nothing of others. If they were whole multiples (of a stride, a window),
        it is infinite where one is not. Where the basis rounds up, it grows with the leverage, as if all of it were due
        to a wrong basis.
        """
        if any(dims[name] % grain for name in self.sides for grain in self.grains):
            return float("inf")
        if self.local is not None:
            return max(self.error, self.local.error_at(dims, resident_bytes))
        if not self.basis.rounds:
            return self.error
        features = self.basis.features(dims)
        return self.error * max(1.0, float(features @ self.inverse @ features) / self.leverage)

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


def best_fit(
    sizes: Sequence[Mapping[str, int]],
    values: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
    without: Sequence[Value] = (),
) -> Fit:
    """The simplest basis that predicts every size from the others, or else the one that does so best.

    Kernels choose another way where a side gets small (a convolution over maps of 2 x 2 elements, on some processors),
    which no polynomial describes together with the rest. So where what is left is described exactly without the least
    value of one side after another (or usably, and all together not), the fit is one of the larger sizes, and holds for
    no smaller ones.

    Args:
        sizes: Named dimensions.
        values: Shape (sizes, columns).
        structure: What the columns are.
        resident_bytes: What is resident besides activations: errors are shares of a step's whole peak.
        without: What had to be left out of fewer sizes: that is tried first.
    """
    fewest = max(FEWEST_LARGER, (len(sizes) + 1) // 2)

    def larger(kept: Sequence[int], name: str, least: int) -> list[int]:
        return [i for i in kept if sizes[i].get(name, 0) > least]

    def fit_of(kept: Sequence[int]) -> Fit:
        return _fit_of([sizes[i] for i in kept], values[list(kept)], structure, resident_bytes)

    kept = list(range(len(sizes)))
    for name, least in without:
        kept = larger(kept, name, least)
    if fewest <= len(kept) < len(sizes):
        best = fit_of(kept)
        if best.error <= EXACT_ERROR:
            return replace(best, without=tuple(without))
    kept = list(range(len(sizes)))
    whole = best = fit_of(kept)
    if whole.error <= GOOD_ERROR:
        return whole
    left = set(whole.sides)
    while best.error > EXACT_ERROR:
        tried: list[tuple[Fit, Value, list[int]]] = []
        for name in sorted(left):
            least = min(sizes[i][name] for i in kept)
            rest = larger(kept, name, least)
            if len(rest) >= fewest:
                tried.append((fit_of(rest), (name, least), rest))
        found, out, rest = min(tried, key=lambda each: each[0].error, default=(whole, ("", 0), kept))
        if found.error >= BETTER * best.error:
            break
        left.discard(out[0])
        best, kept = replace(found, without=(*best.without, out)), rest
    # One that is no more than usable has the least error of several; it is better than none.
    return best if best.error <= EXACT_ERROR or whole.error > USABLE_ERROR >= best.error else whole


def _fit_of(
    sizes: Sequence[Mapping[str, int]], values: NDArray[np.float64], structure: Structure, resident_bytes: int
) -> Fit:
    dims, relations = varying_dims(sizes)
    candidates = bases(dims, sizes)
    best, basis, truth = _UNCHECKED, candidates[0], structure.summary(values)
    for candidate in candidates:
        design = candidate.design(sizes)
        check = _left_out(design, values, truth, structure, resident_bytes, rounds=candidate.rounds)
        if check.error < BETTER * best.error:
            best, basis = check, candidate
        if check.error <= EXACT_ERROR:
            break
    local = fit_locally(sizes, values, structure, dims, basis) if best.error > EXACT_ERROR else None
    if local is not None:
        check = _Check(_error(local.left_out, truth, structure, resident_bytes), range(len(sizes)), local.left_out)
        sure = check.error <= EXACT_ERROR or len(sizes) >= MANY_SIZES
        if sure and check.error < BETTER * best.error:
            best = check
        else:
            local = None
    design = basis.design(sizes)
    inverse = np.linalg.pinv(design.T @ design)
    names = sizes[0].keys()
    sides = tuple(name for name in dims if name != "batch")
    return Fit(
        basis,
        _solve(design, values),
        best.error,
        len(sizes),
        {name: min(size[name] for size in sizes) for name in names},
        {name: max(size[name] for size in sizes) for name in names},
        _doubtful(best, values, truth, structure, resident_bytes),
        relations,
        inverse,
        float(np.einsum("ij,jk,ik->i", design, inverse, design).max()),
        local,
        sides,
        _grains(sizes, sides) if len(sides) == 2 else (),
    )


def _grains(sizes: Sequence[Mapping[str, int]], sides: Sequence[str]) -> tuple[int, ...]:
    """What the sides of all sizes are multiples of, or of all but a few."""
    odd = {grain: sum(any(size[name] % grain for name in sides) for size in sizes) for grain in MULTIPLES}
    return tuple(grain for grain, count in odd.items() if count <= FEW_ODD)


class _Check(NamedTuple):
    """What came of predicting sizes from the others.

    Attributes:
        error: The largest error, as a share of the size's peak.
        checked: Indices of the sizes that could be predicted.
        predicted: Shape (checked, columns).
    """

    error: float
    checked: Sequence[int]
    predicted: NDArray[np.float64]


_UNCHECKED = _Check(float("inf"), (), np.zeros((0, 0)))


def _left_out(
    design: NDArray[np.float64],
    values: NDArray[np.float64],
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
    *,
    rounds: bool,
) -> _Check:
    """Predict each size from the others; `truth` is the summary of the values."""
    # Two more sizes than unknowns: one to check the fit, one more because the checks share the others.
    features = design.shape[1]
    if len(design) < features + (1 if features == 2 else 2):
        return _UNCHECKED
    distinct, group = distinct_rows(design)
    few = features == 2 and len(distinct) == 3  # three sizes on one line, if they are on it exactly
    if len(distinct) < features + 2 and not few:
        return _UNCHECKED
    # Of both: rounding can make a design look determined that is not.
    if any(np.linalg.matrix_rank(points) < features for points in (distinct, design)):
        return _UNCHECKED
    # What a fit without some rows misses them by follows from the fit with them (its hat matrix), so one is enough.
    orthogonal = np.linalg.qr(design)[0]
    hat = orthogonal @ orthogonal.T
    residuals = values - orthogonal @ (orthogonal.T @ values)
    free = 1 - np.diagonal(hat)
    alone = np.flatnonzero((np.bincount(group)[group] == 1) & (free > LEVERAGE))
    checked, missing, groups = alone.tolist(), [residuals[alone] / free[alone, None]], len(alone)
    for left_out in sorted(set(group) - set(group[alone])):
        held, rest = np.flatnonzero(group == left_out), group != left_out
        between = np.eye(len(held)) - hat[np.ix_(held, held)]
        if np.linalg.eigvalsh(between)[0] > LEVERAGE:
            missing.append(np.linalg.solve(between, residuals[held]))
        elif np.linalg.matrix_rank(design[rest]) == features:
            missing.append(values[held] - design[held] @ np.linalg.lstsq(design[rest], values[rest], rcond=None)[0])
        else:
            continue
        checked.extend(held.tolist())
        groups += 1
    if groups < 2:
        return _UNCHECKED
    predicted = values[checked] - np.concatenate(missing)
    error = _error(predicted, truth[checked], structure, resident_bytes)
    # A size without which the fit is undetermined cannot be checked; only an exact fit is believed regardless, and only
    # where nothing is rounded: else those sizes may be all that tells a rounding from another.
    believed = (len(checked) == len(design) and not few) or (error < EXACT_ERROR and not rounds)
    return _Check(error, checked, predicted) if believed else _UNCHECKED


def _error(
    predicted: NDArray[np.float64], truth: NDArray[np.float64], structure: Structure, resident_bytes: int
) -> float:
    """By how much the summary of some sizes is missed at most, as a share of their peaks."""
    missed = np.abs(structure.summary(predicted) - truth)
    whole = truth[:, :1] + resident_bytes
    return float((np.concatenate([missed[:, :2], missed[:, 2:].sum(axis=1, keepdims=True)], axis=1) / whole).max())


def _doubtful(
    check: _Check,
    values: NDArray[np.float64],
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
) -> frozenset[str]:
    """Grades of lean saves whose peaks were missed by more than the rest; only of the fit chosen: it takes long."""
    if not structure.grades or not check.checked:
        return frozenset(structure.grades)
    rows = check.checked
    missed = np.abs(structure.lean_peaks(check.predicted) - structure.lean_peaks(values[rows]))
    errors = (missed / (truth[rows, :1] + resident_bytes)).max(axis=0)
    return frozenset(g for g, e in zip(structure.grades, errors, strict=True) if e > max(LEAN_ERROR, check.error))


def _solve(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares per column; non-negative (so that extrapolation is monotone) where that fits as well."""
    free: NDArray[Any] = np.linalg.lstsq(design, values, rcond=None)[0]
    scale = np.abs(values).max(axis=0)
    negative = np.flatnonzero((free < -1e-9 * scale).any(axis=0))
    if negative.size:
        # What scikit-learn's LinearRegression(positive=True) calls: that one takes a quarter of a second to import, and
        # five times as long, in the middle of training. Units that are alike have columns that are equal.
        targets, which = np.unique(values[:, negative], axis=1, return_inverse=True)
        bound = np.array([nnls(design, target)[0] for target in targets.T]).T[:, which.reshape(-1)]
        worse = np.abs(design @ bound - values[:, negative]).max(axis=0) > 1e-4 * scale[negative]
        free[:, negative] = np.where(worse, free[:, negative], bound)
    return free
