"""The heuristic planner: sound on anything, close to the optimum on what networks look like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mimose.plan.exchange import LEAST_GAIN, Search
from lightning_mimose.plan.heuristic import plan_heuristic, solve
from lightning_mimose.plan.optimal import plan_exact
from lightning_mimose.plan.structure import NONE, Structure
from lightning_mimose.predict.timeline import Option, Timeline
from tests.plan.strategies import (
    KINDS,
    cheapest_by_brute_force,
    check,
    every_plan,
    problems,
    realistic,
    share_of,
    timelines,
)

FEW = settings(deadline=None, max_examples=60)


@FEW
@given(problems())
def test_a_plan_fits_and_is_never_better_than_the_best(problem: tuple[Timeline, int]) -> None:
    """What it returns is a valid plan inside the budget; where no plan exists it returns none."""
    timeline, budget = problem
    plan = plan_heuristic(timeline, budget)
    best = cheapest_by_brute_force(timeline, budget)
    if plan is not None:
        check(timeline, plan, budget)
        assert best is not None
        assert plan.added_seconds >= best
    if best == 0:
        assert plan is not None
        assert len(plan) == 0


@FEW
@given(problems())
def test_the_bound_is_a_bound(problem: tuple[Timeline, int]) -> None:
    """No plan that fits is cheaper than the Lagrangian bound, nor one with an option than bound plus loss."""
    timeline, budget = problem
    bound, loss = solve(timeline, budget).bound()
    for peak, seconds, actions in every_plan(timeline):
        if peak <= budget:
            assert seconds >= bound - 1e-9
            for option in timeline.chosen(actions).tolist():
                assert seconds >= bound + loss[option] - 1e-9


@FEW
@given(problems(), st.data())
def test_never_slower_than_an_incumbent_that_fits(problem: tuple[Timeline, int], data: st.DataObject) -> None:
    """Any known plan is a candidate; those that do not fit or are for other units are passed over."""
    timeline, budget = problem
    known = data.draw(st.lists(st.sampled_from(list(every_plan(timeline))), max_size=4))
    plan = plan_heuristic(timeline, budget, [{"no such unit": "recompute"}, *(actions for _, _, actions in known)])
    fitting = [seconds for peak, seconds, _ in known if peak <= budget]
    if fitting:
        check(timeline, plan, budget)
        assert plan is not None
        assert plan.added_seconds <= min(fitting)


@FEW
@given(problems(), st.data())
def test_no_option_is_left_that_is_not_needed(problem: tuple[Timeline, int], data: st.DataObject) -> None:
    """However little time there is for exchanges: what fits without an option drops it, unless that saves time."""
    timeline, budget = problem
    fitting = [actions for peak, _, actions in every_plan(timeline) if peak <= budget]
    if not fitting:
        return
    structure = Structure.of(timeline)
    search, pick = Search(timeline, structure, budget), np.full(len(timeline.units), NONE, dtype=np.intp)
    for option in timeline.chosen(data.draw(st.sampled_from(fitting))).tolist():
        pick[structure.unit[option]] = option
    search.take(pick)
    search.until = 0.0
    search.improve(np.zeros(0))
    taken = search.pick[search.pick >= 0]
    assert int(timeline.level_bytes(taken).max(initial=0)) <= budget
    for option in taken.tolist():
        dropped = int((search.level() + timeline.relief_bytes[option]).max(initial=0))
        assert structure.cost[option] <= LEAST_GAIN or dropped > budget


@FEW
@given(timelines(), st.lists(st.integers(0, 3000), min_size=2, max_size=6))
def test_more_budget_is_never_slower_with_what_is_known(timeline: Timeline, budgets: list[int]) -> None:
    """Handing on the plans of smaller budgets makes the time fall monotonically with the budget."""
    known: list[dict[str, str]] = []
    slowest = np.inf
    for budget in sorted(budgets):
        plan = plan_heuristic(timeline, budget, known)
        if plan is None:
            assert not known
            continue
        assert plan.added_seconds <= slowest
        slowest = plan.added_seconds
        known.append(dict(plan.actions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_close_to_the_optimum_on_stacks_of_blocks(kind: str, share: float) -> None:
    """Within two per cent of the exact planner on 24 blocks of every kind (a per cent is usual)."""
    timeline = realistic(kind)
    budget = share_of(timeline, share)
    plan = plan_heuristic(timeline, budget)
    best = plan_exact(timeline, budget, time_limit_seconds=5)
    check(timeline, plan, budget)
    assert plan is not None
    assert best is not None
    assert best.added_seconds <= plan.added_seconds <= 1.02 * best.added_seconds


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_question_has_the_same_answer(kind: str) -> None:
    """The search is deterministic: no clock and no random number decides anything."""
    timeline = realistic(kind, seed=3)
    budget = share_of(timeline, 0.5)
    assert plan_heuristic(timeline, budget) == plan_heuristic(timeline, budget)


def test_hundreds_of_units() -> None:
    """A deep network takes the shortened search; its plan still fits and is close to the bound."""
    timeline = realistic("nested", units=150)
    budget = share_of(timeline, 0.5)
    plan = plan_heuristic(timeline, budget)
    check(timeline, plan, budget)
    assert plan is not None
    bound, _ = solve(timeline, budget).bound()
    assert plan.added_seconds <= 1.02 * bound


@pytest.mark.parametrize("share", [0.3, 0.6, 0.65, 0.7, 0.8])
def test_no_more_of_hundreds_of_units_that_are_alike_act_than_need_to(share: float) -> None:
    count = 400
    units = tuple(f"layer{i}" for i in range(count))
    kinds = {"recompute": (1.0, 100), "recompute+lean": (1.15, 114)}
    options = tuple(Option(i, action, seconds) for i in range(count) for action, (seconds, _) in kinds.items())
    relief = np.zeros((len(options), 2 * count + 1), dtype=np.int64)
    for row, option in zip(relief, options, strict=True):
        row[option.unit : 2 * count - option.unit] = kinds[option.action][1]
    base = np.array([120 * min(i + 1, 2 * count + 1 - i) for i in range(2 * count + 1)])
    timeline = Timeline(units, (-1,) * count, options, base, relief, (), ("",) * len(base))

    plan = plan_heuristic(timeline, int(base.max()) - int((1 - share) * 100 * count))

    assert plan is not None
    assert plan.added_seconds <= 1.01 * (1 - share) * count


def test_a_plan_is_found_where_an_option_alone_relieves_nothing() -> None:
    """A hold as large as any single relief makes every first step look useless; together the options help."""
    timeline = realistic("shared", units=4)
    peaks = [peak for peak, _, _ in every_plan(timeline)]
    assert plan_heuristic(timeline, min(peaks)) is not None


def test_options_that_save_time_are_taken_though_everything_fits() -> None:
    """An option measured to make the step faster is worth taking at any budget."""
    timeline = Timeline(
        units=("a", "b"),
        parents=(-1, -1),
        options=(Option(0, "lean", -0.5), Option(1, "recompute", 1.0)),
        base_bytes=np.array([10, 20]),
        relief_bytes=np.array([[0, 5], [0, 5]]),
        shared=(),
        labels=("forward", "backward"),
    )
    plan = plan_heuristic(timeline, 100)
    assert plan is not None
    assert plan.choices == (("a", "lean"),)


def test_a_timeline_without_options() -> None:
    """There is nothing to choose: everything kept fits, or nothing does."""
    timeline = Timeline(("a",), (-1,), (), np.array([5]), np.zeros((0, 1), np.int64), (), ("forward a",))
    assert plan_heuristic(timeline, 4) is None
    check(timeline, plan_heuristic(timeline, 5), 5)


def test_units_three_levels_deep_exclude_each_other() -> None:
    """Acting on a unit removes what its ancestors and descendants had taken, at any depth."""
    timeline = Timeline(
        units=("a", "a.b", "a.b.c", "a.d"),
        parents=(-1, 0, 1, 0),
        options=tuple(Option(unit, "recompute", 1.0) for unit in range(4)),
        base_bytes=np.array([100]),
        relief_bytes=np.array([[40], [20], [10], [15]]),
        shared=(),
        labels=("backward",),
    )
    structure = Structure.of(timeline)
    pick = np.full(4, -1, dtype=np.intp)
    for option, expected in ((2, [-1, -1, 2, -1]), (3, [-1, -1, 2, 3]), (1, [-1, 1, -1, 3]), (0, [0, -1, -1, -1])):
        structure.act(pick, option)
        assert pick.tolist() == expected
    structure.act(pick, 2)
    assert pick.tolist() == [-1, -1, 2, -1]
    worth = timeline.relief_bytes.astype(float)
    assert structure.removed_by(np.array([-1, -1, 2, 3]), worth)[:, 0].tolist() == [25, 10, 10, 15]
    assert structure.removed_by(np.array([0, -1, -1, -1]), worth)[:, 0].tolist() == [40, 40, 40, 40]
    assert [structure.conflict(options) for options in ([2, 3], [0, 2], [1, 3])] == [None, (0, 2), None]
    plan = plan_heuristic(timeline, 65)
    assert plan is not None
    assert plan.choices == (("a", "recompute"),)
