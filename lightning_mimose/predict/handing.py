"""Results that lean units hand on: rebuilt, where the next unit would keep them, from what the unit saves itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_mimose.menu import PRODUCTS
from lightning_mimose.predict.shapes import NEVER

NOT_TAKEN = -1
"""In place of a grade: a unit's result is nothing that the next one saves, and that could be rebuilt."""


@dataclass(frozen=True)
class HandingShape:
    """A storage that one call returns and the next one saves, and that could be rebuilt.

    Attributes:
        call: Index of the call that returns it.
        taker: Index of the call that saves it.
        size: Column of its bytes.
        grade: The number of the least grade of lean saves that has it, from 1.
        work: Column of the operations that rebuilding takes.
        temporary: Column of the bytes that live besides while it is rebuilt.
        also: (number of a grade, column of the bytes that are rebuilt on the way from that grade on), in order.
        needs: (index of another such storage, number of the grade from which on it is needed to rebuild this one).
        since_time: From when on nobody else holds it, `NEVER` if that was not seen; no part of what makes two steps
            alike.
    """

    call: int
    taker: int
    size: int
    grade: int
    work: int
    temporary: int
    also: tuple[tuple[int, int], ...]
    needs: tuple[tuple[int, int], ...]
    since_time: int = field(default=NEVER, compare=False)

    @classmethod
    def of(cls, data: Mapping[str, object]) -> HandingShape:
        """From plain data, as `dataclasses.asdict` makes it of one."""
        pairs = {name: tuple(map(tuple, data[name])) for name in ("also", "needs")}  # type: ignore[call-overload]
        return cls(**{**data, **pairs})  # type: ignore[arg-type]

    def with_holds_of(self, other: HandingShape) -> HandingShape:
        """Itself, or if others held it for longer in another step: with that."""
        return self if other.since_time <= self.since_time else replace(self, since_time=other.since_time)

    def also_from(self, grade: int) -> int:
        """Column of the bytes that are rebuilt on the way in a grade; -1 for none."""
        return next((column for number, column in reversed(self.also) if number <= grade), -1)


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
