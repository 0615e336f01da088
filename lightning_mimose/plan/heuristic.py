"""A plan within a per cent of the best one, in milliseconds: Lagrangian prices, repair, exchanges.

Every position over the budget gets a price per byte. At given prices the best pick is found unit by unit, its value
bounds the best plan from below, and the prices move towards where that bound is highest. The picks seen on the way
nearly fit; `Search` makes them fit and then exchanges options while that saves time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.plan.exchange import LEAST_GAIN, NO_SPLITS, Search, Splits
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.structure import NONE, Floats, Incumbent, Ints, Structure, best_incumbent, plan_of
from lightning_mimose.predict.timeline import Timeline

STEPS = 60
"""Price updates; the bound is within a few per mille by then."""

LEAST_STEP = 0.1
"""The first step is 1; halved whenever the bound stops rising. Below this, further steps find next to nothing."""

WORTH_KICKING = 4e-3
"""Relative distance to the bound above which a finished pick is disturbed and improved again."""

KICKS = 8
"""How often; only small problems are ever that far from their bound, where a kick takes half a millisecond."""

LARGE = 600
"""Options above which less is tried: one choice more or less matters little among hundreds."""

CLOSE_ENOUGH = 1e-4
"""Relative distance to the bound at which the search stops."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Where the prices ended.

    Attributes:
        bound: No pick that fits adds fewer seconds (for the holds that were assumed).
        prices: Shape (active,); seconds per byte at the active positions of the search.
        picks: Picks seen on the way that nearly fit, the most promising first.
        loss: Shape (options,); by how much the bound rises when an option is forced into the pick.
    """

    bound: float
    prices: Floats
    picks: tuple[Ints, ...]
    loss: Floats


def price(search: Search, charge: NDArray[np.int64], banned: Ints, upper: float = np.inf) -> Priced:
    """Find the prices of the positions that bind.

    Args:
        search: Its active positions grow by those that are found to bind; its pick changes.
        charge: Shape (positions,); bytes assumed to be alive besides (holds).
        banned: Options assumed to be out of the question.
        upper: Seconds of a known plan that fits.
    """
    structure, cost = search.structure, search.structure.cost.copy()
    cost[banned] = np.inf
    search.take(np.full_like(search.pick, NONE))
    search.activate(search.timeline.base_bytes + charge)
    if not search.active:
        bound, pick = structure.cheapest(cost)
        return Priced(bound, np.zeros(0), (pick,), structure.forced_loss(cost))

    def need() -> Floats:
        return (search.timeline.base_bytes + charge - search.budget)[search.active].astype(np.float64)

    # A first price from the densities: what the last option needed would cost per byte of the first position.
    missing, gains = need(), search.gains
    density = np.sort(cost[gains[:, 0] > 0] / gains[gains[:, 0] > 0, 0])
    scale = float(np.median(density[np.isfinite(density)])) if np.isfinite(density).any() else 1.0
    prices = np.zeros(len(missing))
    prices[0] = _line_search(structure, cost, gains[:, 0], float(missing[0]), max(scale, 1e-18))
    best_bound, best_prices, best_at = -np.inf, prices, 0
    near: list[tuple[float, int, Ints]] = []
    step, direction = 1.0, np.zeros(len(prices))
    for count in range(STEPS):
        bound, pick = structure.cheapest(cost - gains @ prices)
        bound += float(prices @ missing)
        chosen = pick[pick >= 0]
        short = missing - gains[chosen].sum(axis=0)
        if count == 0 or bound > best_bound + 1e-9 * abs(best_bound):
            best_bound, best_prices, best_at = bound, prices, count
        elif count - best_at >= 5:
            step, best_at, prices = step / 2, count, best_prices
            if step < LEAST_STEP:
                break
        excess = float(np.maximum(short / np.maximum(np.abs(missing), 1.0), 0.0).max())
        near.append((excess, count, pick))
        if count % 4 == 0 or excess < 0.02:
            search.take(pick)
            if search.activate(search._bare + charge):
                missing, gains = need(), search.gains
                short = missing - gains[chosen].sum(axis=0)
                prices, best_prices = np.append(prices, 0.0), np.append(best_prices, 0.0)
                direction = np.append(direction, 0.0)
        value = float(cost[chosen].sum())
        if excess <= 0 and bool((short <= 0).all()):
            upper = min(upper, value)
        target = min(upper, bound + max(0.05 * abs(bound), 1e-9))
        if target - best_bound <= CLOSE_ENOUGH * abs(target):
            break
        # Positions at price 0 with slack cannot fall further: they must not shorten everybody's step.
        slope = np.where((prices <= 0) & (short < 0), 0.0, short)
        direction = np.where((prices <= 0) & (direction < 0), 0.0, 0.7 * slope + 0.3 * direction)
        length = float(direction @ direction)
        if length == 0:
            break
        prices = np.maximum(prices + step * (target - bound) / length * direction, 0.0)
    reduced = cost - gains @ best_prices
    _, pick = structure.cheapest(reduced)
    near.sort(key=lambda entry: entry[:2])
    return Priced(best_bound, best_prices, (pick, *(entry[2] for entry in near[:3])), structure.forced_loss(reduced))


def _line_search(structure: Structure, cost: Floats, gain: Floats, missing: float, scale: float) -> float:
    """The price of a single position at which its best pick just covers what is missing."""

    def covers(price: float) -> bool:
        _, pick = structure.cheapest(cost - price * gain)
        return float(gain[pick[pick >= 0]].sum()) >= missing

    low, high = 0.0, scale
    for _ in range(30):
        if covers(high):
            break
        low, high = high, high * 4
    else:
        return scale  # nothing covers it: some price, so that the search goes on to the repair
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high


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

    def bound(self, timeline: Timeline) -> tuple[float, Floats]:
        """No pick that fits adds fewer seconds than the first; with an option forced into it, by that much more."""
        search = self.search
        prices = np.append(self.prices, np.zeros(len(search.active) - len(self.prices)))
        # Holds only ever add bytes: a bound that leaves them out is a bound.
        missing = (timeline.base_bytes[search.active] - search.budget).astype(np.float64)
        reduced = search.structure.cost - search.gains @ prices
        least, _ = search.structure.cheapest(reduced)
        return least + float(prices @ missing), search.structure.forced_loss(reduced)


def solve(timeline: Timeline, budget_bytes: int) -> Found:
    """The heuristic: for each assumption on the holds the prices, then repair and exchanges from several starts."""
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
        for start in starts[: 2 if large else None]:
            search.take(start)
            if not search.repair():
                continue
            search.improve(priced.prices, splits, rounds)
            if search.seconds < best_seconds:
                best, best_seconds = search.pick, search.seconds
            if best_seconds - priced.bound <= (WORTH_KICKING if large else CLOSE_ENOUGH) * abs(best_seconds):
                break
        if not large and best is not None and best_seconds - priced.bound > WORTH_KICKING * abs(best_seconds):
            best, best_seconds = _kicked(search, priced, splits, best, best_seconds)
    if best is None:
        pick = least_peak_pick(timeline, structure, budget_bytes)
        search.take(pick)
        if not search.activate() and int(search.level().max(initial=0)) <= budget_bytes:
            search.improve(np.zeros(len(search.active)))
            best = search.pick
    return Found(best, search, prices)


def _kicked(search: Search, priced: Priced, splits: Splits, best: Ints, best_seconds: float) -> tuple[Ints, float]:
    """Force into the best pick, one at a time, the options that the bound says least against; improve each result."""
    promising = np.flatnonzero(priced.loss < best_seconds - priced.bound)
    promising = promising[np.argsort(priced.loss[promising], kind="stable")]
    tried = 0
    for option in promising.tolist():
        if best[search.structure.unit[option]] == option:
            continue
        pick = best.copy()
        search.structure.act(pick, option)
        search.take(pick)
        if search.repair():
            search.improve(priced.prices, splits, rounds=8)
            if search.seconds < best_seconds - LEAST_GAIN:
                best, best_seconds = search.pick, search.seconds
        tried += 1
        if tried == KICKS:
            break
    return best, best_seconds


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


def least_peak_pick(timeline: Timeline, structure: Structure, enough_bytes: int = -1) -> Ints:
    """Lower the peak step by step, from everything kept, until no single option lowers it.

    Args:
        timeline: What there is.
        structure: Its structure.
        enough_bytes: Stop at this peak.
    """
    best = np.full(len(timeline.units), NONE, dtype=np.intp)
    best_peak = int(timeline.level_bytes(best[best >= 0]).max(initial=0))
    search = Search(timeline, structure, best_peak)
    # One option alone may relieve nothing, because of what it holds; all that relieve the peak together may.
    _, most = structure.cheapest(-timeline.relief_bytes[:, int(timeline.base_bytes.argmax())].astype(np.float64))
    low, high = max(enough_bytes, 0), best_peak
    # Bisect on a budget: repairing towards one budget moves all its positions together.
    for _ in range(40):
        if high <= low:
            break
        search.budget = (low + high) // 2
        for start in (best, most):
            search.take(start)
            fits = search.repair()
            if fits:
                break
        if fits:
            best, best_peak = search.pick, int(search.level().max(initial=0))
            high = best_peak
        else:
            low = search.budget + 1
        if high - low <= 0.0005 * high and enough_bytes < low:
            break
    return best


def plan_heuristic(timeline: Timeline, budget_bytes: int, incumbents: Sequence[Incumbent] = ()) -> Plan | None:
    """A plan that fits the budget, usually within a per cent of the cheapest; deterministic.

    Args:
        timeline: What the step would hold, and the options there are.
        budget_bytes: What no position may exceed.
        incumbents: Plans known already, for smaller budgets for instance. The result is never slower than one of
            them that fits.

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
    pick = solve(timeline, budget_bytes).pick
    plan = None if pick is None else plan_of(timeline, pick[pick >= 0])
    better = best_incumbent(timeline, budget_bytes, incumbents, np.inf if plan is None else plan.added_seconds)
    return plan if better is None else better
