"""Plans at once, and those that are hard to find beside the training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from lightning_mimose.plan import Planner, planner, scheduler
from lightning_mimose.plan.optimal import plan_exact, smallest_feasible
from lightning_mimose.predict.timeline import Timeline
from tests.plan.strategies import check, realistic, share_of, stacked


@pytest.fixture
def made() -> Iterator[Planner]:
    """A planner whose thread is ended after the test."""
    planner = Planner()
    yield planner
    planner.scheduler.close()


@pytest.fixture
def clueless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heuristic that finds nothing; and time enough to find the least peak, however busy the machine."""
    monkeypatch.setattr(planner, "LEAST_SECONDS", 60.0)
    monkeypatch.setattr(scheduler, "plan_heuristic", lambda *_: None)


TIMELINE = realistic("nested")
BUDGET = share_of(TIMELINE, 0.5)


def test_a_plan_is_remembered_and_bettered(made: Planner) -> None:
    """By the exact one, when it is there: that is looked for once the plan is wanted again."""
    plan, infeasible = made.plan("size", TIMELINE, BUDGET, margin_bytes=100)
    check(TIMELINE, plan, BUDGET - 100)
    assert not infeasible
    assert made.known("size", BUDGET) == plan
    assert made.scheduler.wait(60)
    known, best = made.known("size", BUDGET), plan_exact(TIMELINE, BUDGET - 100)
    assert known is not None
    assert best is not None
    assert known.added_seconds == pytest.approx(best.added_seconds, rel=2e-3)


def test_a_better_plan_is_looked_for_once_and_only_for_what_comes_again(
    made: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what is believed no more, nor for the oldest of so many that they cannot all wait."""
    asked: list[object] = []
    monkeypatch.setattr(made.scheduler, "beside", asked.append)
    made.plan("size", TIMELINE, BUDGET, 0)
    assert made.known("another", BUDGET) is made.known("size", BUDGET - 1) is None
    assert not asked
    for _ in range(3):
        assert made.known("size", BUDGET) is not None
    assert len(asked) == 1
    made.plan("late", TIMELINE, BUDGET, 0)
    made.forget()
    made.known("late", BUDGET)
    assert len(asked) == 1
    monkeypatch.setattr(planner, "MOST_PUT_OFF_BYTES", int(2.5 * TIMELINE.relief_bytes.nbytes))
    for number in range(4):
        made.plan(number, TIMELINE, BUDGET, 0)
    assert all(made.known(number, BUDGET) is not None for number in (0, 1))
    assert len(asked) == 1
    assert all(made.known(number, BUDGET) is not None for number in (2, 3))
    assert len(asked) == 3
    made.cache.capacity = 1
    for number in range(4, 7):
        made.plan(number, TIMELINE, BUDGET, 0)
    assert [made.known(number, BUDGET) is None for number in range(4, 7)] == [True, True, False]
    assert len(asked) == 4
    made.plan("last", TIMELINE, BUDGET, 0)
    made.close()
    assert made.known("last", BUDGET) is not None
    assert len(asked) == 4


def test_a_copy_asks_nothing(made: Planner) -> None:
    """What was put off stays with the original."""
    made.plan("size", TIMELINE, BUDGET, 0)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.known("size", BUDGET) == made.cache.get("size", BUDGET)
        assert other.scheduler.wait(0)


@pytest.mark.usefixtures("clueless")
def test_what_is_hard_to_find_is_found_beside_the_training(made: Planner) -> None:
    """The next batch has it, of another size too, and though what was measured meanwhile made everything anew."""
    assert made.plan("size", TIMELINE, BUDGET, 0, can_wait=True) == (None, False)
    assert made.scheduler.wait(60)
    made.forget()
    for key in ("size", "another size"):
        plan, infeasible = made.plan(key, TIMELINE, BUDGET, 0, can_wait=True)
        check(TIMELINE, plan, BUDGET)
        assert not infeasible


@pytest.mark.usefixtures("clueless")
def test_who_cannot_wait_is_answered(made: Planner) -> None:
    """With a plan that fits, or with the one of the least peak, which does not."""
    plan, infeasible = made.plan("size", TIMELINE, BUDGET, 0)
    check(TIMELINE, plan, BUDGET)
    assert not infeasible
    least = smallest_feasible(TIMELINE).predicted_peak_bytes
    plan, infeasible = made.plan("size", TIMELINE, least - 1, 0)
    check(TIMELINE, plan)
    assert infeasible
    assert plan is not None
    assert plan.predicted_peak_bytes == least


@pytest.mark.usefixtures("clueless")
def test_what_cannot_be_is_not_looked_for(made: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything twice, until something new was learnt."""
    asked: list[Timeline] = []
    monkeypatch.setattr(made.scheduler, "beside", asked.append)
    for _ in range(2):
        assert made.plan("size", TIMELINE, int(TIMELINE.base_bytes[0]), 0, can_wait=True) == (None, False)
    assert not asked
    for _ in range(2):
        assert made.plan("size", TIMELINE, BUDGET, 0, can_wait=True) == (None, False)
    assert len(asked) == 1
    made.forget()
    made.plan("size", TIMELINE, BUDGET, 0, can_wait=True)
    assert len(asked) == 2


def test_the_margin_is_used_only_where_there_is_no_other_plan(made: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan within the budget is better than none."""
    monkeypatch.setattr(planner, "LEAST_SECONDS", 60.0)  # on a busy machine as well
    least = smallest_feasible(TIMELINE).predicted_peak_bytes
    plan, infeasible = made.plan("size", TIMELINE, least + 10, margin_bytes=1000)
    assert plan is not None
    assert not infeasible
    assert plan.predicted_peak_bytes == least
    assert made.answer("size", TIMELINE, least + 10, 1000) is not None
    assert made.answer("size", TIMELINE, least - 1, 0) is None


def test_what_measured_steps_missed_is_left_free_if_there_is_something_else_to_do(
    made: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the plan that broke the budget would run again."""
    monkeypatch.setattr(planner, "LEAST_SECONDS", 60.0)
    budget = smallest_feasible(TIMELINE).predicted_peak_bytes + 10
    for _ in range(2):
        assert made.plan("size", TIMELINE, budget, 30, can_wait=True, missed_bytes=20) == (None, False)
        made.scheduler.wait()
    plan, infeasible = made.plan("size", TIMELINE, budget, 30, missed_bytes=20)
    assert plan is not None
    assert not infeasible
    plan, infeasible = made.plan("size", TIMELINE, budget + 10, 30, can_wait=True, missed_bytes=20)
    assert plan is not None
    assert plan.predicted_peak_bytes <= budget + 10 - 20


def test_what_fits_whole_is_kept_without_options(made: Planner) -> None:
    """And remembered; not where the margin is needed, and not by planners of another mind."""
    peak, bare = TIMELINE.peak_bytes({}), TIMELINE.only(lambda *_: False)
    assert made.keep("size", bare, peak + 9, margin_bytes=10) is None
    plan = made.keep("size", bare, peak + 10, margin_bytes=10)
    check(TIMELINE, plan, peak)
    assert plan is not None
    assert not plan.choices
    assert made.cache.get("size", peak + 10) == plan
    for choice in ("greedy", lambda timeline, budget: {}):
        assert Planner(choice).keep("size", bare, peak, 0) is None


@pytest.mark.parametrize("choice", ["exact", "greedy", lambda timeline, budget: {}])
def test_other_planners_answer_at_once(choice: planner.PlannerChoice) -> None:
    """Nothing is left for later."""
    timeline = stacked([100, 80, 60, 40, 20], [1.0, 0.5, 0.25, 2.0, 4.0])
    made = Planner(choice)
    plan, infeasible = made.plan("size", timeline, share_of(timeline, 0.7), 0, can_wait=True)
    check(timeline, plan)
    assert not infeasible
    assert made.cache.get("size", share_of(timeline, 0.7)) == plan
    assert made.plan("size", timeline, 1, 0, can_wait=not callable(choice)).infeasible is False


def test_the_exact_answer_is_waited_for_only_before_training_is_ended(
    made: Planner, clueless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that fits is taken though it saves more than it must, and bettered when it is wanted again."""
    with monkeypatch.context() as patched:

        def wait(*_: object, **__: object) -> None:
            raise TimeoutError

        patched.setattr(planner, "smallest_plan", wait)
        patched.setattr(planner, "fastest_plan", wait)
        plan, infeasible = made.plan("size", TIMELINE, BUDGET, 0)
        assert not infeasible
        check(TIMELINE, plan, BUDGET)
        with pytest.raises(TimeoutError):
            made.plan("size", TIMELINE, 1, 0)
        made.refuses = False
        assert made.plan("size", TIMELINE, 1, 0).infeasible
    assert made.known("size", BUDGET) == plan
    assert made.scheduler.wait(60)
    better = made.known("size", BUDGET)
    assert better is not None
    check(TIMELINE, better, BUDGET)
    assert plan is not None
    assert better.added_seconds < plan.added_seconds
