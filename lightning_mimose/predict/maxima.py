"""Maxima: columns that say how high memory gets in a stretch of a step, as the larger of several polynomials.

In small batches a block's backward is highest where its wide layer is, in long ones where its attention is: each of the
two follows a polynomial, the larger of them does not. So every local maximum of such a stretch is fitted for itself, as
columns of their own, and what is predicted is the largest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]

Groups: TypeAlias = tuple[tuple[float, ...], ...]
"""Local maxima of a stretch, of every part of it that something known begins."""

REACH = 4.0
"""How many times smaller than the largest a maximum is that may yet be the largest in other sizes."""
SAME = 1e-9
"""By how much shares differ for the sake of arithmetic."""


def moved(groups: Groups, nbytes: float) -> Groups:
    """The same maxima, all of them higher by so much."""
    return tuple([tuple([top + nbytes for top in tops]) for tops in groups])


def joined(stretches: Sequence[Groups]) -> Groups:
    """Those of stretches that follow each other."""
    return tuple(chain.from_iterable(stretches))


@dataclass(frozen=True, eq=False)
class Maxima:
    """What columns of a measured step are the largest of; as arrays, for large models have many.

    Attributes:
        columns: Shape (parts,), in order: the column that a part belongs to.
        lengths: Shape (parts,): how many maxima it has.
        tops: Shape (maxima,), bytes; below zero where only others are above it.

    Example:
        >>> maxima = Maxima.of({4: ((2.0,), (1.0, 3.0))})
        >>> maxima.columns.tolist(), maxima.lengths.tolist(), maxima.tops.tolist()
        ([4, 4], [1, 2], [2.0, 1.0, 3.0])
    """

    columns: Ints
    lengths: Ints
    tops: Floats

    @classmethod
    def of(cls, groups: Mapping[int, Groups]) -> Maxima:
        """Column -> its maxima."""
        parts = [(column, tops) for column in sorted(groups) for tops in groups[column]]
        return cls(
            np.array([column for column, _ in parts], dtype=np.intp),
            np.array([len(tops) for _, tops in parts], dtype=np.intp),
            np.array([top for _, tops in parts for top in tops], dtype=np.float64),
        )

    def renamed(self, columns: Mapping[int, int]) -> Maxima:
        """Those of some columns, as those of others.

        Args:
            columns: Column -> which it is from now on.

        Example:
            >>> Maxima.of({4: ((2.0,), (1.0, 3.0)), 5: ((7.0, 8.0),)}).renamed({4: 1}).tops.tolist()
            [2.0, 1.0, 3.0]
        """
        found: dict[int, list[tuple[float, ...]]] = {}
        ends = np.cumsum(self.lengths)
        for part in np.flatnonzero(np.isin(self.columns, list(columns))).tolist():
            tops = self.tops[ends[part] - self.lengths[part] : ends[part]]
            found.setdefault(columns[int(self.columns[part])], []).append(tuple(tops.tolist()))
        return Maxima.of({column: tuple(groups) for column, groups in found.items()})

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: array.tolist() for name, array in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Maxima:
        """From plain data."""
        columns, lengths = (np.array(state[name], dtype=np.intp) for name in ("columns", "lengths"))
        return cls(columns, lengths, np.array(state["tops"], dtype=np.float64))


NOT_KNOWN = Maxima.of({})


class Measured(NamedTuple):
    """The columns of a measured step.

    Attributes:
        values: Shape (columns,).
        maxima: What some of them are the largest of, where that is known.
        seconds: What the forward of all that was recomputed took.
    """

    values: Floats
    maxima: Maxima = NOT_KNOWN
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Collapse:
    """From columns with their local maxima to the largest of each.

    Attributes:
        columns: How many they are without the maxima that come besides.
        owned: Shape (columns with several,); which have some.
        starts: Shape (columns with several,); where these begin, after the columns.
    """

    columns: int
    owned: Ints
    starts: Ints

    def __call__(self, values: Floats) -> Floats:
        """The columns as they were, each the largest of its local maxima.

        Args:
            values: Shape (..., columns and more).

        Returns:
            Shape (..., columns).
        """
        if not len(self.owned):
            return values
        found: Floats = values[..., : self.columns].copy()
        others = np.maximum.reduceat(values[..., self.columns :], self.starts, axis=-1)
        found[..., self.owned] = np.maximum(found[..., self.owned], others)
        return found


class Expansion:
    """Some sizes' columns, with the local maxima of each in place of their largest.

    Args:
        measured: The sizes.
        expands: Whether to do so; otherwise they are as they were.
        but: Shape (columns,): those that stay as they were; none if it is not given.

    Attributes:
        plain: Shape (sizes, columns).
        values: Shape (sizes, columns and more).
        collapsed: From those back to these.

    Example:
        >>> tops = [(2.0, 1.0), (4.0, 4.0), (6.0, 9.0)]
        >>> sizes = [Measured(np.array([max(each)]), Maxima.of({0: (each,)})) for each in tops]
        >>> expansion = Expansion(sizes, expands=True)
        >>> expansion.values.tolist()
        [[1.0, 2.0], [4.0, 4.0], [9.0, 6.0]]
        >>> expansion.collapsed(expansion.values).tolist()
        [[2.0], [4.0], [9.0]]
    """

    def __init__(
        self, measured: Sequence[Measured], *, expands: bool = False, but: NDArray[np.bool_] | None = None
    ) -> None:
        self.plain = self.values = np.array([each.values for each in measured])
        columns, none = self.plain.shape[1], np.zeros(0, dtype=np.intp)
        self.collapsed = Collapse(columns, none, none)
        if not expands:
            return
        owners, tops = _rivals(*_aligned([each.maxima for each in measured]))
        if but is not None:
            owners, tops = owners[~but[owners]], tops[:, ~but[owners]]
        _, first = np.unique(owners, return_index=True)
        more = np.ones(len(owners), dtype=bool)
        more[first] = False
        several = np.isin(owners, owners[more])
        inplace = self.plain.copy()
        inplace[:, owners[~more & several]] = tops[:, ~more & several]
        self.values = np.concatenate([inplace, tops[:, more]], axis=1)
        self.collapsed = Collapse(columns, *np.unique(owners[more], return_index=True))

    def __bool__(self) -> bool:
        """Whether there are more columns than before."""
        return bool(self.values.shape[1] > self.plain.shape[1])


def _aligned(maxima: Sequence[Maxima]) -> tuple[Ints, Floats]:
    """Local maxima of which it is known which is which in all sizes: the columns they belong to, shape (sizes, maxima).

    Where sizes have different ones nobody knows: kernels that take memory for a moment do so in some sizes only. Of a
    part in which their number differs the largest is left, and of a column with other parts nothing.
    """
    count = max(int(each.columns.max(initial=-1)) for each in maxima) + 1
    parts = np.array([np.bincount(each.columns, minlength=count) for each in maxima])
    alike = (parts == parts[0]).all(axis=0)
    here = [alike[each.columns] for each in maxima]
    columns = maxima[0].columns[here[0]]
    lengths = np.array([each.lengths[mine] for each, mine in zip(maxima, here, strict=True)])
    same = (lengths == lengths[0]).all(axis=0)
    rows = []
    for each, mine in zip(maxima, here, strict=True):
        of_part = np.zeros(len(each.columns), dtype=bool)
        of_part[mine] = same
        starts = np.cumsum(each.lengths) - each.lengths
        largest = np.maximum.reduceat(each.tops, starts) if len(starts) else each.tops
        rows.append(np.concatenate([each.tops[np.repeat(of_part, each.lengths)], largest[mine][~same]]))
    owners = np.concatenate([np.repeat(columns[same], lengths[0][same]), columns[~same]])
    return owners, np.array(rows)


def _rivals(owners: Ints, tops: Floats) -> tuple[Ints, Floats]:
    """Those that are the largest somewhere, or may be, each once; in order of the columns they belong to.

    Args:
        owners: Shape (maxima,).
        tops: Shape (sizes, maxima).
    """
    order = np.lexsort((*tops[::-1], owners))
    owners, tops = owners[order], tops[:, order]
    new = np.ones(len(owners), dtype=bool)
    new[1:] = (owners[1:] != owners[:-1]) | (tops[:, 1:] != tops[:, :-1]).any(axis=0)
    owners, tops = owners[new], tops[:, new]
    if not len(owners):
        return owners, tops
    _, first, column = np.unique(owners, return_index=True, return_inverse=True)
    largest = np.maximum.reduceat(tops, first, axis=1)
    share = tops / np.maximum(largest, 1.0)[:, column]
    most = share.max(axis=0)
    # One that is the same share of the largest in all sizes stays below it.
    may_be = (most >= 1) | ((most * REACH > 1) & (most - share.min(axis=0) > SAME))
    return owners[may_be], tops[:, may_be]
