"""What units call inside themselves without gradients: moments of a step, as long as they are always the same."""

from __future__ import annotations


class Pieces:
    """Of every unit that is called without gradients, the units that it calls inside itself.

    One that calls others from time to time (a router's experts) would make every step another one by its moments, so it
    is taken as a whole from then on.

    Example:
        >>> pieces = Pieces()
        >>> for _ in range(2):
        ...     pieces.begin("block")
        ...     print(pieces.is_one("block.mlp"), pieces.is_one("other.mlp"))
        True False
        True False
        >>> for _ in range(2):
        ...     pieces.begin("block")
        ...     print(pieces.is_one("block.expert"))
        True
        False
    """

    def __init__(self) -> None:
        self._usual: dict[str, list[str]] = {}
        self._varying: set[str] = set()
        self._around: str | None = None
        self._inside: list[str] = []

    def begin(self, unit: str) -> None:
        """A unit is called, of which nothing is around."""
        self.end()
        self._around, self._inside = unit, []

    def is_one(self, name: str) -> bool:
        """Whether a unit that is called is a moment of its own: inside the one that began, which calls no others."""
        if self._around is None or not name.startswith(f"{self._around}."):
            return False
        self._inside.append(name)
        return self._around not in self._varying

    def cut_short(self) -> None:
        """The step ended where it was, or runs again: what is still missing says nothing."""
        self._around = None

    def end(self) -> None:
        """Nothing more is inside: another unit begins, or another step."""
        if self._around is not None and self._inside != self._usual.setdefault(self._around, self._inside):
            self._varying.add(self._around)
        self._around = None
