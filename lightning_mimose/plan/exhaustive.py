"""Every plan there is, where there are few: a small model has its best plan in less time than HiGHS takes to begin.

Which options can be taken together is the same for every size. What each pick of them costs is one product; positions
enter when the best pick by then breaks them, as in `optimal.py`, so that of thousands of levels a handful is added up.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lightning_mimose.plan.structure import Floats, Ints, forest_of
from lightning_mimose.predict.timeline import Timeline

MOST_PICKS, MOST_ENTRIES = 1 << 13, 1 << 18
"""Picks up to which all are looked at, and times options: one position takes as many additions as that."""


class Every:
    """Every pick of a timeline's options, the fastest first.

    Args:
        timeline: What there is to choose from. It has positions.
        picks: Shape (picks, options); 1 where an option is taken.

    Example:
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 9, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> every = Every.of(timeline)
        >>> every.fastest(21).tolist(), every.fastest(12), every.smallest().tolist()
        ([1], None, [0, 1])
    """

    def __init__(self, timeline: Timeline, picks: Floats) -> None:
        seconds = picks @ np.array([option.added_seconds for option in timeline.options])
        self._timeline = timeline
        self._picks = picks[np.argsort(seconds, kind="stable")]
        # No pick's peak is lower than this: its level at the positions that have entered.
        self._most_bytes = np.full(len(picks), -np.inf)
        self._enter(int(timeline.base_bytes.argmax()))

    @classmethod
    def of(cls, timeline: Timeline) -> Every | None:
        """All of them; None where they are too many to look at."""
        return cls(timeline, picks) if len(picks := _picks_of(timeline)) else None

    def fastest(self, budget_bytes: int) -> Ints | None:
        """The options of the fastest pick that fits; None if none does."""
        while bool((fits := self._most_bytes <= budget_bytes).any()):
            chosen = self._options(int(fits.argmax()))
            level = self._timeline.level_bytes(chosen)
            if int(level.max()) <= budget_bytes:
                return chosen
            self._enter(int(level.argmax()))
        return None

    def smallest(self) -> Ints:
        """The options of the pick with the least peak; of several, of the fastest."""
        while True:
            row = int(self._most_bytes.argmin())
            chosen = self._options(row)
            level = self._timeline.level_bytes(chosen)
            if int(level.max()) <= self._most_bytes[row]:
                return chosen
            self._enter(int(level.argmax()))

    def _options(self, row: int) -> Ints:
        return np.flatnonzero(self._picks[row])

    def _enter(self, position: int) -> None:
        """Let a position in: every pick's level there. Bytes are far below 2**53, so that none is rounded."""
        timeline = self._timeline
        level = int(timeline.base_bytes[position]) - self._picks @ timeline.relief_bytes[:, position].astype(np.float64)
        for hold in timeline.shared:
            # Masks are nested: a position is held by the first so many holders.
            holders = list(hold.holders[: int(hold.mask[:, position].sum())])
            level += hold.size_bytes * self._picks[:, holders].any(axis=1)
        self._most_bytes = np.maximum(self._most_bytes, level)


def are_few(timeline: Timeline) -> bool:
    """Whether every plan can be looked at."""
    return len(_picks_of(timeline)) > 0


def _picks_of(timeline: Timeline) -> Floats:
    if not len(timeline.base_bytes):
        return np.zeros((0, len(timeline.options)))
    return _every_pick(timeline.parents, tuple(option.unit for option in timeline.options))


@lru_cache(maxsize=4)
def _every_pick(parents: tuple[int, ...], unit_of: tuple[int, ...]) -> Floats:
    """Every antichain of options: shape (picks, options), 1 where one is taken. None at all if they are too many."""
    # A unit is kept, and those inside of it take any pick of theirs, or it takes one of its own options.
    lowest_first = [unit for level in reversed(forest_of(parents).levels) for unit in level.tolist()]
    own: list[list[int]] = [[] for _ in parents]
    for option, unit in enumerate(unit_of):
        own[unit].append(option)
    count = [1 for _ in (*parents, -1)]
    for unit in lowest_first:
        count[parents[unit]] *= count[unit] + len(own[unit])
        if count[parents[unit]] > min(MOST_PICKS, MOST_ENTRIES // max(1, len(unit_of))):
            return np.zeros((0, len(unit_of)))
    picks = [np.zeros((1, len(unit_of))) for _ in (*parents, -1)]
    for unit in lowest_first:
        these = np.concatenate([picks[unit], np.eye(len(unit_of))[own[unit]]])
        above = picks[parents[unit]]
        picks[parents[unit]] = (above[:, None] + these).reshape(len(above) * len(these), len(unit_of))
    return picks[-1]
