"""Which states are safe: the banker's algorithm, for one resource (Dijkstra, EWD 623).

A state is safe if there is an order in which every step under way can be run to its end, each with what is free by
then. Whoever only moves from safe states to safe ones never comes to a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from .claim import Claim

State: TypeAlias = tuple[int, int, int]
"""(held, ahead, rest) of one job, in bytes."""


def state_of(claim: Claim | None, at: int, reach: int, rest_bytes: int) -> State:
    """What a job holds, may come to hold, and holds at rest; a step gives back what it holds beyond the rest only."""
    if claim is None:
        return rest_bytes, rest_bytes, rest_bytes
    held = max(rest_bytes, claim.within(at, reach))
    return held, max(rest_bytes, claim.ahead[at]), rest_bytes


def is_safe(budget_bytes: int, states: Iterable[State]) -> bool:
    """Whether all steps under way can be run to their end, one after the other.

    Args:
        budget_bytes: What all of them together may hold.
        states: One for each job, see `state_of`.

    Example:
        >>> is_safe(100, [(50, 80, 0), (20, 90, 0)])  # the first one can have 30 more, and then the second one 70
        True
        >>> is_safe(100, [(50, 80, 0), (50, 80, 0)])
        False
    """
    free = budget_bytes
    missing = []
    for held, ahead, rest in states:
        free -= held
        if ahead > rest:
            missing.append((ahead - held, held - rest))
    if free < 0:
        return False
    # What is given back at a step's end never makes less free, so the step that lacks least may always be next.
    for lacks, back in sorted(missing):
        if lacks > free:
            return False
        free += back
    return True


def furthest(budget_bytes: int, others: Sequence[State], claim: Claim, at: int, granted: int, rest_bytes: int) -> int:
    """How far a step can be granted so that the state is safe; as far as it was, if no further.

    Args:
        budget_bytes: What all jobs together may hold.
        others: The states of the other jobs.
        claim: What the step needs.
        at: The stretch it is in.
        granted: The first stretch that was not granted.
        rest_bytes: What its job holds when it has ended.

    Example:
        >>> furthest(100, [(50, 50, 0)], Claim.of([20, 40, 60, 30]), at=0, granted=0, rest_bytes=10)
        2
    """
    out = len(claim) + 1
    # What a step holds only grows with its reach, and what is safe only shrinks with what is held. It can mostly have
    # all, so that is tried first.
    reach = len(claim)
    while granted < reach < out:
        if is_safe(budget_bytes, [*others, state_of(claim, at, reach, rest_bytes)]):
            granted = reach
        else:
            out = reach
        reach = (granted + out) // 2
    return granted
