"""Bases for what a model pads or strides inside, and its batches do not tell: asked where none of the plain ones does.

Attention in windows pads one of two lengths to whole blocks. Convolutions with strides leave a share of a sequence,
rounded: `ceil((length - shift) / stride)`, whatever their kernels are. So do several in a row, of whose shifts the last
tells the others: each adds a multiple of the stride so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from lightning_mimose.predict.features import (
    Basis,
    Rung,
    blocks_of,
    feature,
    may_be_surfaces,
    monomial,
    scaled,
)

STRIDES = (
    *((2,), (3,), (4,), (5,), (6,), (8,), (10,), (16,)),
    *((2, 2), (2, 2, 2), (3, 2), (2, 3), (3, 3), (4, 2), (5, 2), (5, 4), (5, 2, 2)),
)
"""Of patches or of convolutions in a row, the first of them first."""


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


def strided_bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Bases for one length of which strides leave a share that is rounded otherwise than up: without padding, mostly.

    Example:
        >>> frames = [{"x:2": n} for n in (40, 50, 61)]
        >>> basis = next(each for each in strided_bases(("x:2",), frames) if each.shifts == (0, 0, 3, 3))
        >>> [round(value * 61) for value in basis.design([{"x:2": n} for n in (40, 43, 44)])[:, 2]]  # whole patches
        [40, 40, 44]
    """
    others = [i for i, name in enumerate(dims) if name != "batch"]
    if len(others) != 1 or may_be_surfaces(sizes):
        return []
    longest = max(size[dims[others[0]]] for size in sizes)
    line, square = monomial(dims, *others), monomial(dims, *others, *others)
    rungs: list[Rung] = []
    for strides in STRIDES:
        levels = list(accumulate(strides, mul))
        if levels[-1] < longest:
            for shift in range(1, levels[-1]):
                shares = [feature(line, stride, others, shift % stride) for stride in levels]
                rungs.append([feature(monomial(dims)), feature(line), *shares, shares[-1]._replace(exponents=square)])
    return scaled(dims, sizes, rungs)
