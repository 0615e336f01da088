"""What every planner needs to know of a timeline's units: the tree they form and which options exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import KEEP
from lightning_mimose.plan.plan import Plan
from lightning_mimose.predict.timeline import Timeline

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]

NONE = -1
"""In an array that holds one option per unit: the unit takes none of its own, it is kept."""


class Forest(NamedTuple):
    """How units lie inside each other: the same for the timelines of all sizes. See the properties of `Structure`."""

    levels: tuple[Ints, ...]
    inner: tuple[tuple[Ints, Ints], ...]
    spans: tuple[Ints, Ints]


@lru_cache(maxsize=64)
def forest_of(parents: tuple[int, ...]) -> Forest:
    """How units lie inside each other, made once.

    Args:
        parents: For each unit the one around it, -1 at the top.
    """
    above = np.array(parents, dtype=np.intp)
    levels = _levels(above)
    return Forest(levels, tuple((level, above[level]) for level in levels[1:]), _spans(above, levels))


def _levels(parents: Ints) -> tuple[Ints, ...]:
    depth = np.zeros(len(parents), dtype=np.intp)
    above = parents.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[above], -1)
    return tuple(np.flatnonzero(depth == d) for d in range(int(depth.max(initial=0)) + 1))


def _spans(parents: Ints, levels: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    size = np.ones(len(parents), dtype=np.intp)
    for level in reversed(levels[1:]):
        np.add.at(size, parents[level], size[level])
    start = np.zeros(len(parents), dtype=np.intp)
    roots = levels[0]
    start[roots] = np.cumsum(size[roots]) - size[roots]
    free = start + 1
    for level in levels[1:]:
        for child in level.tolist():
            parent = parents[child]
            start[child] = free[parent]
            free[parent] += size[child]
            free[child] = start[child] + 1
    return start, start + size


@dataclass(frozen=True, eq=False)
class Structure:
    """The forest of units and their options as flat arrays, so that a planner never walks Python objects.

    A *pick* is an array of shape (units,): the option that each unit takes, or `NONE`. Along any path from a root
    at most one entry of a pick is not `NONE` (it is an antichain).

    Attributes:
        parents: Shape (units,); the enclosing unit, -1 at the top.
        unit: Shape (options,); the unit each option belongs to.
        cost: Shape (options,); seconds each option adds.
    """

    parents: Ints
    unit: Ints
    cost: Floats

    @classmethod
    def of(cls, timeline: Timeline) -> Structure:
        """The structure of a timeline's units."""
        return cls(
            np.asarray(timeline.parents, dtype=np.intp),
            np.array([option.unit for option in timeline.options], dtype=np.intp),
            np.array([option.added_seconds for option in timeline.options], dtype=np.float64),
        )

    @cached_property
    def _forest(self) -> Forest:
        return forest_of(tuple(self.parents.tolist()))

    @property
    def levels(self) -> tuple[Ints, ...]:
        """Units by depth in the forest, the roots first."""
        return self._forest.levels

    @property
    def _inner(self) -> tuple[tuple[Ints, Ints], ...]:
        """The units of every level but the roots', and those that they are in."""
        return self._forest.inner

    @property
    def spans(self) -> tuple[Ints, Ints]:
        """For every unit (first, last + 1) in a depth-first numbering: a unit's span contains its descendants'."""
        return self._forest.spans

    @cached_property
    def _slots(self) -> Ints:
        """Shape (units, most options of a unit); a unit's options, padded with the index after the last option."""
        counts = np.bincount(self.unit, minlength=len(self.parents))
        slots = np.full((len(self.parents), max(1, int(counts.max(initial=0)))), len(self.unit), dtype=np.intp)
        order = np.argsort(self.unit, kind="stable")
        column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots[self.unit[order], column] = order
        return slots

    @cached_property
    def _rows(self) -> Ints:
        """Where the rows of `_slots` begin in memory."""
        rows: Ints = np.arange(self._slots.size, dtype=np.intp)[:: self._slots.shape[1]]
        return rows

    def _best_own(self, price: Floats) -> tuple[Floats, Ints]:
        """Per unit the least price among its own options (inf without any) and the option that has it."""
        padded = np.append(price, np.inf)[self._slots]
        places: Ints = self._rows + padded.argmin(axis=1)
        return padded.ravel()[places], self._slots.ravel()[places]

    def cheapest(self, price: Floats) -> tuple[float, Ints]:
        """The pick of least total price, each option having a price of its own; keeping has price 0.

        Returns:
            The least total, and the pick that has it (a tie goes to keeping, then to the lower units).
        """
        own, option = self._best_own(price)
        roots, inner = self.levels[0], self._inner
        if not inner:
            take = own < 0
            return float(own[take].sum()), np.where(take, option, NONE)
        count = len(self.parents)
        below = np.zeros(count)
        for level, above in reversed(inner):
            below += np.bincount(above, np.minimum(own[level], below[level]), count)
        take = own < below
        closed = np.zeros(count, dtype=np.bool_)
        for level, above in inner:
            closed[level] = closed[above] | take[above]
        return float(np.minimum(own, below)[roots].sum()), np.where(take & ~closed, option, NONE)

    def forced_loss(self, price: Floats) -> Floats:
        """By how much the least total price rises when an option is forced into the pick, shape (options,)."""
        own, _ = self._best_own(price)
        below = np.zeros(len(self.parents))
        best = np.zeros(len(self.parents))
        for depth in range(len(self.levels) - 1, -1, -1):
            level = self.levels[depth]
            best[level] = np.minimum(own[level], below[level])
            if depth:
                np.add.at(below, self.parents[level], best[level])
        # Forcing a unit keeps all its ancestors; what remains of its tree is everything beside the path to it.
        beside = np.zeros(len(self.parents))
        root_best = best.copy()
        for level in self.levels[1:]:
            above = self.parents[level]
            beside[level] = beside[above] + below[above] - best[level]
            root_best[level] = root_best[above]
        loss: Floats = price + (beside - root_best)[self.unit]
        return loss

    def removed_by(self, pick: Ints, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """What acting on a unit removes from the pick: the unit's own option, its ancestors' and its descendants'.

        Args:
            pick: Shape (units,).
            value: Shape (options, k), what each option is worth.

        Returns:
            Shape (units, k), the sum of `value` over the options that acting on the unit would remove.
        """
        taken = np.flatnonzero(pick >= 0)
        removed = np.zeros((len(pick), value.shape[1]))
        removed[taken] = value[pick[taken]]
        if len(self.levels) > 1:
            above = removed.copy()
            for level in reversed(self.levels[1:]):
                np.add.at(removed, self.parents[level], removed[level])
            for level in self.levels[1:]:
                parent = self.parents[level]
                removed[level] += above[parent]
                above[level] += above[parent]
        return removed

    def act(self, pick: Ints, option: int) -> None:
        """Put an option into the pick, in place; whatever excludes it leaves."""
        unit = int(self.unit[option])
        first, end = self.spans
        if len(self.levels) > 1:
            pick[(first >= first[unit]) & (end <= end[unit])] = NONE
            above = int(self.parents[unit])
            while above >= 0:
                pick[above] = NONE
                above = int(self.parents[above])
        pick[unit] = option

    def conflict(self, options: Sequence[int]) -> tuple[int, int] | None:
        """The first two options that exclude each other (same unit, or a unit and its ancestor), or None."""
        by_unit: dict[int, int] = {}
        for option in options:
            if int(self.unit[option]) in by_unit:
                return by_unit[int(self.unit[option])], option
            by_unit[int(self.unit[option])] = option
        for option in options:
            above = int(self.parents[self.unit[option]])
            while above >= 0:
                if above in by_unit:
                    return by_unit[above], option
                above = int(self.parents[above])
        return None


Incumbent = Plan | Mapping[str, str]
"""A plan made earlier, or just its actions."""


def plan_of(timeline: Timeline, chosen: Ints) -> Plan:
    """The plan that takes the options `chosen`, with the peak and the time that the timeline predicts for it."""
    chosen = np.sort(chosen)
    actions = dict.fromkeys(timeline.units, KEEP)
    options = (timeline.options[i] for i in chosen.tolist())
    actions.update((timeline.units[option.unit], option.action) for option in options)
    peak = int(timeline.level_bytes(chosen).max(initial=0))
    return Plan.of(actions, predicted_peak_bytes=peak, added_seconds=timeline.seconds_of(chosen))


def best_incumbent(
    timeline: Timeline, budget_bytes: int, incumbents: Sequence[Incumbent], below_seconds: float = np.inf
) -> Plan | None:
    """The cheapest incumbent that is valid on this timeline, fits the budget and costs less than `below_seconds`."""
    structure = Structure.of(timeline)
    known: list[tuple[float, int, Ints]] = []
    for index, incumbent in enumerate(incumbents):
        actions = incumbent.actions if isinstance(incumbent, Plan) else incumbent
        try:
            chosen = timeline.chosen(actions)
        except KeyError:  # made for a model with other units or actions: of no use here
            continue
        seconds = timeline.added_seconds(actions)
        if seconds < below_seconds and structure.conflict(chosen.tolist()) is None:
            known.append((seconds, index, chosen))
    # The walk over the timeline is the expensive part: the first that fits, in order of cost, is the best.
    for _, _, chosen in sorted(known, key=lambda entry: entry[:2]):
        if int(timeline.level_bytes(chosen).max(initial=0)) <= budget_bytes:
            return plan_of(timeline, chosen)
    return None
