"""The Mimose paper's scheduler."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from lightning_mimose.plan.greedy import greedy_order, plan_greedy
from lightning_mimose.predict.timeline import Option, Timeline
from tests.plan.strategies import check, problems, realistic, share_of, stacked

FEW = settings(deadline=None, max_examples=60)


@FEW
@given(problems())
def test_takes_the_first_units_of_its_order(problem: tuple[Timeline, int]) -> None:
    """A plan is a prefix of the order: buckets by size, the earliest unit first inside a bucket."""
    timeline, budget = problem
    order = [option for option, _ in greedy_order(timeline)]
    for until_fits in (True, False):
        plan = plan_greedy(timeline, budget, until_fits=until_fits)
        if plan is not None:
            check(timeline, plan, budget if until_fits else None)
            assert set(timeline.chosen(plan.actions).tolist()) == set(order[: len(plan)])
            assert {action for _, action in plan} <= {"recompute"}
            assert all("." not in unit for unit, _ in plan)


@FEW
@given(problems())
def test_the_sum_model_takes_as_few_as_cover_the_need(problem: tuple[Timeline, int]) -> None:
    """Without looking at the timeline it stops as soon as the bytes subtracted cover what is above the budget."""
    timeline, budget = problem
    need = timeline.peak_bytes({}) - budget
    plan = plan_greedy(timeline, budget, until_fits=False)
    sizes = [size for _, size in greedy_order(timeline)]
    if plan is None:
        assert sum(sizes) < need
    else:
        assert sum(sizes[: len(plan)]) >= need
        assert need <= 0 or sum(sizes[: len(plan) - 1]) < need


def test_units_of_similar_size_count_as_equal_and_the_earliest_comes_first() -> None:
    """100, 95 and 91 share a bucket and go by position; 89 starts the next one."""
    timeline = stacked([91, 89, 100, 95], [1.0] * 4, lean=False, kept_input=0.0)
    assert [timeline.options[option].unit for option, _ in greedy_order(timeline)] == [0, 2, 3, 1]


def test_the_papers_answer_may_not_fit_and_says_so() -> None:
    """The last layer relieves nothing at the peak: the sum model is content, the timeline goes on."""
    timeline = Timeline(
        units=("a", "b"),
        parents=(-1, -1),
        options=(Option(0, "recompute", 1.0), Option(1, "recompute", 1.0)),
        base_bytes=np.array([10, 30]),
        relief_bytes=np.array([[0, 8], [9, 0]]),
        shared=(),
        labels=("forward b", "backward b"),
    )
    order = [timeline.options[option].unit for option, _ in greedy_order(timeline)]
    assert order == [1, 0]
    honest = plan_greedy(timeline, 23, until_fits=False)
    assert honest is not None
    assert honest.predicted_peak_bytes == 30
    fitting = plan_greedy(timeline, 23)
    assert fitting is not None
    assert (len(fitting), fitting.predicted_peak_bytes) == (2, 22)
    assert plan_greedy(timeline, 21) is None


def test_nothing_is_done_when_everything_fits() -> None:
    """A batch that fits is left alone."""
    timeline = realistic("identical")
    plan = plan_greedy(timeline, share_of(timeline, 1.0))
    assert plan is not None
    assert len(plan) == 0
