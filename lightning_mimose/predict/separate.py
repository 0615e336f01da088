"""Whether sizes alone may tell two sorts of steps apart: batches of one make other operations than larger ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable

from lightning_mimose.sizes import BatchSize


def are_separate(sizes: Collection[Hashable], others: Collection[Hashable]) -> bool:
    """Whether all of some sizes lie on one side of all others in one dimension, or have other dimensions.

    Args:
        sizes: Some.
        others: The others.

    Limitations:
        Of sizes that are no `BatchSize` nothing is known.

    Example:
        >>> one, two, more = (BatchSize((("batch", n), ("tokens", t))) for n, t in ((1, 40), (1, 50), (3, 64)))
        >>> are_separate({one, two}, {more}), are_separate({one, more}, {two})
        (True, False)
    """
    spans, beside = _spans(sizes), _spans(others)
    if not spans or not beside:
        return False
    if {layout for layout, _ in spans}.isdisjoint(layout for layout, _ in beside):
        return True
    return any(
        max(values) < min(beside[place]) or min(values) > max(beside[place])
        for place, values in spans.items()
        if place in beside
    )


def _spans(sizes: Collection[Hashable]) -> dict[tuple[int, str], set[int]]:
    spans: dict[tuple[int, str], set[int]] = defaultdict(set)
    for size in sizes:
        if isinstance(size, BatchSize):
            for name, value in size.dims:
                spans[size.layout, name].add(value)
    return spans
