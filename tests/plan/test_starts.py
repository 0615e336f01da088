"""Starts from neighbouring problems: never believed, near enough to the best, and forgotten in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mimose.plan.exchange import Search
from lightning_mimose.plan.heuristic import LITTLE_SECONDS, plan_heuristic, solve
from lightning_mimose.plan.optimal import plan_exact
from lightning_mimose.plan.prices import proven
from lightning_mimose.plan.starts import ENOUGH_SECONDS, KNOWN, Starts
from lightning_mimose.plan.structure import NONE, Structure, plan_of
from lightning_mimose.predict.timeline import Timeline
from tests.plan.strategies import KINDS, cheapest_by_brute_force, check, problems, realistic, share_of

FEW = settings(deadline=None, max_examples=60)


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The same step with a larger or smaller batch."""
    options = tuple(replace(option, added_seconds=factor * option.added_seconds) for option in timeline.options)
    base, relief = ((factor * array).astype(np.int64) for array in (timeline.base_bytes, timeline.relief_bytes))
    shared = tuple(replace(hold, size_bytes=int(factor * hold.size_bytes)) for hold in timeline.shared)
    return replace(timeline, options=options, base_bytes=base, relief_bytes=relief, shared=shared)


@FEW
@given(problems(), problems())
def test_whatever_is_known_a_plan_fits_and_is_near_enough(
    first: tuple[Timeline, int], second: tuple[Timeline, int]
) -> None:
    """Of another model even; it misses no more than the bound allows."""
    starts = Starts()
    for timeline, budget in (first, second, first, second):
        names, labels = range(len(timeline.units)), range(len(timeline.base_bytes))
        timeline = replace(timeline, units=tuple(map(str, names)), labels=tuple(map(str, labels)))
        if int(timeline.base_bytes.max(initial=0)) <= budget:
            continue
        started = starts.pick(timeline, budget)
        plan = plan_heuristic(timeline, budget, (), starts)
        best = cheapest_by_brute_force(timeline, budget)
        if plan is not None:
            check(timeline, plan, budget)
        if started is not None:
            assert best is not None
            chosen = started.pick[started.pick >= 0]
            assert Structure.of(timeline).conflict(chosen.tolist()) is None
            assert int(timeline.level_bytes(np.sort(chosen)).max()) <= budget
            seconds = sum(timeline.options[i].added_seconds for i in chosen.tolist())
            assert abs(started.seconds - seconds) <= 1e-9
            assert started.bound - 1e-9 <= best <= seconds + 1e-9
            assert not started.is_enough or seconds <= best + ENOUGH_SECONDS


@FEW
@given(problems(), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_any_prices_prove_a_bound(problem: tuple[Timeline, int], prices: list[float]) -> None:
    """Those of another problem, too."""
    timeline, budget = problem
    search = solve(timeline, budget).search
    bound, _ = proven(search, np.array(prices[: len(search.active)]))
    best = cheapest_by_brute_force(timeline, budget)
    if best is not None:
        assert bound <= best + 1e-9


def without_some_positions(timeline: Timeline) -> Timeline:
    """The same but for some positions, not the highest: where recomputing a unit is no option, it is none either."""
    binding = int(np.argmax(timeline.base_bytes))
    kept = np.array([i for i in range(len(timeline.base_bytes)) if i == binding or i % 7])
    return replace(
        timeline,
        base_bytes=timeline.base_bytes[kept],
        relief_bytes=timeline.relief_bytes[:, kept],
        shared=tuple(replace(hold, mask=hold.mask[:, kept]) for hold in timeline.shared),
        labels=tuple(timeline.labels[i] for i in kept.tolist()),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "neighbours",
    [
        pytest.param(lambda timeline: [scaled(timeline, factor) for factor in (1.03, 0.96, 1.06)], id="sizes"),
        pytest.param(lambda timeline: [without_some_positions(timeline)], id="other-positions"),
    ],
)
def test_a_neighbour_is_planned_without_a_search(
    kind: str, neighbours: Callable[[Timeline], list[Timeline]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hardly worse than by one."""
    timeline, starts = realistic(kind), Starts()
    monkeypatch.setattr("lightning_mimose.plan.starts.FITTED_SECONDS", np.inf)
    budget = share_of(timeline, 0.6)
    plan_heuristic(timeline, budget, (), starts)
    others = neighbours(timeline)
    searched = [plan_heuristic(each, budget) for each in others]
    monkeypatch.setattr("lightning_mimose.plan.heuristic.solve", lambda *_: pytest.fail("it was searched for"))
    for each, plan in zip(others, searched, strict=True):
        found = plan_heuristic(each, budget, (), starts)
        check(each, found, budget)
        assert found is not None
        assert plan is not None
        assert found.added_seconds <= 1.05 * plan.added_seconds


def test_units_that_lie_otherwise_are_no_neighbours() -> None:
    """One that is called inside of another one now must not act together with it."""
    timeline, starts = realistic("nested"), Starts()
    budget = share_of(timeline, 0.6)
    apart = replace(timeline, parents=(-1,) * len(timeline.parents))
    plan_heuristic(apart, budget, (), starts)
    assert len(starts) == 1
    assert starts.pick(timeline, budget) is None
    check(timeline, plan_heuristic(timeline, budget, (), starts), budget)


@pytest.mark.parametrize("times", [1, 2])
def test_positions_are_told_apart_that_are_called_the_same(times: int) -> None:
    """Of a second path through the model, or a second pass."""
    timeline = realistic("stages")
    budget = share_of(timeline, 0.6)
    doubled = replace(
        timeline,
        base_bytes=np.tile(timeline.base_bytes, times),
        relief_bytes=np.tile(timeline.relief_bytes, (1, times)),
        labels=timeline.labels * times,
    )
    doubled.base_bytes[len(timeline.labels) :] //= 4  # of which the second binds nowhere
    starts = Starts()
    found = solve(doubled, budget)
    assert found.pick is not None
    found.search.take(found.pick)
    starts.learn(found.search, found.prices)
    started = starts.pick(doubled, budget)
    assert started is not None
    assert started.bound >= 0.98 * found.bound()[0]


def test_a_better_plan_of_a_neighbour_is_started_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner's thread has found serves other sizes as well."""
    timeline, starts = realistic("stages"), Starts()
    budget = share_of(timeline, 0.6)
    found = solve(timeline, budget)
    everything = np.full(len(timeline.units), NONE)
    for index, option in enumerate(timeline.options):
        everything[option.unit] = index if option.action == "recompute" else everything[option.unit]
    found.search.take(everything)
    starts.learn(found.search, found.prices)
    exact = plan_exact(timeline, budget, time_limit_seconds=5)
    assert exact is not None
    assert exact.added_seconds < found.search.seconds
    starts.better(timeline, budget, exact)
    starts.better(timeline, budget + 1, exact)  # of a problem that is not known
    assert len(starts) == 1
    monkeypatch.setattr(Search, "improve", lambda *_, **__: None)
    started = starts.pick(timeline, budget)
    assert started is not None
    assert plan_of(timeline, started.pick[started.pick >= 0]) == exact


@FEW
@given(problems())
def test_what_is_found_by_then_has_to_do_unless_much_can_be_saved(problem: tuple[Timeline, int]) -> None:
    """It fits whenever it ends, and is as good as ever where steps take long."""
    timeline, budget = problem
    patient = solve(timeline, budget).pick
    late = solve(timeline, budget, until=0.0).pick
    assert (patient is None) == (late is None)
    if late is not None:
        check(timeline, plan_of(timeline, late[late >= 0]), budget)
    long = tuple(replace(option, added_seconds=1e6 * option.added_seconds) for option in timeline.options)
    slow = replace(timeline, options=long)
    expected, found = (solve(slow, budget, until).pick for until in (np.inf, 0.0))
    if expected is not None and found is not None:
        seconds = [sum(slow.options[i].added_seconds for i in pick[pick >= 0].tolist()) for pick in (expected, found)]
        assert seconds[1] <= seconds[0] + LITTLE_SECONDS


def test_the_oldest_are_forgotten() -> None:
    """What is remembered stays small."""
    timeline, starts = realistic("identical", units=4), Starts()
    for budget in range(share_of(timeline, 0.6), share_of(timeline, 0.6) + 2 * KNOWN):
        plan_heuristic(timeline, budget, (), starts)
    assert len(starts) == KNOWN
