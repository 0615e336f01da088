"""The cheapest plan there is, by integer programming (HiGHS through `scipy.optimize.milp`).

One binary variable per option; at most one option on every path from a root of the module tree to a leaf; one
constraint per position. Thousands of positions are left out and only a handful is ever needed, so positions enter
when an answer breaks them: the program stays small, and since it only ever leaves constraints out, its bound and its
"infeasible" hold for the whole timeline. Answers are checked with the timeline's own integers.

`milp` releases the interpreter lock while it solves, so a thread can run it beside a training loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack, vstack

from lightning_mimose.plan.heuristic import least_peak_pick, plan_heuristic, solve
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.structure import Floats, Incumbent, Ints, Structure, best_incumbent, plan_of
from lightning_mimose.plan.symmetry import precedences
from lightning_mimose.predict.timeline import Timeline

SCALE = 1e4
"""The largest coefficient of a row: HiGHS's absolute tolerance of 1e-6 is then 1e-10 of it."""

ROW_SCALE = 10.0
"""The largest coefficient of a budget's row. With larger ones HiGHS corrects its own solutions and loses some of them.

It still corrects one now and then (in one plan of a few hundred), and HiGHS 1.12 (SciPy 1.17) prints a line
then (HighsMipSolverData::transformNewIntegerFeasibleSolution) that no option silences: ERGO-Code/HiGHS#2783."""

POSITIONS_PER_ROUND = 4
"""How many broken positions enter at a time; neighbours tend to be broken together and to be cured together."""

LARGE = 1500
"""Options above which `smallest_feasible` is content with the heuristic."""

_INFEASIBLE = 2


@dataclass(eq=False)
class _Program:
    """The integer program over some of the options and some of the positions.

    Variables: one per option in `options` (binary), then one per row of every shared hold (in [0, 1], and at least
    the variable of each holder up to that row), then the peak if that is what is minimised.
    """

    timeline: Timeline
    structure: Structure
    options: Ints
    positions: list[int] = field(default_factory=list)
    tightened: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        holds = self.timeline.shared
        self.hold_start = np.cumsum([0, *(len(hold.holders) for hold in holds)]) + len(self.options)
        self.width = int(self.hold_start[-1])
        self.fixed_rows, self.fixed_upper = self._structure_rows()

    def _structure_rows(self) -> tuple[csr_array, Floats]:
        """[antichain] and [hold] constraints, as rows of `rows @ variables <= upper`."""
        column = {option: index for index, option in enumerate(self.options.tolist())}
        of_unit: dict[int, list[int]] = {}
        for option, index in column.items():
            of_unit.setdefault(int(self.structure.unit[option]), []).append(index)
        rows: list[tuple[list[int], list[float], float]] = []
        inner = set(self.structure.parents.tolist())
        for leaf in range(len(self.structure.parents)):
            if leaf in inner:
                continue
            path: list[int] = []
            unit = leaf
            while unit >= 0:
                path += of_unit.get(unit, [])
                unit = int(self.structure.parents[unit])
            if len(path) > 1:
                rows.append((path, [1.0] * len(path), 1.0))
        for hold, start in zip(self.timeline.shared, self.hold_start.tolist(), strict=False):
            for row, holder in enumerate(hold.holders):
                if holder in column:
                    rows.append(([column[holder], start + row], [1.0, -1.0], 0.0))
                if row:
                    rows.append(([start + row - 1, start + row], [1.0, -1.0], 0.0))
        where = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
        columns = [index for row in rows for index in row[0]]
        values = [value for row in rows for value in row[1]]
        matrix = csr_array(coo_array((values, (where, columns)), shape=(len(rows), self.width)))
        return matrix, np.array([row[2] for row in rows])

    def _precedence_rows(self) -> csr_array:
        """[symmetry] constraints, at most 0 each: they depend on the positions that are in."""
        column = np.full(len(self.timeline.options), -1, dtype=np.intp)
        column[self.options] = np.arange(len(self.options))
        pairs = precedences(self.timeline, self.structure, np.array(self.positions, dtype=np.intp))
        rows = np.zeros((len(pairs), self.width))
        for row, (these, those) in zip(rows, pairs, strict=True):
            row[column[these][column[these] >= 0]] = 1.0
            row[column[those][column[those] >= 0]] = -1.0
        return csr_array(rows[(rows > 0).any(axis=1)])

    def raised(self) -> Floats:
        """By how much each variable raises the level, shape (positions of the program, variables)."""
        rows = np.zeros((len(self.positions), self.width))
        rows[:, : len(self.options)] = -self.timeline.relief_bytes[
            np.ix_(self.options, np.array(self.positions, dtype=np.intp))
        ].T
        for hold, start in zip(self.timeline.shared, self.hold_start.tolist(), strict=False):
            # Masks are nested, so a position is held by the first `count` holders: that many or none.
            count = hold.mask[:, self.positions].sum(axis=0)
            held = np.flatnonzero(count)
            rows[held, start + count[held] - 1] += hold.size_bytes
        return rows

    def solve(self, budget_bytes: int | None, gap: float, deadline: float) -> tuple[Ints | None, int]:
        """Solve with the positions there are; minimise the peak when there is no budget.

        Returns:
            The options chosen (None without any), and the status of `milp`.
        """
        base = self.timeline.base_bytes[self.positions].astype(np.float64)
        raised = self.raised()
        count = len(self.options)
        structural, structural_upper = self.fixed_rows, self.fixed_upper
        if budget_bytes is None:
            unit_bytes = max(1.0, float(self.timeline.base_bytes.max())) / SCALE
            rows = np.column_stack([raised / unit_bytes, -np.ones(len(base))])
            upper = -base / unit_bytes
            objective = np.append(np.zeros(self.width), 1.0)
            structural = hstack([structural, csr_array((structural.shape[0], 1))])
        else:
            scale = ROW_SCALE / np.maximum(np.abs(raised).max(axis=1, initial=0.0), 1.0)
            slack = budget_bytes - base - np.array([self.tightened.get(p, 0) for p in self.positions])
            rows, upper = raised * scale[:, None], slack * scale
            cost = self.structure.cost[self.options]
            # HiGHS stops within an absolute 1e-6 of the optimum, whatever gap is asked for: make seconds large.
            objective = np.zeros(self.width)
            objective[:count] = cost * (SCALE / max(float(np.abs(cost).max(initial=0.0)), 1e-300))
            order = self._precedence_rows()
            structural = vstack([structural, order])
            structural_upper = np.append(structural_upper, np.zeros(order.shape[0]))
        high = np.ones(len(objective))
        high[self.width :] = np.inf
        answer = milp(
            objective,
            integrality=(np.arange(len(objective)) < count).astype(np.intp),
            bounds=Bounds(np.zeros(len(objective)), high),
            constraints=LinearConstraint(
                vstack([csr_array(rows), structural], format="csc"), -np.inf, np.append(upper, structural_upper)
            ),
            # Without presolve, which has to be undone for each solution: these programs are solved as fast without.
            options={"mip_rel_gap": gap, "time_limit": max(0.01, deadline - time.monotonic()), "presolve": False},
        )
        chosen = None if answer.x is None else self.options[np.asarray(answer.x)[:count] > 0.5]
        return chosen, int(answer.status)

    def enter(self, level: NDArray[np.int64], limit: int) -> bool:
        """Let in the positions that are worst above `limit`; False when they are all in already."""
        over = np.flatnonzero(level > limit)
        new = over[~np.isin(over, self.positions)]
        self.positions += new[np.argsort(-level[new], kind="stable")[:POSITIONS_PER_ROUND]].tolist()
        return bool(len(new))


def plan_exact(
    timeline: Timeline,
    budget_bytes: int,
    *,
    gap: float = 1e-3,
    time_limit_seconds: float = 20.0,
    incumbents: Sequence[Incumbent] = (),
) -> Plan | None:
    """The plan that fits the budget and adds the least time.

    Args:
        timeline: What the step would hold, and the options there are.
        budget_bytes: What no position may exceed.
        gap: How far, relatively, the answer may be from the optimum.
        time_limit_seconds: When to stop and return the best plan known by then.
        incumbents: Plans known already; the result is never slower than one of them that fits.

    Returns:
        The plan; None when there is none (or none was found before the time was over).

    Example:
        >>> from lightning_mimose.predict.timeline import Option
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 9, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> plan_exact(timeline, 21).choices, plan_exact(timeline, 12)
        ((('b', 'recompute'),), None)
    """
    deadline = time.monotonic() + time_limit_seconds
    fits = int(timeline.base_bytes.max(initial=0)) <= budget_bytes
    if not timeline.options or (fits and all(option.added_seconds >= 0 for option in timeline.options)):
        return plan_of(timeline, np.zeros(0, dtype=np.intp)) if fits else None
    found = solve(timeline, budget_bytes)
    best = None if found.pick is None else plan_of(timeline, found.pick[found.pick >= 0])
    best = best_incumbent(timeline, budget_bytes, incumbents, best.added_seconds if best else np.inf) or best
    structure = found.search.structure
    options = np.arange(len(timeline.options))
    if best is not None:
        # An option whose mere presence lifts the bound above a plan we have can be left out.
        bound, loss = found.bound()
        if best.added_seconds - bound <= gap * abs(best.added_seconds):
            return best
        options = options[bound + loss <= best.added_seconds + 1e-9 * abs(best.added_seconds)]
    program = _Program(timeline, structure, options, list(found.search.active))
    while time.monotonic() < deadline:
        chosen, _ = program.solve(budget_bytes, gap, deadline)
        if chosen is None:
            break
        level = timeline.level_bytes(chosen)
        if int(level.max()) <= budget_bytes:
            plan = plan_of(timeline, chosen)
            return plan if best is None or plan.added_seconds < best.added_seconds else best
        if not program.enter(level, budget_bytes):
            # Within the tolerance of the solver and yet above the budget: ask for the bytes missing, then for more.
            for position in np.flatnonzero(level > budget_bytes).tolist():
                over = int(level[position]) - budget_bytes
                program.tightened[position] = 2 * program.tightened.get(position, 0) + over
    return best


def smallest_feasible(timeline: Timeline, *, time_limit_seconds: float = 20.0) -> Plan:
    """The plan with the least peak that the units and their options allow; of several, the one that adds least time.

    Args:
        timeline: What the step would hold, and the options there are.
        time_limit_seconds: When to stop and return the best plan known by then.
    """
    best = least_peak_heuristic(timeline)
    if not timeline.options or len(timeline.options) > LARGE:
        return best
    deadline = time.monotonic() + time_limit_seconds
    structure = Structure.of(timeline)
    program = _Program(timeline, structure, np.arange(len(timeline.options)))
    program.enter(timeline.base_bytes, -1)
    least = best.predicted_peak_bytes
    while time.monotonic() < deadline:
        chosen, _ = program.solve(None, 0.0, deadline)
        if chosen is None:
            break
        level = timeline.level_bytes(chosen)
        least = min(least, int(level.max()))
        # What the program believes the peak to be is a bound from below: positions above it must enter.
        believed = int(level[program.positions].max())
        if int(level.max()) <= believed or not program.enter(level, believed):
            break
    if least < best.predicted_peak_bytes:
        best = plan_heuristic(timeline, least) or best
    left = max(0.1, deadline - time.monotonic())
    return plan_exact(timeline, least, gap=1e-6, time_limit_seconds=left, incumbents=(best,)) or best


def least_peak_heuristic(timeline: Timeline) -> Plan:
    """A plan whose peak is close to the least that is possible, without solving a program."""
    pick = least_peak_pick(timeline, Structure.of(timeline))
    plan = plan_of(timeline, pick[pick >= 0])
    return plan_heuristic(timeline, plan.predicted_peak_bytes, (plan,)) or plan
