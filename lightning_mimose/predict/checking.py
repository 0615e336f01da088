"""Checking a basis: each of the sizes that were seen is predicted from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.maxima import Expansion
from lightning_mimose.predict.solving import LEVERAGE, distinct_rows
from lightning_mimose.predict.structure import Structure

LEAN_ERROR = 1e-3
"""Share of the step's peak by which that of a grade of lean saves may be mispredicted for plans to use it."""
GOOD_ERROR = 0.005
"""Share of the step's peak by which a left-out size may be mispredicted for a fit to be trusted at once."""
USABLE_ERROR = 0.05
"""The same, once there are enough sizes: the error is then added to every prediction as a margin."""
FEWEST_BLOCKS = 3
"""Blocks of a length that is padded, each of which the others have to predict."""
EXACT_ERROR = 1e-4
"""An error of this share is rounding: the basis is the right one."""


class Check(NamedTuple):
    """What came of predicting sizes from the others.

    Attributes:
        error: The largest error, as a share of the size's peak.
        checked: Indices of the sizes that could be predicted.
        predicted: Shape (checked, columns).
        resting: Shape (features, directions); features along these rest on sizes that nothing checks.
    """

    error: float
    checked: Sequence[int]
    predicted: NDArray[np.float64]
    resting: NDArray[np.float64]


UNCHECKED = Check(float("inf"), (), np.zeros((0, 0)), np.zeros((0, 0)))


def left_out(
    design: NDArray[np.float64],
    expansion: Expansion,
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
    *,
    rounds: bool,
) -> Check:
    """Predict each size from the others; `truth` is the summary of the values."""
    values = expansion.values
    # Two more sizes than unknowns: one to check the fit, one more because the checks share the others.
    features = design.shape[1]
    if len(design) < features + (1 if features == 2 else 2):
        return UNCHECKED
    distinct, group = distinct_rows(design)
    few = features == 2 and len(distinct) == 3  # three sizes on one line, if they are on it exactly
    if len(distinct) < features + 2 and not few:
        return UNCHECKED
    # Of both: rounding can make a design look determined that is not.
    if any(np.linalg.matrix_rank(points) < features for points in (distinct, design)):
        return UNCHECKED
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
        return UNCHECKED
    predicted = expansion.collapsed(values[checked] - np.concatenate(missing))
    error = largest_error(predicted, truth[checked], structure, resident_bytes)
    if len(checked) == len(design) and not few:
        return Check(error, checked, predicted, np.zeros((features, 0)))
    # A size without which the fit is undetermined cannot be checked; only an exact fit is believed regardless, and only
    # where nothing is rounded: else those sizes may be all that tells a rounding from another.
    if error >= EXACT_ERROR or rounds:
        return UNCHECKED
    lone = [
        size
        for size in set(group) - set(group[checked])
        if not _follows(design, expansion, truth, group == size, structure, resident_bytes)
    ]
    resting = _unspanned(design[~np.isin(group, lone)]) if lone else np.zeros((features, 0))
    return Check(error, checked, predicted, resting)


def block_error(
    blocks: NDArray[np.int64],
    design: NDArray[np.float64],
    expansion: Expansion,
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
) -> float:
    """The largest error of predicting the sizes of one block from those of the others, where one length is padded.

    Of another block than those seen nothing is said by others of the same; where few are known to fit, infinite.
    """
    errors = []
    for block in np.unique(blocks):
        held = blocks == block
        if np.linalg.matrix_rank(design[~held]) == design.shape[1]:
            weights = design[held] @ np.linalg.pinv(design[~held])
            predicted = expansion.collapsed(weights @ expansion.values[~held])
            errors.append(largest_error(predicted, truth[held], structure, resident_bytes))
    return max(errors) if len(errors) >= FEWEST_BLOCKS else float("inf")


def _unspanned(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Directions in which some sizes have no features, shape (features, directions)."""
    _, extents, right = np.linalg.svd(design, full_matrices=True)
    rank = int((extents > LEVERAGE * extents[0]).sum())
    return np.asarray(right[rank:].T)


def _follows(
    design: NDArray[np.float64],
    expansion: Expansion,
    truth: NDArray[np.float64],
    held: NDArray[np.bool_],
    structure: Structure,
    resident_bytes: int,
) -> bool:
    """Whether others predict the sizes `held`, without which the fit is undetermined, with a feature less.

    Else these are described by whatever feature they alone have, right or wrong: a single image of another width
    follows a sum of both sides as well as their product.
    """
    features = design.shape[1]
    for dropped in range(features):
        fewer = np.delete(design, dropped, axis=1)
        if np.linalg.matrix_rank(fewer[~held]) < features - 1:
            continue
        solved = np.linalg.lstsq(fewer[~held], expansion.values[~held], rcond=None)[0]
        predicted = expansion.collapsed(fewer[held] @ solved)
        if largest_error(predicted, truth[held], structure, resident_bytes) < EXACT_ERROR:
            return True
    return False


def largest_error(
    predicted: NDArray[np.float64], truth: NDArray[np.float64], structure: Structure, resident_bytes: int
) -> float:
    """By how much the summary of some sizes is missed at most, as a share of their peaks."""
    return largest_share(structure.summary(predicted) - truth, truth, resident_bytes)


def largest_share(missed: NDArray[np.float64], truth: NDArray[np.float64], resident_bytes: int) -> float:
    """What is missed of the summary of some sizes, as the largest share of their peaks."""
    missed, whole = np.abs(missed), truth[:, :1] + resident_bytes
    return float((np.concatenate([missed[:, :2], missed[:, 2:].sum(axis=1, keepdims=True)], axis=1) / whole).max())


def doubtful(
    check: Check,
    values: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
) -> frozenset[str]:
    """Grades of lean saves whose peaks were missed by more than the rest; only of the fit chosen: it takes long."""
    if not structure.grades or not check.checked:
        return frozenset(structure.grades)
    truth = values[list(check.checked)]
    missed = np.abs(structure.lean_peaks(check.predicted) - structure.lean_peaks(truth))
    errors = (missed / (structure.summary(truth)[:, :1] + resident_bytes)).max(axis=0)
    return frozenset(g for g, e in zip(structure.grades, errors, strict=True) if e > max(LEAN_ERROR, check.error))
