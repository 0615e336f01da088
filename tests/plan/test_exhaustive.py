"""Where plans are few, all of them are looked at: the answer is the best one, and no program is solved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mimose.plan import best, optimal
from lightning_mimose.plan.best import fastest_plan, small_plan, smallest_plan
from lightning_mimose.plan.exhaustive import Every, are_few
from lightning_mimose.plan.scheduler import Scheduler
from lightning_mimose.predict.timeline import Timeline
from tests.plan.strategies import (
    cheapest_by_brute_force,
    check,
    every_plan,
    problems,
    realistic,
    share_of,
    stacked,
    timelines,
)

FEW = settings(deadline=None, max_examples=60)


@FEW
@given(problems())
def test_the_fastest_equals_brute_force(problem: tuple[Timeline, int]) -> None:
    """Nested units, several options each and shared holds included; None means that there is none."""
    timeline, budget = problem
    assert are_few(timeline)
    plan = fastest_plan(timeline, budget)
    least = cheapest_by_brute_force(timeline, budget)
    if least is None:
        assert plan is None
    else:
        check(timeline, plan, budget)
        assert plan is not None
        assert plan.added_seconds == least


@FEW
@given(timelines())
def test_the_smallest_equals_brute_force(timeline: Timeline) -> None:
    """The least peak of all plans, and the least time among those that reach it."""
    plans = list(every_plan(timeline))
    least = min(peak for peak, _, _ in plans)
    for plan in (smallest_plan(timeline), small_plan(timeline)):
        check(timeline, plan, least)
        assert plan.added_seconds == min(seconds for peak, seconds, _ in plans if peak == least)


@FEW
@given(problems(), st.data())
def test_never_slower_than_an_incumbent_that_fits(problem: tuple[Timeline, int], data: st.DataObject) -> None:
    """An incumbent that is as fast is not left for another plan's rounding."""
    timeline, budget = problem
    peak, seconds, actions = data.draw(st.sampled_from(list(every_plan(timeline))))
    plan = fastest_plan(timeline, budget, incumbents=[actions])
    if peak <= budget:
        check(timeline, plan, budget)
        assert plan is not None
        assert plan.added_seconds <= seconds


def test_what_was_planned_for_less_is_left_for_nothing_at_all() -> None:
    """A plan that keeps everything counts as one, though nothing is in it."""
    timeline = stacked([100, 80, 60], [1.0, 0.5, 0.25])
    saver = fastest_plan(timeline, share_of(timeline, 0.5))
    assert saver
    plan = fastest_plan(timeline, share_of(timeline, 1.0), incumbents=[saver])
    assert plan is not None
    assert len(plan) == 0


def test_no_program_is_solved_for_a_few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer at once is the exact one: nothing is left to a thread."""

    def unexpected(*_: object, **__: object) -> None:
        pytest.fail("there are few plans, and they were not looked at")

    for module, name in ((optimal, "milp"), (best, "plan_exact"), (best, "smallest_feasible")):
        monkeypatch.setattr(module, name, unexpected)
    timeline = stacked([100] * 8, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    asked: list[object] = []
    plan = Scheduler("auto").plan(timeline, share_of(timeline, 0.7), on_better=asked.append, put_off=asked.append)
    check(timeline, plan, share_of(timeline, 0.7))
    check(timeline, smallest_plan(timeline))
    assert not asked


def test_where_they_are_many_others_are_asked() -> None:
    """Picks are counted before they are made: a thousand units take no longer to be seen than twenty."""
    timeline = realistic("identical", units=1000)
    assert not are_few(timeline)
    assert Every.of(timeline) is None
    nested = realistic("nested", units=4)
    assert are_few(nested)
    assert Every.of(nested) is not None


def test_units_one_inside_of_the_other_are_counted_quickly() -> None:
    """There are as many picks as units, each as long: a thousand of them are too much to write down."""
    timeline = realistic("identical", units=1000)
    assert not are_few(replace(timeline, parents=tuple(range(-1, 999))))
    assert are_few(replace(timeline.only(lambda unit, action: False), parents=tuple(range(-1, 999))))


def test_nothing_to_choose_from() -> None:
    """Without any option there is one pick: to keep everything."""
    timeline = stacked([100, 100], [1.0, 1.0]).only(lambda unit, action: False)
    peak = int(timeline.base_bytes.max())
    plan = fastest_plan(timeline, peak)
    assert plan is not None
    assert plan.added_seconds == 0
    assert fastest_plan(timeline, peak - 1) is None
    assert smallest_plan(timeline).predicted_peak_bytes == peak
    assert np.array_equal(timeline.level_bytes(np.zeros(0, dtype=np.intp)), timeline.base_bytes)
