"""What a model is called with in one step, and whether later calls follow from the first."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mimose.dims import Leaf

Shape = tuple[int, ...]

MOST_ENTRIES = 4
"""Calls of a step that are told apart; a loop that calls its model more often (a decoder's) has no such size."""
MOST_PAIRS = 8
"""Different pairs of shapes that are remembered of a later call."""


class Entries:
    """The calls of one step, and what those of earlier steps were like."""

    def __init__(self) -> None:
        self._leaves: list[Sequence[Leaf]] = []
        self._pairs: dict[tuple[int, str], list[tuple[Shape, Shape]]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._leaves.clear()

    def forget(self) -> None:
        """What earlier steps were like is no longer to be compared."""
        self._pairs.clear()

    def __len__(self) -> int:
        """How many calls the step has made so far, of those that count."""
        return len(self._leaves)

    def add(self, leaves: Sequence[Leaf]) -> bool:
        """The model is called with these tensors; returns whether that call counts."""
        if len(self._leaves) < MOST_ENTRIES:
            self._leaves.append(leaves)
            return True
        return False

    def follows(self, module: str) -> bool:
        """Whether the shape of what a module was given just now follows from the first call's, as far as is known."""
        pairs = self._pairs.setdefault((len(self._leaves), module), [])
        pair = _first_shape(self._leaves[0]), _first_shape(self._leaves[-1])
        if pair in pairs:
            return True
        if not follows([*pairs, pair]):
            return False
        if len(pairs) < MOST_PAIRS:
            pairs.append(pair)
        return True

    def together(self) -> list[Leaf]:
        """The tensors of all calls, those of later ones by the number of the call."""
        later = [(f"{i}.{path}", shape) for i, leaves in enumerate(self._leaves[1:], 2) for path, shape in leaves]
        return [*self._leaves[0], *later] if self._leaves else []


def follows(pairs: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether second shapes follow from first ones: every axis is constant, or linear in one of the first's.

    Args:
        pairs: (first, second) of several steps. An axis may be off by one, where something was rounded.

    Example:
        >>> follows([((8, 20), (8, 10)), ((8, 31), (8, 15)), ((4, 40), (4, 20))])  # half as many tokens
        True
        >>> follows([((8, 20), (8, 30)), ((8, 31), (8, 12)), ((8, 40), (8, 25))])
        False
    """
    if len({(len(first), len(second)) for first, second in pairs}) > 1:
        return False
    firsts, seconds = zip(*pairs, strict=True)
    return all(
        max(values) == min(values) or any(_on_a_line(axis, values) for axis in zip(*firsts, strict=True))
        for values in zip(*seconds, strict=True)
    )


def _first_shape(leaves: Sequence[Leaf]) -> Shape:
    return next(shape for _, shape in leaves if shape)


def _on_a_line(xs: Sequence[int], ys: Sequence[int]) -> bool:
    (low, start), (high, end) = min(zip(xs, ys, strict=True)), max(zip(xs, ys, strict=True))
    if low == high:
        return False
    slope = (end - start) / (high - low)
    return all(abs(start + slope * (x - low) - y) <= 1 for x, y in zip(xs, ys, strict=True))
