"""How a budget is shared so that nobody has to wait: everyone's floor first, the rest by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """What one job has and wants.

    Attributes:
        rest_bytes: What it holds between steps.
        least_bytes: The smallest peak that its batches can be brought down to, as far as is known.
        wants_bytes: The peak it would have if it saved nothing; 0 where that is not known, and then it wants all.
        weight: Its weight.
    """

    rest_bytes: int
    least_bytes: int
    wants_bytes: int
    weight: float = 1.0

    @property
    def floor_bytes(self) -> int:
        """What it needs at least."""
        return max(self.rest_bytes, self.least_bytes)


def fair_shares(budget_bytes: int, wishes: Sequence[Wish]) -> list[int] | None:
    """Shares of a budget: no less than each job's floor, no more than it wants, what is free by weight.

    Nobody's wish is met beyond what it asks for while another's is not (max-min fairness, by weight).

    Returns:
        Bytes for each job, together at most the budget; None if not even the floors fit beside each other, so that the
        jobs must take turns.

    Example:
        >>> fair_shares(100, [Wish(10, 20, 30), Wish(10, 20, 90)])
        [30, 70]
        >>> fair_shares(100, [Wish(10, 20, 90), Wish(10, 20, 90, weight=2.0)])
        [40, 60]
        >>> fair_shares(100, [Wish(10, 60, 90), Wish(10, 60, 90)]) is None
        True
    """
    shares = [wish.floor_bytes for wish in wishes]
    free = budget_bytes - sum(shares)
    if free < 0:
        return None
    tops = [max(share, wish.wants_bytes or budget_bytes) for share, wish in zip(shares, wishes, strict=True)]
    hungry = [i for i, top in enumerate(tops) if top > shares[i]]
    while hungry and free > 0:
        whole = sum(wishes[i].weight for i in hungry)
        filled = [i for i in hungry if tops[i] - shares[i] <= free * (wishes[i].weight / whole)]
        if not filled:
            given = [int(free * (wishes[i].weight / whole)) for i in hungry]
            for i, more in zip(hungry, given, strict=True):
                shares[i] += more
            break
        for i in filled:
            free -= tops[i] - shares[i]
            shares[i] = tops[i]
        hungry = [i for i in hungry if i not in filled]
    return shares
