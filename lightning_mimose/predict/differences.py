"""Columns as differences: what changes from one moment of a step to the next is one block's doing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.shapes import NEVER
from lightning_mimose.predict.structure import Structure


class Differences:
    """Takes levels as differences from those of the moment before, and lean levels from the plain ones beside them.

    Args:
        structure: Whose columns.
        odd: Columns that nothing is measured from but lean levels beside them.

    Attributes:
        chain: Columns of levels, one moment after the other.
    """

    def __init__(self, structure: Structure, odd: Collection[int] = ()) -> None:
        when = [(float(position.time), position.column) for position in structure.positions if position.entry < 0]
        for call in structure.calls:
            if call.backward_time != NEVER:
                when.append((call.backward_time - 0.5, call.before_backward))
            if call.entry >= 0:
                when.append((call.in_time - 0.5, call.entry))
        moments = [column for _, column in sorted(when)]
        self.chain = np.array([column for column in moments if column not in odd], dtype=np.intp)
        aside: list[tuple[int, int]] = []
        before = -1
        for column in moments:
            if column not in odd:
                before = column
            elif before >= 0:
                aside.append((column, before))
        self._odd, self._before = np.array(aside, dtype=np.intp).reshape(-1, 2).T
        absolute = {position.column for position in structure.positions if position.entry < 0}
        beside = [
            (own, structure.positions[place].column)
            for shape in structure.lean
            for place, own in (*shape.positions, *shape.again)
        ]
        beside += [(own, structure.positions[place].column) for call in structure.calls for place, own in call.again]
        beside = [(own, plain) for own, plain in beside if plain in absolute]
        self._lean, self._plain = np.array(beside, dtype=np.intp).reshape(-1, 2).T

    def of(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shape (sizes, columns), of values of that shape."""
        found: NDArray[np.float64] = values.copy()
        found[:, self._lean] -= values[:, self._plain]
        found[:, self._odd] -= values[:, self._before]
        found[:, self.chain[1:]] -= values[:, self.chain[:-1]]
        return found

    def summed(self, differences: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `of`."""
        values: NDArray[np.float64] = differences.copy()
        values[:, self.chain] = np.cumsum(differences[:, self.chain], axis=1)
        values[:, self._odd] += values[:, self._before]
        values[:, self._lean] += values[:, self._plain]
        return values
