"""Bases for what a model pads or strides inside, and its batches do not tell: asked where none of the plain ones does.

Attention in windows pads one of two lengths to whole blocks. Convolutions with strides leave a share of a sequence,
rounded: `ceil((length - shift) / stride)`, whatever their kernels are. So do several in a row, of whose shifts the last
tells the others: each adds a multiple of the stride so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.checking import USABLE_ERROR
from lightning_mimose.predict.features import (
    Basis,
    Rung,
    blocks_of,
    feature,
    may_be_surfaces,
    monomial,
    scaled,
)
from lightning_mimose.predict.solving import unseen_residuals

STRIDES = (
    *((2,), (3,), (4,), (5,), (6,), (8,), (10,), (16,)),
    *((2, 2), (2, 2, 2), (3, 2), (2, 3), (3, 3), (4, 2), (5, 2), (5, 4), (5, 2, 2)),
)
"""Of patches or of convolutions in a row, the first of them first."""
SUMS = 3
"""Of columns, by which many bases are told apart: each with weights of its own, so that nothing cancels out in all."""
MOST_OFFERED = 4
EXACT_DIGITS = 6
"""Decimals of the share of a peak by which one misses sizes that count."""


def padded_bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Bases for two lengths of which a model pads one to whole blocks inside: attention in windows in an encoder, say.

    Of what is padded there are lengths with their padding and without, both of which the other length may meet; in
    windows nothing grows with the square, but masks do.
    """
    others = [i for i, name in enumerate(dims) if name != "batch"]
    if len(others) != 2 or may_be_surfaces(sizes):
        return []
    lines: list[Rung] = []
    squares: list[Rung] = []
    for padded, other in (others, others[::-1]):
        for block in blocks_of(dims[padded], sizes):
            both = [monomial(dims, padded), monomial(dims, padded, other)]
            free = [monomial(dims), monomial(dims, other), monomial(dims, other, other), *both]
            square = monomial(dims, padded, padded)
            lines.append([*map(feature, free), *(feature(each, block, [padded]) for each in both)])
            squares.append([*lines[-1], feature(square), feature(square, block, [padded])])
    return scaled(dims, sizes, [*lines, *squares])


def chunked_bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Bases for one length that some layers pad to whole chunks, and others hold against itself: scans and attention.

    Example:
        >>> [basis.granules[2] for basis in chunked_bases(("x:1",), [{"x:1": n} for n in (20, 30, 40)])]
        [(32,), (32,), (16,), (16,), (8,), (8,)]
    """
    others = [i for i, name in enumerate(dims) if name != "batch"]
    if len(others) != 1 or may_be_surfaces(sizes):
        return []
    line, square = monomial(dims, *others), monomial(dims, *others, *others)
    rungs: list[Rung] = []
    for block in blocks_of(dims[others[0]], sizes):
        rungs.append([*map(feature, (monomial(dims), line)), feature(line, block, others), feature(square)])
        rungs.append([*rungs[-1], feature(square, block, others)])
    return scaled(dims, sizes, rungs)


def strided_bases(
    dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]], columns: NDArray[np.float64], peaks: NDArray[np.float64]
) -> list[Basis]:
    """Bases for one length of which strides leave a share that is rounded otherwise than up: without padding, mostly.

    Args:
        dims: Dimensions that vary.
        sizes: Some sizes.
        columns: What was measured of them, shape (sizes, columns).
        peaks: What those come to, shape (sizes,). Those few bases are offered that describe them best, or else sums
            of the columns, where peaks are of another moment in some sizes: to check one by every column takes far
            longer.

    Example:
        >>> frames = [{"x:2": n} for n in (40, 50, 61, 75, 90, 99, 120)]
        >>> tokens = np.array([[size["x:2"] // 4] for size in frames], dtype=float)
        >>> [basis.shifts[-1] for basis in strided_bases(("x:2",), frames, tokens**2, tokens[:, 0])][0]
        3
    """
    others = [i for i, name in enumerate(dims) if name != "batch"]
    if len(others) != 1 or may_be_surfaces(sizes):
        return []
    lengths = np.array([size[dims[others[0]]] for size in sizes], dtype=np.float64)
    batch = np.array([size["batch"] for size in sizes], dtype=np.float64) if "batch" in dims else None
    sums = columns @ np.random.default_rng(0).uniform(0.5, 1.5, (columns.shape[1], SUMS))
    known = np.column_stack([sums, peaks])
    missed: list[tuple[float, int, tuple[int, ...], int]] = []
    for strides, shifts in _rows():
        designs = _designs(lengths, batch, strides, shifts)
        if designs.shape[2] + 2 <= len(sizes):
            each = (np.abs(unseen_residuals(designs, known)) / np.maximum(np.abs(known), 1.0)).max(axis=1)
            shares = np.minimum(each[:, :SUMS].max(axis=1), each[:, SUMS])
            found = np.flatnonzero((shares < USABLE_ERROR) & (strides[:, -1] < lengths.max()))
            levels = strides.shape[1]
            # What the processor's rounding adds must not choose between two that say the same: that with less in it is.
            missed += [
                (round(float(shares[i]), EXACT_DIGITS), levels, tuple(strides[i].tolist()), int(shifts[i]))
                for i in found
            ]
    line, square = monomial(dims, *others), monomial(dims, *others, *others)
    rungs: list[Rung] = []
    for *_, strided, shift in sorted(missed)[:MOST_OFFERED]:
        shares_left = [feature(line, stride, others, shift % stride) for stride in strided]
        rungs.append([feature(monomial(dims)), feature(line), *shares_left, shares_left[-1]._replace(exponents=square)])
    return scaled(dims, sizes, rungs)


@cache
def _rows() -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Of every number of convolutions: their strides so far, shape (rows, convolutions), and the last one's shift."""
    rows: dict[int, list[tuple[list[int], int]]] = {}
    for strides in STRIDES:
        levels = list(accumulate(strides, mul))
        rows.setdefault(len(levels), []).extend((levels, shift) for shift in range(1, levels[-1]))
    return [
        (np.array([levels for levels, _ in each]), np.array([shift for _, shift in each])) for each in rows.values()
    ]


def _designs(
    lengths: NDArray[np.float64],
    batch: NDArray[np.float64] | None,
    strides: NDArray[np.int64],
    shifts: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The features of all rows, shape (rows, sizes, features)."""
    strides = strides[:, None]
    left = np.ceil((lengths[:, None] - shifts[:, None, None] % strides) / strides) * strides / lengths.max()
    one = np.ones((len(strides), len(lengths), 1))
    features = [one, one * (lengths / lengths.max())[:, None], left, left[:, :, -1:] ** 2]
    if batch is not None:
        features = [one, *(each * (batch / batch.max())[:, None] for each in features)]
    return np.concatenate(features, axis=2)
