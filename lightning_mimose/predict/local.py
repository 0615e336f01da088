"""Local fits: every column in a basis of its own, for images whose sides are rounded level by level.

What is alive at one moment is a sum over all levels of such a pyramid, each of which rounds sides in its own way: more
features than there are sizes to learn from. What one block changes follows from two roundings, exactly. So columns are
taken as differences, each is fitted by the simplest tiling that is exact, and they are added up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.differences import Differences
from lightning_mimose.predict.solving import LEVERAGE, Design, Solved, all_solved, designs_of
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.tilings import MULTIPLES, STEMS, Surfaces, Tiling, attending, tilings

Floats = NDArray[np.float64]

EXACT_SHARE = 1e-6
"""Share of a column's largest value by which an exact tiling may miss it."""
FEWEST = 4
"""Sizes that are needed to see whether single surfaces describe a column: a factor, a constant, and two to spare."""
MANY = 0.2
"""Share of the columns that single surfaces have to describe, or their squares: where fewer, it is no pyramid."""
MOST = 0.6
"""Share of them that any tilings have to."""
ENOUGH = 200
"""Columns that are looked at to see whether they are those of a pyramid."""
CHANCE = 3.0
"""How much more columns that no tiling describes are missed than in the sizes left out: the best of so many is luck."""


class Part(NamedTuple):
    """Columns that share a basis.

    Attributes:
        basis: Their features.
        columns: Which they are.
        coefficients: Shape (features, columns).
        unchecked: Shape (features, directions); features along these rest on sizes that nothing checks.
    """

    basis: Design
    columns: NDArray[np.intp]
    coefficients: Floats
    unchecked: Floats

    def knows(self, design: Floats) -> bool:
        """Whether what is predicted for a size with these features was checked on others."""
        return not self.unchecked.size or not (np.abs(design @ self.unchecked) > LEVERAGE).any()


@dataclass(frozen=True, eq=False)
class LocalFit:
    """A fit of every column in a basis of its own.

    Attributes:
        structure: Whose columns.
        differences: What they are measured from.
        parts: The bases.
        rivals: Other bases that describe what was seen as well, for the columns that have one.
        unseen: Roundings, and the only answer that was seen to whether they pad.
        steps: Roundings, and the only number of multiples that sides were seen to take.
        left_out: Shape (sizes, columns): what is predicted for each size from the others.
    """

    structure: Structure
    differences: Differences
    parts: tuple[Part, ...]
    rivals: tuple[Part, ...]
    unseen: tuple[tuple[Tiling, bool], ...]
    steps: tuple[tuple[Tiling, set[int]], ...]
    left_out: Floats

    def values_at(self, dims: Mapping[str, int]) -> Floats:
        """What is predicted for some size, shape (columns,)."""
        values: Floats = self.differences.summed(self._filled(_designs(self.parts, Surfaces([dims]))))[0]
        return values

    def error_at(self, dims: Mapping[str, int], resident_bytes: int) -> float:
        """By how much two bases differ there that describe what was seen equally well, as a share of the size's peak.

        The simplest ones with the finest and the coarsest roundings, in the peaks with everything kept and recomputed.

        Infinite where a rounding does what was never seen, or once, so that nothing checks what is predicted.
        """
        surfaces = Surfaces([dims])
        designs = _designs(self.parts, surfaces)
        if not all(part.knows(design) for part, design in zip(self.parts, designs, strict=True)):
            return float("inf")
        if any(surfaces.pads(tiling)[0] != seen for tiling, seen in self.unseen):
            return float("inf")
        if any(tiling.counts(dims) != count for tiling, count in self.steps):
            return float("inf")
        if not self.rivals:
            return 0.0
        both = self._filled(designs).repeat(2, axis=0)
        _fill(both[1:], self.rivals, _designs(self.rivals, surfaces))
        one, other = self.structure.summary(np.maximum(self.differences.summed(both), 0.0))
        return float(np.abs(one - other)[:2].max() / (one[0] + resident_bytes))

    def _filled(self, designs: Sequence[Floats]) -> Floats:
        found = np.zeros((1, self.structure.columns))
        _fill(found, self.parts, designs)
        return found


def _designs(parts: Sequence[Part], surfaces: Surfaces) -> list[Floats]:
    """The features of some sizes in the basis of each part."""
    return [designs_of([part.basis], surfaces)[0] for part in parts]


def _fill(found: Floats, parts: Sequence[Part], designs: Sequence[Floats]) -> None:
    for part, design in zip(parts, designs, strict=True):
        found[:, part.columns] = design @ part.coefficients


def fit_locally(
    sizes: Sequence[Mapping[str, int]],
    values: Floats,
    structure: Structure,
    dims: Sequence[str],
    spare: Design,
    will_do: Callable[[Floats], bool] = lambda left_out: True,
) -> LocalFit | None:
    """Fit every column by the simplest tiling that is exact.

    Args:
        sizes: What was measured.
        values: Shape (sizes, columns).
        structure: Whose columns.
        dims: The dimensions that vary.
        spare: Another basis, for columns that no tiling describes.
        will_do: Whether to go on, by what is predicted for each size from the others (see `LocalFit.left_out`).

    Returns:
        None where too little follows from two sides like this.
    """
    sides = tuple(name for name in dims if name != "batch")
    if not 1 <= len(sides) <= 2 or len(sizes) < FEWEST:
        return None
    sides = (sides[0], sides[-1])
    scale = EXACT_SHARE * np.maximum(np.abs(values).max(axis=0), 1.0)
    differences = Differences(structure)
    targets = differences.of(values)
    varying = np.flatnonzero(np.ptp(targets, axis=0) > scale)
    batch = "batch" if "batch" in dims else None
    some = varying[:: max(1, len(varying) // ENOUGH)]
    surfaces, columns = Surfaces(sizes), _Columns(targets, scale)

    for stem in STEMS:
        candidates = tilings(sides, batch, stem, len(sizes) - 2)
        simplest = next(candidates)
        singles = cache(partial(all_solved, simplest, surfaces))
        # Where attention is most of what there is, few columns go with a surface without its square.
        found, _ = columns.exact([singles, partial(all_solved, attending(simplest), surfaces)], some)
        if sum(each is not None for each in found) >= MANY * len(some):
            break
    else:
        return None
    steps = [singles, *(cache(partial(all_solved, tiled, surfaces)) for tiled in candidates)]
    chosen, rivals = columns.exact(steps)
    if sum(chosen[column] is not None for column in varying) < MOST * len(varying):
        return None
    # A moment that no tiling describes must not spoil those after it.
    odd = {int(column) for column in differences.chain if chosen[column] is None}
    if odd:
        before, differences = targets, Differences(structure, odd)
        targets = differences.of(values)
        changed = np.flatnonzero((targets != before).any(axis=0))
        again = _Columns(targets[:, changed], scale[changed]).exact(steps)
        for place, first, last in zip(changed.tolist(), *again, strict=True):
            chosen[place], rivals[place] = first, last
    exact = [solved.basis for solved in dict.fromkeys(chosen) if solved is not None]
    left_out = targets.copy()
    rest = [column for column, solved in enumerate(chosen) if solved is None]
    simple = [*all_solved([spare], surfaces), *(each for step in steps[:2] for each in step())] if rest else []
    every = [solved for solved in simple if solved.free.min() > LEVERAGE and solved.unchecked is not None]
    if rest and not every:
        return None
    missing = [solved.residuals(targets[:, rest]) / solved.free[:, None] for solved in every]
    best = np.argmin([np.abs(missed).max(axis=0) for missed in missing], axis=0) if rest else ()
    for i, column in enumerate(rest):
        chosen[column] = every[best[i]]
        left_out[:, column] -= CHANCE * missing[best[i]][:, i]
    predicted = differences.summed(left_out)
    if not will_do(predicted):
        return None
    roundings = [Tiling(sides, None, multiple, multiple, stem=stem) for multiple in MULTIPLES]
    counts = [(tiling, set().union(*map(tiling.counts, sizes))) for tiling in roundings]
    return LocalFit(
        structure,
        differences,
        _parts(chosen, targets),
        _parts(rivals, targets),
        _unseen(exact, surfaces),
        tuple((tiling, count) for tiling, count in counts if len(count) == 1),
        predicted,
    )


class _Columns:
    """Columns, each looked at once: units that are alike have equal ones.

    Args:
        targets: Shape (sizes, columns).
        scale: By what each may be missed, shape (columns,).
    """

    def __init__(self, targets: Floats, scale: Floats) -> None:
        self._unique, which = np.unique(targets, axis=1, return_inverse=True)
        self._which, self._close = which.reshape(-1), np.full(self._unique.shape[1], np.inf)
        np.minimum.at(self._close, self._which, scale)

    def exact(
        self, steps: Iterable[Callable[[], Sequence[Solved]]], some: Any = slice(None)
    ) -> tuple[list[Solved | None], list[Solved | None]]:
        """Of some columns: the first basis that is exact, and the last with as many features, if another."""
        wanted = self._which[some]
        left = np.unique(wanted)
        first: dict[int, Solved] = {}
        last: dict[int, Solved | None] = {}
        for step in steps:
            if not len(left):
                break
            open_targets, open_close = self._unique[:, left], self._close[left]
            for solved in step():
                described = left[solved.describes(open_targets, open_close)].tolist()
                if described and solved.unchecked is None:
                    continue
                for column in described:
                    last[column] = solved if column in first else None
                    first.setdefault(column, solved)
            left = np.array([column for column in left.tolist() if column not in first], dtype=np.intp)
        columns = wanted.tolist()
        return [first.get(column) for column in columns], [last.get(column) for column in columns]


def _unseen(exact: Sequence[Tiling], surfaces: Surfaces) -> tuple[tuple[Tiling, bool], ...]:
    """Roundings that padded all sizes, or none: what the other kind takes was not seen."""
    roundings = {(tiling.stem, tiling.fine, tiling.coarse) for tiling in exact}
    if any(tiling.edges for tiling in exact):  # some blocks copy what they pad, so others may as well
        roundings |= {(tiling.stem, 1, tiling.fine) for tiling in exact}
    found = []
    for stem, fine, coarse in roundings:
        if fine != coarse:
            tiling = Tiling(exact[0].sides, None, fine, coarse, stem=stem)
            padded = set(surfaces.pads(tiling).tolist())
            if len(padded) == 1:
                found.append((tiling, padded.pop()))
    return tuple(found)


def _parts(chosen: Sequence[Solved | None], targets: Floats) -> tuple[Part, ...]:
    columns: dict[Solved, list[int]] = {}
    for column, solved in enumerate(chosen):
        if solved is not None:
            columns.setdefault(solved, []).append(column)
    parts = []
    for solved, mine in columns.items():
        assert solved.unchecked is not None  # or it would not have been chosen
        parts.append(
            Part(solved.basis, np.array(mine, dtype=np.intp), solved.inverse @ targets[:, mine], solved.unchecked)
        )
    return tuple(parts)
