"""Constraints that tell an integer program which of many equivalent plans to look at.

Models are stacks of identical blocks. Where two blocks relieve the same bytes at every position that matters, a plan
may swap their actions and still fit, and a solver that does not know it walks through all the permutations. Of two
such units the one for which stepping up to a costlier action is cheaper may always take the costlier action: should a
plan do it the other way round, swapping them makes it no slower.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from lightning_mimose.plan.structure import Floats, Ints, Structure
from lightning_mimose.predict.timeline import Timeline

NEAREST = 6
"""How far back in the order a unit looks for one that it can be compared with; measured times are noisy."""


def precedences(timeline: Timeline, structure: Structure, positions: Ints) -> list[tuple[Ints, Ints]]:
    """Pairs (these, those): some plan among the best takes one of `these` options only if it takes one of `those`.

    All pairs hold at once, for a program that has constraints at `positions` alone.
    """
    pairs: list[tuple[Ints, Ints]] = []
    for group in _alike(timeline, structure, positions):
        # Columns of `group` are actions, in order of cost; keeping comes before them all.
        cost = structure.cost[group]
        rank = np.argsort(cost.mean(axis=0), kind="stable")
        group, cost = group[:, rank], cost[:, rank]
        steps = np.diff(cost, axis=1, prepend=0.0)
        order = np.argsort(cost[:, -1], kind="stable")
        for place, unit in enumerate(order.tolist()):
            first = _comparable(steps, order[max(0, place - NEAREST) : place], unit)
            if first is not None:
                pairs += [(group[unit, column:], group[first, column:]) for column in range(group.shape[1])]
    return pairs


def _comparable(steps: Floats, before: Ints, unit: int) -> int | None:
    """The nearest unit before this one for which every step up costs no more than for this one."""
    for other in before[::-1].tolist():
        if bool((steps[other] <= steps[unit]).all()):
            return int(other)
    return None


def _alike(timeline: Timeline, structure: Structure, positions: Ints) -> list[Ints]:
    """Groups of units that may swap actions: each an array of options, shape (units, actions)."""
    held = np.zeros((len(timeline.options), 0), dtype=np.bool_)
    for hold in timeline.shared:
        mask = np.zeros((len(timeline.options), len(positions)), dtype=np.bool_)
        mask[list(hold.holders)] = hold.mask[:, positions]
        held = np.column_stack([held, mask])
    relief = timeline.relief_bytes[:, positions]
    options_of: dict[int, list[int]] = defaultdict(list)
    for option, unit in enumerate(structure.unit.tolist()):
        options_of[unit].append(option)
    inner = set(structure.parents.tolist())
    groups: dict[tuple[object, ...], list[list[int]]] = defaultdict(list)
    for unit, options in options_of.items():
        if unit in inner:
            continue
        options.sort(key=lambda option: timeline.options[option].action)
        actions = tuple(timeline.options[option].action for option in options)
        parent = int(structure.parents[unit])
        groups[parent, actions, relief[options].tobytes(), held[options].tobytes()].append(options)
    return [np.array(group, dtype=np.intp) for group in groups.values() if len(group) > 1]
