"""What becomes of lean units' results, in steps of every shape: which of them are handed on, to whom."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lightning_mimose.predict.handing import common
from lightning_mimose.predict.structure import Structure


class Handing(NamedTuple):
    """What becomes of lean units' results, in steps of every shape.

    Attributes:
        handed_on: Unit -> up to which grade its result is handed on.
        takers: Unit whose result could be rebuilt -> the units that are given it.
        places: Unit of `handed_on` -> which of the storages that it returns is handed on, from 0.
    """

    handed_on: dict[str, int]
    takers: dict[str, frozenset[str]]
    places: dict[str, int]

    @classmethod
    def of(cls, structures: Collection[Structure]) -> Handing:
        """Of steps that have these shapes."""
        takers: dict[str, frozenset[str]] = {}
        places: dict[str, set[int]] = {}
        for structure in structures:
            for each in structure.handing:
                unit, taker = structure.calls[each.call].unit, structure.calls[each.taker].unit
                takers[unit] = takers.get(unit, frozenset()) | {taker}
                places.setdefault(unit, set()).add(each.place)
        limits = common(structure.handed_on for structure in structures)
        always = {unit: min(found) for unit, found in places.items() if len(found) == 1}
        return cls({unit: limit for unit, limit in limits.items() if unit in always}, takers, always)
