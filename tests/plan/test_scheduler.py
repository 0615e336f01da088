"""Who plans and when: answers at once, better ones from a thread, forced plans checked."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_mimose.errors import PlanError
from lightning_mimose.plan import Plan, Scheduler, scheduler
from lightning_mimose.plan.greedy import plan_greedy
from lightning_mimose.plan.heuristic import plan_heuristic
from lightning_mimose.plan.optimal import plan_exact
from lightning_mimose.predict.timeline import Timeline
from tests.plan.strategies import check, problems, realistic, share_of, stacked


@pytest.fixture
def auto() -> Iterator[Scheduler]:
    """A scheduler that is closed after the test."""
    made = Scheduler("auto")
    yield made
    made.close()


def planner_threads() -> list[threading.Thread]:
    """The planner's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "mimose-planner"]


def worse(timeline: Timeline, budget_bytes: int, *_: object) -> Plan | None:
    """A heuristic that acts on every top-level unit."""
    actions = {unit: "recompute" for unit, parent in zip(timeline.units, timeline.parents, strict=True) if parent < 0}
    everything = {unit: actions.get(unit, "keep") for unit in timeline.units}
    return Plan.of(
        everything,
        predicted_peak_bytes=timeline.peak_bytes(everything),
        added_seconds=timeline.added_seconds(everything),
    )


def test_a_batch_that_fits_is_left_alone_at_once(auto: Scheduler) -> None:
    """No thread is started for it."""
    timeline = realistic("identical")
    plan = auto.plan(timeline, share_of(timeline, 1.0), on_better=lambda _: pytest.fail("there is nothing better"))
    assert plan is not None
    assert len(plan) == 0
    assert planner_threads() == []


@settings(deadline=None, max_examples=40)
@given(problems())
def test_auto_gives_a_plan_that_fits(problem: tuple[Timeline, int]) -> None:
    """Whatever the question, the answer is inside the budget or None."""
    timeline, budget = problem
    plan = Scheduler("auto").plan(timeline, budget)
    if plan is not None:
        check(timeline, plan, budget)


def test_the_exact_answer_follows_from_a_thread(auto: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic's plan comes back at once; the strictly cheaper one through the callback, from another thread."""
    monkeypatch.setattr(scheduler, "plan_heuristic", worse)
    timeline = realistic("stages")
    budget = share_of(timeline, 0.5)
    better: list[tuple[Plan, str]] = []
    plan = auto.plan(timeline, budget, on_better=lambda p: better.append((p, threading.current_thread().name)))
    assert plan == worse(timeline, budget)
    assert auto.wait(60)
    ((found, thread),) = better
    check(timeline, found, budget)
    assert plan is not None
    assert found.added_seconds < plan.added_seconds
    assert thread == "mimose-planner"


def test_nobody_is_told_of_a_plan_that_is_not_better(auto: Scheduler) -> None:
    """With the best plan known beforehand the thread has nothing to report."""
    timeline = realistic("identical", units=12)
    budget = share_of(timeline, 0.5)
    best = plan_exact(timeline, budget, gap=0.0)
    assert best is not None
    plan = auto.plan(timeline, budget, [best], on_better=lambda p: pytest.fail(f"not better: {p}"))
    assert plan is not None
    assert plan.added_seconds <= best.added_seconds
    assert auto.wait(60)


def test_few_options_are_solved_exactly_at_once(auto: Scheduler) -> None:
    """Where all plans are looked at no thread is needed."""
    timeline = stacked([100, 80, 60, 40, 20], [1.0, 0.5, 0.25, 2.0, 4.0])
    budget = share_of(timeline, 0.6)
    plan = auto.plan(timeline, budget, on_better=lambda _: pytest.fail("it was exact already"))
    best = plan_exact(timeline, budget, gap=0.0)
    assert plan is not None
    assert best is not None
    assert plan.added_seconds == pytest.approx(best.added_seconds, rel=1e-3)
    assert planner_threads() == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
def test_the_thread_gives_way_and_the_training_does_not(auto: Scheduler) -> None:
    """It is nicer than whoever asks, who stays as before."""
    before, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    auto.beside(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert auto.wait(60)
    assert found == [min(19, before + scheduler.NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_close_leaves_no_thread_and_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is being worked on when `close` is called is finished, and its answer dropped."""
    started, go_on = threading.Event(), threading.Event()

    def slow(timeline: Timeline, budget_bytes: int, **_: object) -> Plan | None:
        started.set()
        assert go_on.wait(60)
        return plan_heuristic(timeline, budget_bytes)

    monkeypatch.setattr(scheduler, "fastest_plan", slow)
    monkeypatch.setattr(scheduler, "plan_heuristic", worse)
    made = Scheduler("auto")
    timeline = realistic("identical")
    for share in (0.4, 0.5, 0.6):
        made.plan(timeline, share_of(timeline, share), on_better=lambda _: pytest.fail("closed"))
    assert started.wait(60)
    assert len(planner_threads()) == 1
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made._closed:
        pass
    go_on.set()
    closing.join(60)
    assert planner_threads() == []
    made.close()
    assert made.plan(timeline, share_of(timeline, 0.5), on_better=lambda _: None) is not None
    assert planner_threads() == []


def test_the_newest_questions_are_answered_and_the_oldest_forgotten(
    auto: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread is busy only a few questions wait; the newest is answered next."""
    started, go_on = threading.Event(), threading.Event()
    answered: list[int] = []

    def slow(timeline: Timeline, budget_bytes: int, **_: object) -> Plan | None:
        started.set()
        assert go_on.wait(60)
        answered.append(budget_bytes)
        return None

    monkeypatch.setattr(scheduler, "fastest_plan", slow)
    timeline = realistic("identical")
    budgets = [share_of(timeline, 0.4 + 0.02 * step) for step in range(10)]
    auto.plan(timeline, budgets[0], on_better=lambda _: None)
    assert started.wait(60)
    for budget in budgets[1:]:
        auto.plan(timeline, budget, on_better=lambda _: None)
    assert not auto.wait(0)
    go_on.set()
    assert auto.wait(60)
    assert answered == [budgets[0], *budgets[: -1 - scheduler.WAITING : -1]]


def test_an_idle_thread_ends_and_the_next_question_starts_another(
    auto: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs beside a training that has seen all its sizes."""
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "plan_heuristic", worse)
    timeline = realistic("identical", units=12)
    for _ in range(2):
        better: list[Plan] = []
        auto.plan(timeline, share_of(timeline, 0.5), on_better=better.append)
        assert auto.wait(60)
        assert len(better) == 1
        for thread in planner_threads():
            thread.join(60)
        assert planner_threads() == []


def test_a_failing_callback_is_logged_and_the_thread_goes_on(
    auto: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan that is not made better must not end the training; the next question is answered."""
    monkeypatch.setattr(scheduler, "plan_heuristic", worse)
    timeline = realistic("identical", units=12)
    better: list[Plan] = []

    def fail(plan: Plan) -> None:
        raise RuntimeError("the callback is broken")

    for on_better in (fail, better.append):
        auto.plan(timeline, share_of(timeline, 0.5), on_better=on_better)
        assert auto.wait(60)
    assert "the callback is broken" in caplog.text
    assert len(better) == 1


def test_exact_and_greedy_are_what_they_say() -> None:
    """Both answer at once and are the planners of those names."""
    timeline = realistic("stages", units=8)
    budget = share_of(timeline, 0.5)
    assert Scheduler("exact").plan(timeline, budget) == plan_exact(timeline, budget)
    assert Scheduler("greedy").plan(timeline, budget) == plan_greedy(timeline, budget)
    assert planner_threads() == []


def test_a_forced_plan_is_used_though_it_does_not_fit() -> None:
    """A mapping or a plan, with the timeline's prediction in place of whatever the planner claimed."""
    timeline = realistic("nested", units=4)
    forced = Scheduler(lambda timeline, budget: {"layer1": "recompute", "layer2.0": "recompute"}).plan(timeline, 1)
    check(timeline, forced)
    assert forced is not None
    assert forced.choices == (("layer1", "recompute"), ("layer2.0", "recompute"))
    claim = Plan.of({"layer1": "recompute"}, predicted_peak_bytes=0, added_seconds=0.0)
    plan = Scheduler(lambda timeline, budget: claim).plan(timeline, 1)
    check(timeline, plan)
    assert plan is not None
    assert plan.predicted_peak_bytes > 0


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"layer9": "recompute", "layer7": "keep"}, r"2 unit\(s\) that are not planned: layer7, layer9"),
        ({"layer1": "compress"}, "'layer1' the action 'compress'.*It has: keep, recompute, lean"),
        ({"layer1.0": "recompute", "layer1": "lean"}, "acts on 'layer1.0' and on 'layer1', which contains it"),
        (["layer1"], r"a Plan or a mapping .* but got \['layer1'\]"),
        (None, "but got None"),
    ],
)
def test_what_is_not_a_plan_of_these_units_is_refused_by_name(actions: object, message: str) -> None:
    """The error says which unit or action is wrong and what there is."""
    timeline = realistic("nested", units=4)
    with pytest.raises(PlanError, match=message):
        Scheduler(lambda timeline, budget: actions).plan(timeline, 1)  # type: ignore[arg-type, return-value]


def test_an_unknown_planner_is_refused() -> None:
    """With the names there are."""
    with pytest.raises(PlanError, match="planner='best' was asked for; it is 'auto', 'exact', 'greedy', or a callable"):
        Scheduler("best")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"or a callable \(timeline, budget_bytes\) -> plan"):
        Scheduler(lambda timeline: {})  # type: ignore[arg-type,misc]


def test_a_copy_has_the_planner_and_no_thread(auto: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep copy of a callback in the middle of a fit is inert."""
    monkeypatch.setattr(scheduler, "plan_heuristic", worse)
    timeline = realistic("identical", units=12)
    auto.plan(timeline, share_of(timeline, 0.5), on_better=lambda _: None)
    other = copy.deepcopy(auto)
    assert other.planner == "auto"
    assert other._thread is None
    assert auto.wait(60)


def test_an_infeasible_budget_gives_none(auto: Scheduler) -> None:
    """The heuristic, the exact planner and the paper's agree that there is no plan."""
    timeline = realistic("identical", units=12)
    budget = int(np.min(timeline.base_bytes)) - 1
    for planner in (auto, Scheduler("exact"), Scheduler("greedy")):
        assert planner.plan(timeline, budget, on_better=lambda _: pytest.fail("impossible")) is None
    assert auto.wait(60)
