"""A fit: every column of a step's structure as a polynomial in the dimensions that vary, checked on sizes left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_mimose.predict.checking import EXACT_ERROR, UNCHECKED, Check, doubtful, largest_error, left_out
from lightning_mimose.predict.features import BLOCKS, Basis, Relation, bases, may_be_surfaces, varying_dims
from lightning_mimose.predict.local import LocalFit, fit_locally
from lightning_mimose.predict.maxima import Expansion, Measured
from lightning_mimose.predict.shortfalls import shortfalls
from lightning_mimose.predict.solving import LEVERAGE
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.tilings import MULTIPLES

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
COLUMN_SHARE = 1e-6
"""Share of a column's largest value by which a basis that describes it may miss it."""
MISSED = 1e-4
"""Share of a column's largest value by which coefficients that are not negative may miss it."""

Value: TypeAlias = tuple[str, int]
"""A dimension and what it is."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A polynomial of every column, and what is known about how far it holds.

    Attributes:
        basis: Its features.
        coefficients: Shape (features, columns and more, see `expansion`); of none where `local` describes them.
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
        grains: What they are multiples of in all sizes that were seen, or in all but a few: of lengths of texts the
            blocks that attention may pad to.
        without: Values of sides that were left out, and with them all that are as small: kernels work in another way
            there.
        resting: Shape (features, directions); along these its features rest on single sizes that nothing checks.
        short: What is added to every column so that no moment of any of the sizes is predicted lower than what was seen
            by more than the error; 0 for none.
        expansion: What the columns of `coefficients` are.
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
    grains: tuple[Value, ...] = ()
    without: tuple[Value, ...] = ()
    resting: NDArray[np.float64] | None = None
    short: NDArray[np.float64] | float = 0.0
    expansion: Expansion | None = None

    def values_at(self, dims: Mapping[str, int]) -> NDArray[np.float64]:
        """What is predicted for some size, shape (columns,)."""
        if self.local is not None:
            values = self.local.values_at(dims)
        else:
            values = self.basis.features(dims) @ self.coefficients
            values = values if self.expansion is None else self.expansion.collapsed(values)
        return np.maximum(values, 0.0) + self.short

    def error_at(self, dims: Mapping[str, int], resident_bytes: int) -> float:
        """The error to expect at some size, as a share of its peak.

        Sizes that were all rounded alike tell nothing of others: if they were whole multiples (of a stride, a window),
        it is infinite where one is not. It is infinite, too, where a size has features that rest on a single other one.
        Where the basis rounds up, it grows with the leverage, as if all of it were due to a wrong basis.
        """
        if any(dims[name] % grain for name, grain in self.grains):
            return float("inf")
        if self.local is not None:
            return max(self.error, self.local.error_at(dims, resident_bytes))
        features = self.basis.features(dims)
        if self.resting is not None and (np.abs(features @ self.resting) > LEVERAGE).any():
            return float("inf")
        if not self.basis.rounds:
            return self.error
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
    measured: Sequence[Measured],
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
        measured: What was measured of each.
        structure: What the columns are.
        resident_bytes: What is resident besides activations: errors are shares of a step's whole peak.
        without: What had to be left out of fewer sizes: that is tried first.
    """
    everything = tuple(range(len(sizes)))
    fewest = max(FEWEST_LARGER, (len(sizes) + 1) // 2)

    @cache
    def outlined(kept: tuple[int, ...]) -> _Choice:
        return _outlined([sizes[i] for i in kept], [measured[i] for i in kept], structure, resident_bytes)

    @cache
    def detailed(kept: tuple[int, ...]) -> _Choice:
        return outlined(kept).detailed()

    def larger(kept: tuple[int, ...], name: str, least: int) -> tuple[int, ...]:
        return tuple(i for i in kept if sizes[i].get(name, 0) > least)

    def without_smallest(choose: Callable[[tuple[int, ...]], _Choice]) -> tuple[_Choice, list[Value]]:
        best, kept, out = choose(everything), everything, list[Value]()
        left = {name for name in best.dims if name != "batch"}
        while best.check.error > EXACT_ERROR:
            found: list[tuple[_Choice, Value, tuple[int, ...]]] = []
            for name in sorted(left):
                least = min(sizes[i][name] for i in kept)
                rest = larger(kept, name, least)
                if len(rest) >= fewest:
                    found.append((choose(rest), (name, least), rest))
            if not found:
                break
            choice, value, rest = min(found, key=lambda each: each[0].rank)
            if choice.check.error >= BETTER * best.check.error:
                break
            left.discard(value[0])
            best, kept, out = choice, rest, [*out, value]
        return best, out

    kept = everything
    for name, least in without:
        kept = larger(kept, name, least)
    if fewest <= len(kept) < len(sizes) and detailed(kept).check.error <= EXACT_ERROR:
        return detailed(kept).fit(without)
    # Bases of single columns take longest to find: where one of all columns does, they are not looked for.
    if outlined(everything).check.error > GOOD_ERROR:
        best, out = without_smallest(outlined)
        if best.check.error <= EXACT_ERROR:
            return best.fit(out)
    whole = detailed(everything)
    if whole.check.error <= GOOD_ERROR:
        return whole.fit()
    best, out = without_smallest(detailed)
    # One that is no more than usable has the least error of several; it is better than none.
    if best.check.error <= EXACT_ERROR or whole.check.error > USABLE_ERROR >= best.check.error:
        return best.fit(out)
    return whole.fit()


@dataclass(frozen=True)
class _Choice:
    """What describes some sizes best; to make a fit of it takes longer than to compare it with others.

    Attributes:
        sizes: The sizes.
        expansion: What was measured of them.
        structure: What the columns are.
        resident_bytes: See `best_fit`.
        dims: The dimensions that vary and do not follow from others.
        relations: How the others follow.
        basis: The basis.
        local: What describes every column in a basis of its own, where that is better.
        check: What came of predicting sizes from the others.
    """

    sizes: Sequence[Mapping[str, int]]
    expansion: Expansion
    structure: Structure
    resident_bytes: int
    dims: tuple[str, ...]
    relations: tuple[Relation, ...]
    basis: Basis
    local: LocalFit | None
    check: Check

    @property
    def rank(self) -> tuple[float, bool]:
        """The less the better: of those that are exact, one that rests on no single size."""
        return max(self.check.error, EXACT_ERROR), bool(self.check.resting.size)

    @property
    def misses_nothing(self) -> bool:
        """Whether every column follows the basis, in all of the sizes that it was found from."""
        orthogonal, values = np.linalg.qr(self.basis.design(self.sizes))[0], self.expansion.values
        missed = np.abs(values - orthogonal @ (orthogonal.T @ values))
        return bool((missed <= np.maximum(0.5, COLUMN_SHARE * np.abs(values).max(axis=0))).all())

    def detailed(self) -> _Choice:
        """With a basis for every column, where that is better."""
        if self.check.error <= EXACT_ERROR or not may_be_surfaces(self.sizes):
            return self
        values = self.expansion.plain
        truth = self.structure.summary(values)

        def error_of(left_out: NDArray[np.float64]) -> float:
            return largest_error(left_out, truth, self.structure, self.resident_bytes)

        def will_do(left_out: NDArray[np.float64]) -> bool:
            error = error_of(left_out)
            return error < BETTER * self.check.error and (error <= EXACT_ERROR or len(self.sizes) >= MANY_SIZES)

        local = fit_locally(self.sizes, values, self.structure, self.dims, self.basis, will_do)
        if local is None:
            return self
        error = error_of(local.left_out)
        check = Check(error, range(len(self.sizes)), local.left_out, np.zeros((0, 0)))
        return replace(self, local=local, check=check)

    def fit(self, without: Sequence[Value] = ()) -> Fit:
        """The fit, if these values of sides were left out of its sizes."""
        design = self.basis.design(self.sizes)
        inverse = np.linalg.pinv(design.T @ design)
        solved, short = np.zeros((design.shape[1], 0)), np.zeros(self.structure.columns)
        expansion, values = self.expansion, self.expansion.plain
        if self.local is None:
            solved = _solve(design, expansion.values)
            peaks = self.structure.summary(values)[:, 0] + self.resident_bytes
            if isfinite(self.check.error):
                missing = values - expansion.collapsed(design @ solved)
                short = shortfalls(self.structure, missing, self.check.error * peaks)
        names = self.sizes[0].keys()
        sides = tuple(name for name in self.dims if name != "batch")
        return Fit(
            self.basis,
            solved,
            self.check.error,
            len(self.sizes),
            {name: min(size[name] for size in self.sizes) for name in names},
            {name: max(size[name] for size in self.sizes) for name in names},
            doubtful(self.check, values, self.structure, self.resident_bytes),
            self.relations,
            inverse,
            float(np.einsum("ij,jk,ik->i", design, inverse, design).max()),
            self.local,
            sides,
            _grains(self.sizes, sides),
            tuple(without),
            self.check.resting if self.check.resting.size else None,
            short,
            expansion if self.local is None else None,
        )


def _outlined(
    sizes: Sequence[Mapping[str, int]], measured: Sequence[Measured], structure: Structure, resident_bytes: int
) -> _Choice:
    """What describes some sizes best: every column as a polynomial, or the local maxima of those that have several."""
    choice = _of_basis(sizes, Expansion(measured), structure, resident_bytes)
    if not isfinite(choice.check.error) or choice.misses_nothing:
        return choice
    expansion = Expansion(measured, expands=True)
    if not expansion:
        return choice
    other = _of_basis(sizes, expansion, structure, resident_bytes)
    # Exact ones are told apart by no whole peak: a plan may have its peak at any moment.
    return other if other.check.error <= max(EXACT_ERROR, BETTER * choice.check.error) else choice


def _of_basis(
    sizes: Sequence[Mapping[str, int]], expansion: Expansion, structure: Structure, resident_bytes: int
) -> _Choice:
    """The basis that describes all columns best; one that rests on single sizes only where no other one is good."""
    dims, relations = varying_dims(sizes)
    candidates = bases(dims, sizes)
    best, basis, truth = UNCHECKED, candidates[0], structure.summary(expansion.plain)
    partial: tuple[Check, Basis] | None = None
    for candidate in candidates:
        design = candidate.design(sizes)
        check = left_out(design, expansion, truth, structure, resident_bytes, rounds=candidate.rounds)
        if check.resting.size:
            partial = partial or (check, candidate)
            continue
        if check.error < BETTER * best.error:
            best, basis = check, candidate
        if check.error <= EXACT_ERROR:
            break
    if partial is not None and best.error > GOOD_ERROR:
        best, basis = partial
    return _Choice(sizes, expansion, structure, resident_bytes, dims, relations, basis, None, best)


def _grains(sizes: Sequence[Mapping[str, int]], sides: Sequence[str]) -> tuple[Value, ...]:
    """Sides, and what those of all sizes are multiples of: each of whole blocks, or all of them but for a few sizes."""
    surfaces = len(sides) == 2 or may_be_surfaces(sizes)
    odd = {
        grain: sum(any(size[name] % grain for name in sides) for size in sizes)
        for grain in (MULTIPLES if surfaces else BLOCKS)
    }
    alike = [grain for grain, count in odd.items() if count <= (FEW_ODD if surfaces else 0)]
    # Where one of two lengths is padded, all steps without padding have whole blocks of it, and of the other anything.
    alone = [(side, block) for side in sides for block in BLOCKS if not any(size[side] % block for size in sizes)]
    return tuple(dict.fromkeys([*((side, grain) for side in sides for grain in alike), *alone]))


def _solve(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
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
