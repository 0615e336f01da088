"""Sheltered steps that are not learnt from: where many told nothing that plans could be made by, few of the next do.

To measure a step by the unit takes several times as long as to run it. Some trainings are never learnt: steps that
run backward in their midst, or whose sizes nothing in the batch tells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

LEARNT_STEPS = 40
"""Sheltered steps in a row that are all learnt from: more than sizes in two dimensions take."""
LEAST_SHARE = 0.1
"""Share of the steps that are learnt from however long it was in vain."""
BEYOND = 1.25
"""How far a dimension is beyond all that were met where other sizes begin, of which nothing was in vain."""
KNOWN = 32
"""Ways of running whose steps are counted."""

Dims = Sequence[tuple[str, int]]

_GOLDEN = (5**0.5 - 1) / 2


class _Row:
    """Sheltered steps in a row: how many, from where to where each dimension went, and the largest size."""

    def __init__(self) -> None:
        self.steps = 0
        self._spans: dict[str, tuple[int, int]] = {}
        self._largest = 0

    def is_largest(self, dims: Dims) -> bool:
        """A batch may be large in two dimensions, in each of which others were as large before."""
        return bool(dims) and _product(dims) > self._largest

    def add(self, dims: Dims) -> None:
        is_beyond = bool(dims) and _product(dims) > BEYOND * self._largest
        self._largest = max(self._largest, _product(dims))
        for name, value in dims:
            low, high = self._spans.get(name, (value, value))
            is_beyond |= name not in self._spans or value > BEYOND * high or value * BEYOND < low
            self._spans[name] = min(low, value), max(high, value)
        self.steps = 0 if is_beyond and self.steps >= LEARNT_STEPS else self.steps + 1


class Resting:
    """Says which of the sheltered steps in a row are not learnt from.

    Those that are do not come in step with anything: whatever comes in every second or third step is met. Where other
    sizes begin, all are learnt from again, and the largest so far is in any case.

    Example:
        >>> resting, rested = Resting(), 0
        >>> for _ in range(400):
        ...     rested += resting.rests("training")
        ...     resting.ran("training", [("tokens", 16)], sheltered=True)
        >>> rested
        307
        >>> resting.ran("training", [("tokens", 32)], sheltered=True)
        >>> resting.rests("training")
        False
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, _Row] = {}

    def rests(self, way: Hashable, dims: Dims = ()) -> bool:
        """Whether the next sheltered step is not learnt from.

        Args:
            way: In which way the model runs (its modes, the kind of its steps): each is learnt for itself.
            dims: Its size, if it is known.
        """
        row = self._rows.get(way)
        if row is None or row.steps < LEARNT_STEPS or row.is_largest(dims):
            return False
        steps = row.steps
        return steps * _GOLDEN % 1.0 >= max(LEAST_SHARE, LEARNT_STEPS / 2 / steps)

    def ran(self, way: Hashable, dims: Dims, *, sheltered: bool) -> None:
        """A step ran in this way.

        Args:
            way: See `rests`.
            dims: Its size.
            sheltered: Whether it was sheltered.
        """
        if not sheltered:
            self._rows.pop(way, None)
            return
        if way not in self._rows:
            if len(self._rows) >= KNOWN:
                del self._rows[next(iter(self._rows))]
            self._rows[way] = _Row()
        self._rows[way].add(dims)


def _product(dims: Dims) -> int:
    return math.prod(value for _, value in dims)
