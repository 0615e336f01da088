"""A choice: the basis that describes some sizes best, of all columns together or of each for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import (
    EXACT_ERROR,
    GOOD_ERROR,
    UNCHECKED,
    USABLE_ERROR,
    Check,
    block_error,
    doubtful,
    largest_error,
    largest_share,
    left_out,
)
from lightning_mimose.predict.features import (
    BLOCKS,
    Basis,
    Relation,
    bases,
    may_be_surfaces,
    varying_dims,
)
from lightning_mimose.predict.fewer import fewer_bases, may_do_without, together
from lightning_mimose.predict.fit import Blocks, Fit, Value, rounds_alike
from lightning_mimose.predict.local import LocalFit, fit_locally
from lightning_mimose.predict.maxima import Expansion, Measured
from lightning_mimose.predict.padding import chunked_bases, padded_bases, strided_bases
from lightning_mimose.predict.shortfalls import shortfalls
from lightning_mimose.predict.solving import described, monotone, unseen_residuals
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.tilings import MULTIPLES
from lightning_mimose.predict.untold import untold

BETTER = 0.75
"""What the error of a basis must be of a simpler one's to be chosen in its place: less is chance, of so many."""
FEW_ODD = 2
"""Sizes that are no multiples of a stride or a window, beside others that are, of which as many tell nothing sure."""
MANY_SIZES = 8
"""Sizes after which a fit of every column in a basis of its own is believed although it is not exact."""
MOST_LIKELY = 6
"""Of many bases, those that are checked."""
CLOSE_BYTES, COLUMN_SHARE = 64.0, 1e-6
"""By how much a basis that describes a column may miss it, and which share of its largest value."""


@dataclass(frozen=True)
class Choice:
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
    def astray(self) -> NDArray[np.bool_]:
        """Columns that follow the basis by themselves, and not as the largest of their maxima, shape (columns,).

        These have changed places in time, so that one size's was taken for another's.
        """
        design, plain = self.basis.design(self.sizes), self.expansion.plain
        missed = np.abs(plain - self.expansion.collapsed(described(design, self.expansion.values))).max(axis=0)
        alone = np.abs(plain - described(design, plain)).max(axis=0)
        astray: NDArray[np.bool_] = (missed > _close(plain)) & (missed > alone)
        return astray

    def detailed(self) -> Choice:
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
            solved = monotone(design, expansion.values)
            peaks = self.structure.summary(values)[:, 0] + self.resident_bytes
            if isfinite(self.check.error):
                missing = values - np.maximum(expansion.collapsed(design @ solved), 0.0)
                short = shortfalls(self.structure, missing, self.check.error * peaks)
        names = self.sizes[0].keys()
        sides = tuple(name for name in self.dims if name != "batch")
        unused = tuple(name for name in sides if name not in self.basis.dims)
        high = {name: max(size[name] for size in self.sizes) for name in names}
        return Fit(
            self.basis,
            solved,
            self.check.error,
            len(self.sizes),
            {name: min(size[name] for size in self.sizes) for name in names},
            high,
            doubtful(self.check, values, self.structure, self.resident_bytes),
            self.relations,
            inverse,
            float(np.einsum("ij,jk,ik->i", design, inverse, design).max()),
            self.local,
            sides,
            _grains(self.sizes, sides, surfaces=not self.basis.counts),
            tuple(without),
            self.check.resting if self.check.resting.size else None,
            short,
            expansion.collapsed if expansion and self.local is None else None,
            unused,
            max((together(size, unused, high) for size in self.sizes), default=0.0),
            self._likewise(),
            untold(self.basis, self.sizes, design, solved) if self.local is None else (),
        )

    def _likewise(self) -> tuple[Blocks, ...]:
        """Smaller blocks that would have described these sizes as well."""
        if self.local is not None or any(self.basis.shifts) or may_be_surfaces(self.sizes):
            return ()
        granules = (max(each) for each in zip(*self.basis.granules, strict=True))
        return tuple(
            (name, block, other)
            for name, block in zip(self.basis.dims, granules, strict=True)
            for other in BLOCKS
            if other < block and all(rounds_alike(size[name], block, other) for size in self.sizes)
        )


def outlined(
    sizes: Sequence[Mapping[str, int]],
    measured: Sequence[Measured],
    structure: Structure,
    resident_bytes: int,
    *,
    fewer: bool = True,
) -> Choice:
    """What describes some sizes best: every column as a polynomial, or the local maxima of those that have several.

    Maxima come first, though a single polynomial describes what was seen: in other sizes another one may be the
    largest. Of images they are asked only where that nearly does, for there are many bases. Bases in fewer dimensions
    than vary come last, and only if `fewer`.
    """
    dims, relations = varying_dims(sizes)
    candidates = bases(dims, sizes)
    smooth = [basis for basis in candidates if not basis.rounds]

    def best(expansion: Expansion, among: Sequence[Basis]) -> Choice:
        check, basis = _best(sizes, expansion, structure, resident_bytes, among)
        return Choice(sizes, expansion, structure, resident_bytes, dims, relations, basis, None, check)

    def bettered(choice: Choice, among: Sequence[Basis], most: float) -> Choice:
        other = best(choice.expansion, among) if among else choice
        return other if other.check.error < most else choice

    def of_maxima(among: Sequence[Basis]) -> Choice | None:
        """Only exactly: where these follow a basis no better than that, it is another one than they do follow."""
        expansion = Expansion(measured, expands=True)
        choice = best(expansion, among) if expansion else None
        if choice is None or choice.rank != (EXACT_ERROR, False):
            return None
        astray = choice.astray
        if not astray.any():
            return choice
        choice = best(Expansion(measured, expands=True, but=astray), [choice.basis])
        return choice if choice.rank == (EXACT_ERROR, False) else None

    surfaces = may_be_surfaces(sizes)
    found = None if surfaces else of_maxima(smooth)
    if found is not None:
        return found
    plain = best(Expansion(measured), candidates)
    if plain.check.error > GOOD_ERROR:
        summary = structure.summary(plain.expansion.plain)
        padded = _likely(padded_bases(dims, sizes), sizes, summary)
        plain = bettered(plain, padded, BETTER * plain.check.error)
        plain = bettered(plain, chunked_bases(dims, sizes), min(GOOD_ERROR, BETTER * plain.check.error))
        # Of as many as there are for strides one describes anything a little better.
        strided = strided_bases(dims, sizes, plain.expansion.plain, summary[:, 0])
        plain = bettered(plain, strided, GOOD_ERROR)
        # Of what decides next to nothing it takes many sizes to learn how little that is.
        offered = fewer_bases(dims, sizes) if fewer and plain.check.error > GOOD_ERROR else []
        likely = [each for each in _likely(offered, sizes, summary) if may_do_without(each, dims, sizes)]
        if likely and (other := best(plain.expansion, likely)).check.error < GOOD_ERROR:
            return of_maxima([other.basis]) or other
    rounded = [plain.basis] if plain.basis.rounds else []
    if (surfaces and plain.check.error <= USABLE_ERROR) or (rounded and isfinite(plain.check.error)):
        found = of_maxima([*smooth, *rounded] if surfaces else rounded)
    return found or plain


def _best(
    sizes: Sequence[Mapping[str, int]],
    expansion: Expansion,
    structure: Structure,
    resident_bytes: int,
    candidates: Sequence[Basis],
) -> tuple[Check, Basis]:
    """The basis that describes all columns best; one that rests on single sizes only where no other one is as good.

    Of those that are exact the simplest, unless another one describes more of the maxima that are not the largest yet.
    """
    loose = -1
    best, basis, truth = UNCHECKED, candidates[0], structure.summary(expansion.plain)
    partial: tuple[Check, Basis] | None = None
    for candidate in candidates:
        design = candidate.design(sizes)
        check = left_out(design, expansion, truth, structure, resident_bytes, rounds=candidate.rounds)
        if check.resting.size:
            partial = partial or (check, candidate)
            continue
        blocks = candidate.blocks(sizes)
        if blocks is not None and (check.error < BETTER * best.error or check.error <= EXACT_ERROR):
            error = block_error(blocks, design, expansion, truth, structure, resident_bytes)
            check = check._replace(error=max(check.error, error))
        if check.error > EXACT_ERROR:
            if check.error < BETTER * best.error:
                best, basis = check, candidate
            continue
        left = _loose(design, expansion)
        if loose < 0 or left < loose:
            best, basis, loose = check, candidate, left
        if not left:
            break
    if partial is not None and best.error > EXACT_ERROR:  # only one that is exact may rest on single sizes
        best, basis = partial
    return best, basis


def _likely(candidates: Sequence[Basis], sizes: Sequence[Mapping[str, int]], truth: NDArray[np.float64]) -> list[Basis]:
    """The few of many bases that describe the summary of some sizes best: to check one by its columns takes longer."""
    missed: list[tuple[float, int]] = []
    for i, basis in enumerate(candidates):
        if len(basis.monomials) + 2 > len(sizes):
            continue
        left = unseen_residuals(basis.design(sizes), truth)
        missed.append((max(largest_share(left, truth, 0), EXACT_ERROR), i))
    return [candidates[i] for _, i in sorted(missed)[:MOST_LIKELY]]


def _loose(design: NDArray[np.float64], expansion: Expansion) -> int:
    """How many local maxima do not follow a basis."""
    if not expansion:
        return 0
    missed = np.abs(expansion.values - described(design, expansion.values)).max(axis=0)
    return int((missed > _close(expansion.values)).sum())


def _close(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much a basis may miss columns that it describes, shape (columns,)."""
    close: NDArray[np.float64] = np.maximum(CLOSE_BYTES, COLUMN_SHARE * np.abs(values).max(axis=0))
    return close


def _grains(sizes: Sequence[Mapping[str, int]], sides: Sequence[str], *, surfaces: bool) -> tuple[Value, ...]:
    """Sides, and what those of all sizes are multiples of: each of whole blocks, or all of them but for a few sizes."""
    surfaces = surfaces and (len(sides) == 2 or may_be_surfaces(sizes))
    odd = {
        grain: sum(any(size[name] % grain for name in sides) for size in sizes)
        for grain in (MULTIPLES if surfaces else BLOCKS)
    }
    alike = [grain for grain, count in odd.items() if count <= (FEW_ODD if surfaces else 0)]
    # Where one of two lengths is padded, all steps without padding have whole blocks of it, and of the other anything.
    alone = [(side, block) for side in sides for block in BLOCKS if not any(size[side] % block for size in sizes)]
    return tuple(dict.fromkeys([*((side, grain) for side in sides for grain in alike), *alone]))
