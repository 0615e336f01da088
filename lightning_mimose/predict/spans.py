"""Spans of values that lie apart, and which of them are around a value."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def are_apart(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether no two spans share a value.

    Args:
        spans: (least, largest value) of each.

    Example:
        >>> are_apart([(34, 60), (12, 30)]), are_apart([(12, 34), (34, 60)])
        (True, False)
    """
    return all(high < low for (_, high), (low, _) in pairwise(sorted(spans)))


def around(value: int, spans: Iterable[tuple[tuple[int, int], T]]) -> list[T]:
    """What the span around a value stands for, or those of the next smaller and larger ones; nothing if two overlap.

    Args:
        value: The value.
        spans: (span, what it stands for) of each.

    Example:
        >>> spans = [((12, 30), "once"), ((34, 60), "twice")]
        >>> around(20, spans), around(32, spans), around(80, spans)
        (['once', 'once'], ['once', 'twice'], ['twice'])
    """
    rising = sorted(spans, key=lambda each: each[0])
    if not are_apart(span for span, _ in rising):
        return []
    below = [item for (low, _), item in rising if low <= value]
    return below[-1:] + [item for (_, high), item in rising if high >= value][:1]
