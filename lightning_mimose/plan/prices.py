"""What a byte costs at the positions that bind: Lagrange multipliers, and the bound they prove.

With a price per byte at every position over the budget, what each option saves has a price too, and the best pick is
found unit by unit. Its value bounds the cheapest plan from below; the prices climb to where that bound is highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.plan.exchange import Search
from lightning_mimose.plan.structure import NONE, Floats, Ints, Structure

STEPS = 60
"""Price updates; the bound is within a few per mille by then."""

LEAST_STEP = 0.1
"""The first step is 1; halved whenever the bound stops rising. Below this, further steps find next to nothing."""

CLOSE_ENOUGH = 1e-4
"""Relative distance to the bound at which the search stops."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Where the prices ended.

    Attributes:
        bound: No pick that fits adds fewer seconds (for the holds that were assumed).
        prices: Shape (active,); seconds per byte at the active positions of the search.
        picks: Picks seen on the way that nearly fit, the most promising first.
    """

    bound: float
    prices: Floats
    picks: tuple[Ints, ...]


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
        return Priced(bound, np.zeros(0), (pick,))

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
    looked_at: set[bytes] = set()
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
        if (count % 4 == 0 or excess < 0.02) and pick.tobytes() not in looked_at:
            search.take(pick)
            if search.activate(search._bare + charge):
                missing, gains = need(), search.gains
                short = missing - gains[chosen].sum(axis=0)
                prices, best_prices = np.append(prices, 0.0), np.append(best_prices, 0.0)
                direction = np.append(direction, 0.0)
            else:  # nor will there be: where many units are alike, two picks take turns
                looked_at.add(pick.tobytes())
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
    _, pick = structure.cheapest(cost - gains @ best_prices)
    near.sort(key=lambda entry: entry[:2])
    return Priced(best_bound, best_prices, (pick, *(entry[2] for entry in near[:3])))


def proven(search: Search, prices: Floats) -> tuple[float, Floats]:
    """What prices prove: no pick that fits adds fewer seconds than the first.

    Args:
        search: Names the positions, the budget and the timeline.
        prices: Shape (active or fewer,); seconds per byte, none of them negative.

    Returns:
        That, and what every option costs at these prices, shape (options,).
    """
    known = search.active[: len(prices)]
    # Holds only ever add bytes: a bound that leaves them out is a bound.
    missing = (search.timeline.base_bytes[known] - search.budget).astype(np.float64)
    reduced: Floats = search.structure.cost - search.gains[:, : len(prices)] @ prices
    least, _ = search.structure.cheapest(reduced)
    return least + float(prices @ missing), reduced


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
