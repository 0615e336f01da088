"""The exact planner against every plan there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import milp

from lightning_mimose.plan import optimal
from lightning_mimose.plan.optimal import least_peak_heuristic, plan_exact, smallest_feasible
from lightning_mimose.plan.structure import Structure
from lightning_mimose.plan.symmetry import precedences
from lightning_mimose.predict.timeline import Option, Timeline
from tests.plan.strategies import (
    cheapest_by_brute_force,
    check,
    every_plan,
    excluding,
    problems,
    realistic,
    share_of,
    stacked,
    timelines,
)

FEW = settings(deadline=None, max_examples=60)
FEWER = settings(deadline=None, max_examples=60 if settings.default.max_examples > 50 else 30)


@pytest.mark.conformance("How people train", "the exact plan is the fastest of all there are", "works")
@FEW
@given(problems())
def test_equals_brute_force(problem: tuple[Timeline, int]) -> None:
    """Without a gap the seconds are those of the best plan, and None means that there is none."""
    timeline, budget = problem
    plan = plan_exact(timeline, budget, gap=0.0)
    best = cheapest_by_brute_force(timeline, budget)
    if best is None:
        assert plan is None
    else:
        check(timeline, plan, budget)
        assert plan is not None
        assert plan.added_seconds == pytest.approx(best, abs=1e-9)


@FEW
@given(st.integers(2, 6), st.integers(1, 300), st.lists(st.integers(1, 64), min_size=6, max_size=6), st.data())
def test_equals_brute_force_on_identical_units(count: int, size: int, times: list[int], data: st.DataObject) -> None:
    """The constraints that break the symmetry of identical units never cut off every best plan."""
    timeline = stacked([size] * count, [time / 64 for time in times[:count]], hold=data.draw(st.sampled_from([0, 50])))
    budget = data.draw(st.sampled_from(sorted({peak for peak, _, _ in every_plan(timeline)})))
    plan = plan_exact(timeline, budget, gap=0.0)
    assert plan is not None
    assert plan.added_seconds == pytest.approx(cheapest_by_brute_force(timeline, budget), abs=1e-9)


@FEW
@given(timelines())
def test_precedences_keep_a_best_plan(timeline: Timeline) -> None:
    """For any need at a few positions some cheapest plan satisfies all of the precedences."""
    structure = Structure.of(timeline)
    positions = np.flatnonzero(timeline.base_bytes >= np.sort(timeline.base_bytes)[-2]).astype(np.intp)
    pairs = precedences(timeline, structure, positions)
    plans = []
    for _, seconds, actions in every_plan(timeline):
        chosen = timeline.chosen(actions)
        taken = set(chosen.tolist())
        kept = all(not taken & set(these.tolist()) or taken & set(those.tolist()) for these, those in pairs)
        plans.append((seconds, int(timeline.level_bytes(chosen)[positions].max()), kept))
    for _, level, _ in plans:
        least = min(seconds for seconds, other, _ in plans if other <= level)
        assert min(seconds for seconds, other, kept in plans if other <= level and kept) <= least + 1e-12


@FEW
@given(problems(), st.data())
def test_never_slower_than_an_incumbent_that_fits(problem: tuple[Timeline, int], data: st.DataObject) -> None:
    """However large the gap and however short the time, a known plan that fits is not made worse."""
    timeline, budget = problem
    known = data.draw(st.lists(st.sampled_from(list(every_plan(timeline))), min_size=1, max_size=4))
    plan = plan_exact(timeline, budget, gap=0.5, time_limit_seconds=0.0, incumbents=[known[0][2], known[-1][2]])
    fitting = [seconds for peak, seconds, _ in (known[0], known[-1]) if peak <= budget]
    if fitting:
        check(timeline, plan, budget)
        assert plan is not None
        assert plan.added_seconds <= min(fitting)


@FEWER
@given(timelines())
def test_more_budget_is_never_slower(timeline: Timeline) -> None:
    """The exact answer's time falls monotonically with the budget, by itself."""
    slowest = np.inf
    for budget in sorted({peak for peak, _, _ in every_plan(timeline)}):
        plan = plan_exact(timeline, budget, gap=0.0)
        assert plan is not None
        assert plan.added_seconds <= slowest + 1e-9
        slowest = plan.added_seconds


@FEW
@given(timelines(max_units=4))
def test_smallest_feasible_equals_brute_force(timeline: Timeline) -> None:
    """The least peak of all plans, and the least time among those that reach it."""
    plan = smallest_feasible(timeline)
    plans = list(every_plan(timeline))
    least = min(peak for peak, _, _ in plans)
    check(timeline, plan, least)
    assert plan.added_seconds == pytest.approx(min(s for peak, s, _ in plans if peak == least), rel=1e-5, abs=1e-9)


@FEW
@given(timelines())
def test_least_peak_heuristic_is_a_plan_below_everything_kept(timeline: Timeline) -> None:
    """The fast version gives a valid plan whose peak is between the least possible and that of keeping everything."""
    plan = least_peak_heuristic(timeline)
    check(timeline, plan, timeline.peak_bytes({}))
    assert plan.predicted_peak_bytes >= min(peak for peak, _, _ in every_plan(timeline))


def test_least_peak_heuristic_is_close_on_a_real_size() -> None:
    """On a stack of blocks the fast version is within a tenth of the least peak."""
    timeline = realistic("nested", units=12)
    least = smallest_feasible(timeline).predicted_peak_bytes
    assert least <= least_peak_heuristic(timeline).predicted_peak_bytes <= 1.1 * least


def test_bytes_far_below_the_solvers_tolerance_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte in a terabyte decides: answers are checked in integers and the program tightened, more each time."""
    solved: list[int] = []
    monkeypatch.setattr(optimal, "milp", lambda *args, **options: solved.append(1) or milp(*args, **options))
    tera = 10**12
    timeline = Timeline(
        units=("a", "b"),
        parents=(-1, -1),
        options=(Option(0, "recompute", 1.0), Option(1, "recompute", 2.0)),
        base_bytes=np.array([2 * tera]),
        relief_bytes=np.array([[tera - 1], [tera]]),
        shared=(),
        labels=("backward",),
    )
    plan = plan_exact(timeline, tera, gap=0.0)
    assert plan is not None
    assert plan.choices == (("b", "recompute"),)
    assert 1 < len(solved) < 40


def test_an_option_of_a_unit_and_of_its_parent_are_never_both_taken() -> None:
    """Even where both together would be the only way to fit."""
    timeline = stacked([100, 100, 100], [1.0, 1.0, 1.0], inner=[True, True, True], lean=False, transient=0.0)
    everything = np.arange(len(timeline.options))
    assert excluding(timeline, everything.tolist())
    assert plan_exact(timeline, int(timeline.level_bytes(everything).max())) is None


def test_the_time_limit_returns_the_best_plan_known() -> None:
    """A limit of no time at all still gives the heuristic's plan."""
    timeline = realistic("stages")
    budget = share_of(timeline, 0.5)
    check(timeline, plan_exact(timeline, budget, gap=0.0, time_limit_seconds=0.0), budget)
