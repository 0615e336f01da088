"""A plan within a per cent of the best one, in milliseconds: prices, repair, exchanges.

The picks that are best at the prices of `prices.py` nearly fit. `Search` makes them fit, and then exchanges options
for as long as that saves time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.plan.exchange import NO_SPLITS, Search, Splits
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.prices import CLOSE_ENOUGH, price, proven
from lightning_mimose.plan.starts import Starts
from lightning_mimose.plan.structure import NONE, Floats, Incumbent, Ints, Structure, best_incumbent, plan_of
from lightning_mimose.predict.timeline import Timeline

PROBES = 600
"""Where no usual way leads to a plan, smaller budgets are tried: this many divided by the number of options."""

GOOD_ENOUGH = 4e-3
"""Relative distance to the bound at which a large problem is left alone."""

FAR = 0.25
"""A start that costs this much more than the best plan by then is not improved any more."""

QUICK_SECONDS = 3e-3
"""After so long training does not wait for better plans that the thread beside it finds as well."""

LITTLE_SECONDS = 0.1
"""Where more than this could be saved, it does."""

LARGE = 600
"""Options above which less is tried: one choice more or less matters little among hundreds."""


def _assumptions(timeline: Timeline) -> Iterator[tuple[NDArray[np.int64], Ints]]:
    """What to assume of the shared holds, which no price per option can express: all paid for, or none ever held."""
    charge = np.zeros(len(timeline.base_bytes), dtype=np.int64)
    nobody = np.zeros(0, dtype=np.intp)
    if timeline.shared:
        yield charge, np.unique(np.concatenate([np.array(hold.holders, dtype=np.intp) for hold in timeline.shared]))
        for hold in timeline.shared:
            charge = charge + hold.size_bytes * hold.mask[0]
    yield charge, nobody


@dataclass(frozen=True, eq=False)
class Found:
    """The best pick found, or None, the search with the positions that mattered, and their prices."""

    pick: Ints | None
    search: Search
    prices: Floats

    def bound(self) -> tuple[float, Floats]:
        """No pick that fits adds fewer seconds than the first; with an option forced into it, by that much more."""
        least, reduced = proven(self.search, self.prices)
        return least, self.search.structure.forced_loss(reduced)


def solve(timeline: Timeline, budget_bytes: int, until: float = np.inf) -> Found:
    """The heuristic: for each assumption on the holds the prices, then repair and exchanges from several starts.

    Args:
        timeline: What there is.
        budget_bytes: What no position may exceed.
        until: Of `time.perf_counter()`: when what is found has to do, unless much could still be saved.
    """
    structure = Structure.of(timeline)
    search = Search(timeline, structure, budget_bytes)
    large = len(timeline.options) > LARGE
    rounds = max(6, min(30, 10000 // len(timeline.options)))
    best: Ints | None = None
    best_seconds, prices = np.inf, np.zeros(0)
    for charge, banned in _assumptions(timeline):
        priced = price(search, charge, banned, best_seconds)
        prices = priced.prices
        splits = _splits(structure, structure.cost - search.gains[:, : len(priced.prices)] @ priced.prices)
        starts: list[Ints] = []
        for pick in priced.picks:
            if not any(np.array_equal(pick, known) for known in starts):
                starts.append(pick)
        repaired: list[tuple[float, int, Ints]] = []
        all_fit = True
        for tried, start in enumerate(starts):
            # Of a large problem's only two, but one that does not fit yet: what fits at once may do far too much.
            if large and tried > 1 and not all_fit:
                break
            search.take(start)
            fits = not (search.level() > budget_bytes).any()
            if large and tried > 1 and fits:
                continue
            all_fit &= fits
            if search.repair():
                repaired.append((search.seconds, len(repaired), search.pick))
        for seconds, _, pick in sorted(repaired, key=lambda entry: entry[:2]):
            # Where many units are alike, one start may have them all act that need not: exchanges come too late.
            if seconds - best_seconds > FAR * abs(best_seconds):
                break
            search.take(pick)
            search.until = until if seconds - priced.bound <= LITTLE_SECONDS else np.inf
            search.improve(priced.prices, splits, rounds)
            if search.seconds < best_seconds:
                best, best_seconds = search.pick, search.seconds
            missed = best_seconds - priced.bound
            if missed <= (GOOD_ENOUGH if large else CLOSE_ENOUGH) * abs(best_seconds):
                break
            if missed <= LITTLE_SECONDS and perf_counter() > until:
                return Found(best, search, prices)
    if best is None:
        pick = least_peak_pick(timeline, structure, budget_bytes, steps=4 if large else 20)
        search.take(pick)
        if not search.activate() and int(search.level().max(initial=0)) <= budget_bytes:
            search.improve(np.zeros(len(search.active)))
            best = search.pick
    return Found(best, search, prices)


def _splits(structure: Structure, reduced: Floats) -> Splits:
    """For every unit with units inside: what those would take at these prices if the unit itself took nothing."""
    units: list[int] = []
    options: list[Ints] = []
    first, end = structure.spans
    price = reduced.copy()
    for level in structure.levels[:-1]:
        price[np.isin(structure.unit, level)] = np.inf
        _, pick = structure.cheapest(price)
        acting = np.flatnonzero(pick >= 0)
        acting = acting[np.argsort(first[acting])]
        low, high = np.searchsorted(first[acting], [first[level], end[level]])
        for unit, start, stop in zip(level.tolist(), low.tolist(), high.tolist(), strict=True):
            if stop > start:
                units.append(unit)
                options.append(pick[acting[start:stop]])
    if not units:
        return NO_SPLITS
    start = np.cumsum([0, *(len(inside) for inside in options[:-1])])
    return Splits(np.array(units), np.concatenate(options), start)


def _first_repaired(search: Search, starts: Sequence[Ints]) -> bool:
    """Repair one start after the other until one fits; the search is left there."""
    for start in starts:
        search.take(start)
        if search.repair():
            return True
    return False


def least_peak_pick(timeline: Timeline, structure: Structure, enough_bytes: int = -1, steps: int = 20) -> Ints:
    """Bisect on the budget for the least one that a repair reaches.

    Args:
        timeline: What there is.
        structure: Its structure.
        enough_bytes: Stop at this peak, or where it is known to be out of reach.
        steps: The most bisections.
    """
    best = np.full(len(timeline.units), NONE, dtype=np.intp)
    high = int(timeline.base_bytes.max(initial=0))
    search = Search(timeline, structure, high)
    low, most = _most_relieved(timeline, structure)
    bound = low

    for _ in range(steps):
        if high <= enough_bytes or bound > max(enough_bytes, 0) > 0 or high - low <= 0.0005 * high:
            break
        search.budget = (low + high) // 2
        # One option alone may relieve nothing, because of what it holds: so start from many at once too.
        if _first_repaired(search, (best, most)) or any(
            _first_repaired(search, price(search, charge, banned).picks) for charge, banned in _assumptions(timeline)
        ):
            best, high = search.pick, int(search.level().max(initial=0))
        else:
            low = search.budget + 1
    if bound <= enough_bytes < high:
        # A repair may fail for one budget and succeed for a smaller one, where it starts from other prices.
        for share in np.linspace(1.0, 0.0, min(12, PROBES // len(timeline.options)), endpoint=False).tolist():
            search.budget = bound + int(share * (enough_bytes - bound))
            if any(_first_repaired(search, price(search, *each).picks) for each in _assumptions(timeline)):
                return search.pick
    return best


def _most_relieved(timeline: Timeline, structure: Structure) -> tuple[int, Ints]:
    """A bound from below for the peak of any pick, and the pick that relieves most where it comes from.

    At one position by itself the most that any pick relieves is easily found: no peak is lower than what is left.
    """
    low, most = 0, np.full(len(timeline.units), NONE, dtype=np.intp)
    for position in np.argsort(-timeline.base_bytes, kind="stable")[:: max(1, len(timeline.base_bytes) // 8)].tolist():
        relieved, pick = structure.cheapest(-timeline.relief_bytes[:, position].astype(np.float64))
        if int(timeline.base_bytes[position] + relieved) > low:
            low, most = int(timeline.base_bytes[position] + relieved), pick
    return low, most


def least_peak_bound(timeline: Timeline) -> int:
    """No plan has a lower peak than this, in bytes."""
    return _most_relieved(timeline, Structure.of(timeline))[0]


def _started(timeline: Timeline, budget_bytes: int, starts: Starts) -> Ints | None:
    """The pick that a start leads to, or a search where that could find a better one in reasonable time."""
    until = perf_counter() + QUICK_SECONDS
    started = starts.pick(timeline, budget_bytes)
    if started is not None and started.is_enough:
        return started.pick
    if started is not None and started.seconds - started.bound <= LITTLE_SECONDS and perf_counter() > until:
        return started.pick
    found = solve(timeline, budget_bytes, until)
    if found.pick is None:
        return None if started is None else started.pick
    found.search.take(found.pick)
    starts.learn(found.search, found.prices)
    return started.pick if started is not None and started.seconds < found.search.seconds else found.pick


def plan_heuristic(
    timeline: Timeline, budget_bytes: int, incumbents: Sequence[Incumbent] = (), starts: Starts | None = None
) -> Plan | None:
    """A plan that fits the budget, usually within a per cent of the cheapest; deterministic without `starts`.

    Args:
        timeline: What the step would hold, and the options there are.
        budget_bytes: What no position may exceed.
        incumbents: Plans known already, for smaller budgets for instance. The result is never slower than one of
            them that fits.
        starts: What was found for other sizes; a plan that is near enough to the cheapest is then found at once, and
            what is found in a few milliseconds has to do.

    Returns:
        The plan, or None when none was found (`plan_exact` knows whether there is one).

    Example:
        >>> import numpy as np
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 9, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> plan_heuristic(timeline, 22).choices
        (('a', 'recompute'),)
    """
    if not timeline.options or int(timeline.base_bytes.max(initial=0)) <= budget_bytes:
        nothing = np.zeros(0, dtype=np.intp)
        fits = int(timeline.base_bytes.max(initial=0)) <= budget_bytes
        if not timeline.options or all(option.added_seconds >= 0 for option in timeline.options):
            return plan_of(timeline, nothing) if fits else None
    pick = solve(timeline, budget_bytes).pick if starts is None else _started(timeline, budget_bytes, starts)
    plan = None if pick is None else plan_of(timeline, pick[pick >= 0])
    better = best_incumbent(timeline, budget_bytes, incumbents, np.inf if plan is None else plan.added_seconds)
    return plan if better is None else better
