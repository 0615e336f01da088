"""Results that lean units hand on: rebuilt, where the next unit would keep them, from what the unit saves itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_mimose.menu import PRODUCTS
from lightning_mimose.predict.shapes import NEVER

NO_GRADE = PRODUCTS + 1
"""In place of a grade: none rebuilds it."""
NOT_TAKEN = -1
"""In place of a grade: a unit's result is nothing that the next one saves, and that could be rebuilt."""


@dataclass(frozen=True)
class HandingShape:
    """A storage that one call returns and the next one saves, and that may be rebuilt.

    How is no part of what makes two steps alike: at some sizes images are padded, and other operations make it.

    Attributes:
        call: Index of the call that returns it.
        taker: Index of the call that saves it.
        place: Which of the storages that the first one returns it is, from 0.
        size: Column of its bytes.
        work: Column of the operations that rebuilding takes.
        temporary: Column of the bytes that live besides while it is rebuilt.
        also: For each grade: column of the bytes that are rebuilt on the way.
        grade: The number of the least grade of lean saves that has it, from 1; `NO_GRADE` if none has.
        needs: (index of another such storage, number of the grade from which on it is needed to rebuild this one).
        since_time: From when on nobody else holds it, `NEVER` if that was not seen.
    """

    call: int
    taker: int
    place: int
    size: int
    work: int
    temporary: int
    also: tuple[int, ...]
    grade: int = field(compare=False)
    needs: tuple[tuple[int, int], ...] = field(compare=False)
    since_time: int = field(default=NEVER, compare=False)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HandingShape:
        """From plain data, as `dataclasses.asdict` makes it of one."""
        return cls(**{**data, "also": tuple(data["also"]), "needs": tuple(map(tuple, data["needs"]))})

    def with_holds_of(self, other: HandingShape) -> HandingShape:
        """Itself, or if others held it for longer in another step, or it was rebuilt from more: with that."""
        needs: dict[int, int] = {}
        for index, grade in (*self.needs, *other.needs):
            needs[index] = min(grade, needs.get(index, grade))
        found = (max(self.grade, other.grade), tuple(sorted(needs.items())), max(self.since_time, other.since_time))
        if found == (self.grade, self.needs, self.since_time):
            return self
        return replace(self, grade=found[0], needs=found[1], since_time=found[2])


def limits(needs: Sequence[Sequence[tuple[int, int]]], grades: Sequence[int]) -> list[int]:
    """Up to which grade each result is handed on; 0 if it is not.

    What is needed for another one is there only if it is not handed on itself: otherwise all of a chain of blocks would
    be there again when the last one's backward begins. So of a residual stream every other sum is handed on.

    Args:
        needs: For each result in order of the forward: (index of another, number of the grade from which on).
        grades: The least grade of each.

    Example:
        >>> limits([[], [(0, 1)], [(1, 1)], [(2, 4)]], [1, 1, 1, 1])
        [5, 0, 5, 3]
    """
    found: list[int] = []
    for before, grade in zip(needs, grades, strict=True):
        limit = min((number - 1 for index, number in before if index < len(found) and found[index]), default=PRODUCTS)
        found.append(min(limit, PRODUCTS) if limit >= grade else 0)
    return found


def common(paths: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What holds for every path that calls a unit whose result could be rebuilt: unit -> up to which grade it is.

    Args:
        paths: For each path: unit -> up to which grade its result is handed on, `NOT_TAKEN` where nobody would take it.

    Example:
        >>> common([{"a": 5, "b": 5}, {"a": 0, "b": NOT_TAKEN}])
        {'a': 0}
    """
    found: dict[str, int] = {}
    for path in paths:
        for unit, limit in path.items():
            found[unit] = min(limit, found.get(unit, PRODUCTS))
    return {unit: limit for unit, limit in found.items() if limit != NOT_TAKEN}
