"""A pick under repair and improvement: exchanges of up to three moves, over the few positions that can bind.

A timeline has thousands of positions and only a handful ever decide anything. So the state here keeps the exact
integer level of *all* positions, updated by the rows of the options that changed, but compares moves on the
*active* positions alone. A move that turns out to break another position makes that position active.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.plan.structure import NONE, Floats, Ints, Structure
from lightning_mimose.predict.timeline import Timeline

CORE = 40
"""How many moves are combined with each other; their number of triples is what an improvement costs."""

ALIKE = 4
"""How many moves that relieve about the same are combined: the cheapest ones, and a choice of exact sizes."""

REPAIRS = 120
"""Steps after which a repair is given up; each takes half of what is missing, so a few dozen are usual."""

PATIENCE = 12
"""Steps in a row that may pass without less excess than ever before: curing one position may break others at first."""

LEAST_GAIN = 1e-12
"""Seconds; an improvement below it is floating-point noise and would let the search run in circles."""


@cache
def _triples(count: int) -> tuple[Ints, Ints, Ints]:
    """Index arrays of all i < j < k below `count`."""
    i, j = np.triu_indices(count, 1)
    k = np.arange(count)
    keep = j[:, None] < k
    first, third = np.nonzero(keep)
    return i[first], j[first], k[third]


@cache
def _pairs(count: int) -> tuple[Ints, Ints]:
    """Index arrays of all i < j below `count`."""
    i, j = np.triu_indices(count, 1)
    return i, j


class Moves(NamedTuple):
    """Changes of a pick: take an option (what excludes it leaves), drop one, or give one up for its descendants'.

    `option` is the option taken, or `NONE`; `split` the index of the split made, or `NONE`; with neither, the unit
    drops its option.
    """

    option: Ints
    split: Ints
    unit: Ints
    seconds: Floats
    relief: Floats


class Splits(NamedTuple):
    """For some units the options of the units inside, to take instead of the unit's own.

    The options of the i-th unit are `options[start[i]:start[i + 1]]`, to the end for the last.
    """

    unit: Ints
    options: Ints
    start: Ints

    def of(self, index: int) -> list[int]:
        """The options of the index-th unit."""
        end = self.start[index + 1] if index + 1 < len(self.start) else len(self.options)
        chosen: list[int] = self.options[self.start[index] : end].tolist()
        return chosen


NO_SPLITS = Splits(*(np.zeros(0, dtype=np.intp) for _ in range(3)))


class Search:
    """One pick and what it does to the timeline.

    Attributes:
        pick: Shape (units,); the options taken (see `Structure`).
        active: The positions that moves are compared on, in the order in which they were found.
        gains: Shape (options, active); relief of every option at the active positions, holds left aside.
        until: Of `time.perf_counter()`: when improvements end, however much they save.
    """

    def __init__(self, timeline: Timeline, structure: Structure, budget_bytes: int) -> None:
        self.until = float("inf")
        self.timeline = timeline
        self.structure = structure
        self.budget = budget_bytes
        self.pick: Ints = np.full(len(timeline.units), NONE, dtype=np.intp)
        self.active: list[int] = []
        self.gains: Floats = np.zeros((len(timeline.options), 0))
        self._taken = np.zeros(len(timeline.options), dtype=np.bool_)
        self._bare: NDArray[np.int64] = timeline.base_bytes.astype(np.int64)
        self._ranks = [np.array(hold.holders, dtype=np.intp) for hold in timeline.shared]
        self._masks = [hold.mask[:, :0] for hold in timeline.shared]
        """The masks of the holds at the active positions."""
        self._held: list[int] | None = None
        """The first row of every hold that the pick has taken, -1 for none; and below the level: made when needed."""
        self._level: NDArray[np.int64] | None = None

    def watch(self, positions: Sequence[int]) -> None:
        """Make these positions the active ones."""
        self.active = list(positions)
        self.gains = self.timeline.relief_bytes[:, self.active].astype(np.float64)
        self._masks = [hold.mask[:, self.active] for hold in self.timeline.shared]

    @property
    def seconds(self) -> float:
        """What the pick adds to the step."""
        return float(self.structure.cost[self._taken].sum())

    def take(self, pick: Ints) -> None:
        """Make `pick` the current one; only the rows of options that change are read."""
        taken = np.zeros_like(self._taken)
        taken[pick[pick >= 0]] = True
        out, into = np.flatnonzero(self._taken & ~taken), np.flatnonzero(taken & ~self._taken)
        if len(out):
            self._bare += self.timeline.relieved_bytes(out)
        if len(into):
            self._bare -= self.timeline.relieved_bytes(into)
        self.pick, self._taken = pick, taken
        self._held = self._level = None

    def _first_held(self) -> list[int]:
        if self._held is None:
            taken = (self._taken[ranks] for ranks in self._ranks)
            self._held = [int(each.argmax()) if each.any() else -1 for each in taken]
        return self._held

    def level(self) -> NDArray[np.int64]:
        """Live bytes at every position under the pick, holds included."""
        if self._level is None:
            self._level = self._bare.copy()
            for hold, first in zip(self.timeline.shared, self._first_held(), strict=True):
                if first >= 0:
                    np.add(self._level, hold.size_bytes, out=self._level, where=hold.mask[first])
        return self._level

    def activate(self, level: NDArray[np.int64] | NDArray[np.float64] | None = None) -> bool:
        """Make the worst violated position active that is not yet; False when there is none."""
        level = self.level() if level is None else level
        over = np.flatnonzero(level > self.budget)
        new = over[~np.isin(over, self.active)] if len(over) else over
        if not len(new):
            return False
        position = int(new[level[new].argmax()])
        self.active.append(position)
        column = self.timeline.relief_bytes[:, position].astype(np.float64)
        self.gains = np.column_stack([self.gains, column])
        self._masks = [hold.mask[:, self.active] for hold in self.timeline.shared]
        return True

    def slack(self) -> Floats:
        """Bytes left at each active position (negative where the pick breaks the budget)."""
        slack: Floats = (self.budget - self.level()[self.active]).astype(np.float64)
        return slack

    def _relief_if_taken(self) -> Floats:
        """`gains`, less what an option would newly keep alive for itself (see `SharedHold`)."""
        if not self.timeline.shared:
            return self.gains
        relief: Floats = self.gains.copy()
        holds = zip(self.timeline.shared, self._ranks, self._masks, self._first_held(), strict=True)
        for hold, ranks, mask, first in holds:
            relief[ranks] -= hold.size_bytes * (mask & ~mask[first] if first >= 0 else mask)
        return relief

    def moves(self, splits: Splits = NO_SPLITS) -> Moves:
        """Every move there is from the current pick, with what each changes at the active positions.

        A hold that a dropped option would end is not credited: such a move is better than it says, never worse.
        """
        structure, cost = self.structure, self.structure.cost
        worth = np.column_stack([cost, self.gains])
        removed = structure.removed_by(self.pick, worth)
        add = np.flatnonzero(~self._taken)
        drop = np.flatnonzero(self._taken)
        gained = np.column_stack([cost, self._relief_if_taken()])
        taken = np.flatnonzero(self.pick[splits.unit] >= 0)
        delta = [gained[add] - removed[structure.unit[add]], -worth[drop]]
        if len(taken):
            inside = np.add.reduceat(gained[splits.options], splits.start, axis=0)
            delta.append(inside[taken] - worth[self.pick[splits.unit[taken]]])
        table = np.concatenate(delta)
        option = np.full(len(table), NONE)
        option[: len(add)] = add
        split = np.full(len(table), NONE)
        split[len(table) - len(taken) :] = taken
        unit = np.concatenate([structure.unit[add], structure.unit[drop], splits.unit[taken]])
        return Moves(option, split, unit, table[:, 0], table[:, 1:])

    def repair(self, price: Floats | None = None) -> bool:
        """Take options until no position exceeds the budget, the cheapest per byte of excess first.

        Args:
            price: Shape (options,); what an option costs, in place of its seconds.

        Returns:
            Whether it fits now. If not, the pick is where no single option would have helped.
        """
        cost = self.structure.cost if price is None else price
        least, patience = np.inf, PATIENCE
        for _ in range(REPAIRS):
            slack = self.slack()
            if not (slack < 0).any():
                if not self.activate():
                    return True
                continue
            delta = np.column_stack([cost, self._relief_if_taken()])
            delta -= self.structure.removed_by(self.pick, np.column_stack([cost, self.gains]))[self.structure.unit]
            seconds, relief = delta[:, 0], delta[:, 1:]
            # Relief counts up to what is missing; what newly breaks another position counts against it.
            before = np.minimum(slack, 0.0)
            patience = PATIENCE if -before.sum() < least else patience - 1
            least = min(least, float(-before.sum()))
            if not patience:
                return False
            gain = (np.minimum(slack + relief, 0.0) - before).sum(axis=1)
            gain[self._taken] = 0.0
            helpful = np.flatnonzero(gain > 0)
            if not len(helpful):
                return False
            order = helpful[np.argsort(np.maximum(seconds[helpful], 1e-9) / gain[helpful], kind="stable")]
            # Half of what is missing at a time: a later choice sees what the earlier ones have left to relieve.
            count = int(np.searchsorted(np.cumsum(gain[order]), -0.5 * before.sum()))
            pick = self.pick.copy()
            self._act_apart(pick, order[: max(1, count)])
            self.take(pick)
        return False

    def _act_apart(self, pick: Ints, options: Ints) -> None:
        """Put options into a pick, in place, leaving out those that exclude one put in before."""
        first, end = self.structure.spans
        touched = np.zeros(len(pick), dtype=np.bool_)
        for option in options.tolist():
            unit = self.structure.unit[option]
            inside = touched[first[unit] : end[unit]]
            if not inside.any():
                inside[:] = True
                self.structure.act(pick, option)

    def improve(self, prices: Floats, splits: Splits = NO_SPLITS, rounds: int = 30) -> None:
        """Exchange up to three moves at a time for as long as that makes the fitting pick cheaper.

        What is not needed then is dropped.

        Args:
            prices: Shape (active,); seconds per byte at the active positions (Lagrange multipliers). They say which
                moves are worth combining: those that lose least against these prices.
            splits: Further moves that replace a unit's option by its descendants'.
            rounds: The most exchanges.
        """
        for _ in range(rounds):
            if perf_counter() > self.until:
                break
            moves = self.moves(splits)
            slack = self.slack()
            prices = np.append(prices, np.zeros(len(slack) - len(prices)))
            combination = self._best_exchange(moves, slack, prices)
            if combination is None:
                return
            before = self.pick
            pick = before.copy()
            for move in combination:
                if moves.option[move] >= 0:
                    self.structure.act(pick, int(moves.option[move]))
                    continue
                pick[moves.unit[move]] = NONE
                for option in splits.of(int(moves.split[move])) if moves.split[move] >= 0 else ():
                    self.structure.act(pick, option)
            self.take(pick)
            if self.activate():  # some position that was not looked at broke: look at it from now on
                self.take(before)
        self.drop_needless()

    def drop_needless(self) -> None:
        """Drop options without which the pick fits as well, the dearest first.

        A repair may take one that relieves nothing in place of those inside its unit that break a position; an exchange
        would drop it, where there is time for one.
        """
        dropped = True
        while dropped:  # twice, as a rule: what an option holds, or takes itself, is gone with it
            dropped = False
            taken = np.flatnonzero(self._taken & (self.structure.cost > LEAST_GAIN))
            spare = taken[(self.gains[taken] <= self.slack()).all(axis=1)]
            for option in spare[np.argsort(-self.structure.cost[spare], kind="stable")].tolist():
                if self._fits_without(option):
                    pick = self.pick.copy()
                    pick[self.structure.unit[option]] = NONE
                    self.take(pick)
                    dropped = True

    def _fits_without(self, option: int) -> bool:
        """Whether the pick fits if an option is dropped; what that would cease to hold is not credited."""
        return int((self.level() + self.timeline.relief_bytes[option]).max(initial=0)) <= self.budget

    def _best_exchange(self, moves: Moves, slack: Floats, prices: Floats) -> list[int] | None:
        """The one, two or three moves that together fit and save most; None when none saves anything."""
        fits = (moves.relief >= -slack).all(axis=1)
        saving = np.where(fits, moves.seconds, 0.0)
        single = int(saving.argmin()) if len(saving) else -1
        best, chosen = (float(saving[single]), [single]) if len(saving) else (0.0, [])
        core = self._core(moves, prices)
        seconds, relief = moves.seconds[core], moves.relief[core]
        apart = self._independent(moves, core)
        for combinations in (_pairs, _triples):
            if chosen and combinations is _triples:
                break  # triples are many: only when nothing simpler saves anything
            indices = combinations(len(core))
            total = sum((seconds[index] for index in indices), np.zeros(len(indices[0])))
            left = np.flatnonzero(total < best - LEAST_GAIN)
            for position in range(len(slack)):
                need = sum((relief[index[left], position] for index in indices), np.zeros(len(left)))
                left = left[need >= -slack[position]]
            indices_left = [index[left] for index in indices]
            for a in range(len(indices_left)):
                for b in range(a + 1, len(indices_left)):
                    keep = apart[indices_left[a], indices_left[b]]
                    left = left[keep]
                    indices_left = [index[keep] for index in indices_left]
            if len(left):
                winner = left[total[left].argmin()]
                best, chosen = float(total[winner]), [int(core[index[winner]]) for index in indices]
        return chosen if best < -LEAST_GAIN else None

    def _core(self, moves: Moves, prices: Floats) -> Ints:
        """The moves worth combining: least loss at these prices, few of those that are alike."""
        loss = moves.seconds - moves.relief @ prices
        order = np.argsort(loss, kind="stable")[: 8 * CORE]
        # Identical units make moves alike, of which three moves can use three: leave room for other kinds.
        size = np.maximum(np.abs(moves.relief).max(axis=0, initial=0.0), 1.0)
        kind = np.round(moves.relief[order] / size * 100).astype(np.int64)
        number = np.zeros(len(order), dtype=np.int64)
        for column in kind.T:
            number = number * 1_000_003 + column  # equal rows have equal numbers, others hardly ever
        together = np.argsort(number, kind="stable")
        place, ordered = np.arange(len(order)), number[together]
        begins = np.zeros(len(order), dtype=np.intp)
        begins[1:] = np.where(ordered[1:] != ordered[:-1], place[1:], 0)
        alike = np.empty(len(order), dtype=np.intp)
        alike[together] = place - np.maximum.accumulate(begins)
        return order[alike < ALIKE][:CORE]

    def _independent(self, moves: Moves, core: Ints) -> NDArray[np.bool_]:
        """Which two moves touch different units, shape (core, core)."""
        first, end = self.structure.spans
        touched = moves.unit[core].copy()
        if len(self.structure.levels) > 1:
            # Acting inside a unit that has taken an option touches that whole unit.
            for index, unit in enumerate(touched.tolist()):
                above = int(self.structure.parents[unit])
                while above >= 0:
                    if self.pick[above] >= 0:
                        touched[index] = above
                    above = int(self.structure.parents[above])
        low, high = first[touched], end[touched]
        apart: NDArray[np.bool_] = (high[:, None] <= low) | (high <= low[:, None])
        return apart
