"""Where to start from: what was found for sizes nearly the same, so that a new one takes a fraction of a search.

Batches whose sizes vary in two ways are hardly ever of a size that was planned before, and a search takes as long as
its plan could be faster. A pick for a neighbouring size, made to fit and bettered by a few exchanges, is within a per
cent or two of what a search finds; its prices bound what is missed. Nothing is believed of what it was made for: pick
and prices are guesses, which are judged on the timeline at hand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from heapq import nsmallest
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import numpy as np

from lightning_mimose.plan.exchange import Search
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.prices import proven
from lightning_mimose.plan.structure import NONE, Floats, Ints, Structure
from lightning_mimose.predict.timeline import Timeline

KNOWN = 64
"""Problems that are remembered, the oldest forgotten first."""

NEAREST = 3
"""Of them, how many are started from."""

FITTED_SECONDS = 1.5e-3
"""After so long no further start is made to fit: the nearest ones come first, and a search may have to follow. The one
that fits best is bettered for as long again."""

ROUNDS = 4
"""The most exchanges that follow."""

ENOUGH_SECONDS = 0.01
"""What may be missed at most by the bound: about as long as a search takes, and several times what is missed."""


@dataclass(frozen=True, eq=False)
class _Start:
    """What was found for one problem.

    Attributes:
        forest: The timeline's units, and their parents.
        choices: (unit, action) of those that act.
        active: The positions that mattered, see `Timeline.names`.
        prices: Shape (active,); seconds per byte there.
    """

    forest: tuple[tuple[str, ...], tuple[int, ...]]
    choices: tuple[tuple[str, str], ...]
    active: tuple[tuple[str, int], ...]
    prices: Floats

    def pick(self, timeline: Timeline) -> Ints:
        """The same on another timeline, but for what cannot be chosen there."""
        pick = np.full(len(timeline.units), NONE, dtype=np.intp)
        for choice in self.choices:
            option = timeline.option_index.get(choice)
            if option is not None:
                pick[timeline.options[option].unit] = option
        return pick

    def placed(self, timeline: Timeline) -> tuple[list[int], Floats]:
        """The positions that mattered, those of another timeline that are called the same, and the prices there."""
        place_of = {name: place for place, name in enumerate(timeline.names)}
        priced = zip(self.active, self.prices.tolist(), strict=True)
        found = {place_of[name]: price for name, price in priced if name in place_of}
        return list(found), np.array(list(found.values()), dtype=np.float64)


class Started(NamedTuple):
    """What a start has led to.

    Attributes:
        pick: The pick, which fits.
        seconds: What it adds to the step.
        bound: No pick that fits adds less.
    """

    pick: Ints
    seconds: float
    bound: float

    @property
    def is_enough(self) -> bool:
        """Whether it is so near to the best one that to search for that would take longer than it could save."""
        return self.seconds - self.bound <= ENOUGH_SECONDS


class Starts:
    """Remembers what was found, and starts from it.

    Example:
        >>> from lightning_mimose.predict.timeline import Option
        >>> def timeline(size):
        ...     return Timeline(
        ...         units=("a", "b"), parents=(-1, -1),
        ...         options=(Option(0, "recompute", 1e-3 * size), Option(1, "recompute", 2e-3 * size)),
        ...         base_bytes=size * np.array([10, 30, 20]), relief_bytes=size * np.array([[0, 8, 0], [0, 9, 0]]),
        ...         shared=(), labels=("forward a", "backward b", "backward a"))
        >>> starts = Starts()
        >>> starts.pick(timeline(4), 100) is None
        True
        >>> search = Search(timeline(3), Structure.of(timeline(3)), 80)
        >>> search.take(np.array([0, -1]))
        >>> search.activate(timeline(3).base_bytes)
        True
        >>> starts.learn(search, np.array([1e-4]))
        >>> starts.pick(timeline(4), 100).pick.tolist()
        [0, -1]
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], _Start] = OrderedDict()
        """By the bytes that were needed, and those that there were."""
        self._lock = Lock()

    def __len__(self) -> int:
        """How many problems are known."""
        return len(self._known)

    def pick(self, timeline: Timeline, budget_bytes: int) -> Started | None:
        """A pick that fits; None where none is to be had at once."""
        here = _needed(timeline), budget_bytes
        forest = timeline.units, timeline.parents
        with self._lock:
            known = [each for each in self._known.items() if each[1].forest == forest]
        nearest = nsmallest(NEAREST, known, key=lambda each: abs(each[0][0] - here[0]) + abs(each[0][1] - here[1]))
        starts = [start for _, start in nearest]
        if not starts:
            return None
        search = Search(timeline, Structure.of(timeline), budget_bytes)
        active, prices = starts[0].placed(timeline)
        search.watch(active)
        best: Ints | None = None
        seconds, until = np.inf, perf_counter() + FITTED_SECONDS
        for start in starts:
            if best is not None and perf_counter() > until:
                break
            search.take(start.pick(timeline))
            if search.seconds < seconds and search.repair() and search.seconds < seconds:
                best, seconds = search.pick, search.seconds
        if best is None:
            return None
        search.take(best)
        search.until = perf_counter() + FITTED_SECONDS
        search.improve(prices, rounds=ROUNDS)
        bound, _ = proven(search, prices)
        started = Started(search.pick, search.seconds, bound)
        if started.is_enough:
            self.learn(search, prices)
        return started

    def learn(self, search: Search, prices: Floats) -> None:
        """Remember what a search has found.

        Args:
            search: The search, with what it has found as its pick.
            prices: Shape (active or fewer,); seconds per byte at its active positions.
        """
        timeline, options = search.timeline, search.pick[search.pick >= 0].tolist()
        choices = [(timeline.units[timeline.options[i].unit], timeline.options[i].action) for i in options]
        padded = np.append(prices, np.zeros(len(search.active) - len(prices)))
        active = tuple(timeline.names[place] for place in search.active)
        start = _Start((timeline.units, timeline.parents), tuple(choices), active, padded)
        with self._lock:
            self._known[_needed(timeline), search.budget] = start
            self._known.move_to_end((_needed(timeline), search.budget))
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)

    def better(self, timeline: Timeline, budget_bytes: int, plan: Plan) -> None:
        """Somebody has found a better plan for a problem; from any thread."""
        here = _needed(timeline), budget_bytes
        with self._lock:
            if here in self._known:
                self._known[here] = replace(self._known[here], choices=plan.choices)


def _needed(timeline: Timeline) -> int:
    return int(timeline.base_bytes.max(initial=0))
