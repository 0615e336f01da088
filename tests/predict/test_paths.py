"""Steps that may take one of several paths: one timeline that covers all of them, and when that is believed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_mimose.measure.observe import observe
from lightning_mimose.plan.heuristic import plan_heuristic
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.paths import SETTLED_AFTER, Waits, joined
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Option, Timeline
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded
from tests.plan.strategies import every_plan, timelines

Values = NDArray[np.float64]


def renamed(timeline: Timeline, names: dict[str, str]) -> Timeline:
    """The same, of other units."""
    return replace(timeline, units=tuple(names.get(unit, unit) for unit in timeline.units))


@settings(deadline=None, max_examples=60)
@given(one=timelines(3), other=timelines(3), apart=st.booleans())
def test_the_highest_of_all_paths_is_the_peak(one: Timeline, other: Timeline, apart: bool) -> None:
    """Whatever is chosen; what a path does not have makes no difference there."""
    if apart:  # else they share their units, as far as they have the same
        other = renamed(other, {unit: f"other.{unit}" for unit in other.units})
    both = joined([one, other])
    for _, _, actions in every_plan(both):
        peaks = [
            each.peak_bytes({unit: action for unit, action in actions.items() if (unit, action) in each.option_index})
            for each in (one, other)
        ]
        assert both.peak_bytes(actions) == max(peaks)


@settings(deadline=None, max_examples=40)
@given(one=timelines(4), other=timelines(4), share=st.floats(0.4, 1.0))
def test_a_plan_for_all_paths_fits_each(one: Timeline, other: Timeline, share: float) -> None:
    """The planner needs to know nothing of paths."""
    both = joined([one, other])
    budget = int(both.peak_bytes({}) * share)
    plan = plan_heuristic(both, budget)
    if plan is not None:
        for each in (one, other):
            known = {slot[0]: slot[1] for slot in plan.choices if slot in each.option_index}
            assert each.peak_bytes(known) <= budget


def nest(parents: dict[str, str | None], spared: int) -> Timeline:
    """Units of which each may be recomputed, and spares the same at one moment."""
    units = tuple(parents)
    index = {unit: i for i, unit in enumerate(units)}
    return Timeline(
        units=units,
        parents=tuple(-1 if parent is None else index[parent] for parent in parents.values()),
        options=tuple(Option(i, "recompute", 1.0) for i in range(len(units))),
        base_bytes=np.array([100]),
        relief_bytes=np.full((len(units), 1), spared),
        shared=(),
        labels=("here",),
    )


@pytest.mark.parametrize(
    "other",
    [
        {"q": None, "unit": "q"},
        {"q": None, "p": "q", "unit": "p"},
        {"unit": None, "p": "unit"},
        {"q": None, "p": None, "unit": None},
        {"p": None, "q": "p", "unit": "q"},
    ],
)
def test_units_that_enclose_each_other_on_any_path_never_act_at_once(other: dict[str, str | None]) -> None:
    """A block that two networks share is inside one of them on each path: what it spares must not count twice."""
    one = {"p": None, "unit": "p"}
    both = joined([nest(one, 10), nest(other, 10)])
    for _, _, actions in every_plan(both):
        for parents in (one, other):
            for unit in actions.keys() & parents.keys():
                above = parents[unit]
                while above is not None:
                    assert above not in actions, (other, actions)
                    above = parents[above]


@cache
def step(layers: int) -> tuple[Structure, Values]:
    """A real step through some layers."""
    seen = observe(recorded(TinyText(layers), text_batch(2, 8)), 0)
    return seen.structure, seen.values


def called(structure: Structure, suffix: str) -> Structure:
    """The same step through other layers."""
    units = {unit: f"{unit}.{suffix}" for unit in structure.units if unit.startswith("layers.1")}
    return replace(
        structure,
        units=tuple(units.get(unit, unit) for unit in structure.units),
        calls=tuple(
            replace(call, unit=units.get(call.unit, call.unit), key=units.get(call.key, call.key))
            for call in structure.calls
        ),
    )


def size(length: int) -> dict[str, int]:
    """Of a batch."""
    return {"batch": 2, "ids:1": length}


def in_turns(steps: int) -> tuple[Estimator, list[Structure]]:
    """Two tasks in turns, each with a layer of its own."""
    structure, values = step(3)
    tasks = [called(structure, "a"), called(structure, "b")]
    estimator = Estimator()
    for number in range(steps):
        length = 16 + 9 * (number % 7)
        estimator.add(size(length), tasks[number % 2], values * length * (1 + number % 2))
    return estimator, tasks


def test_tasks_in_turns_are_both_predicted_once_no_other_path_came_for_a_while() -> None:
    """The latest first; before that, nobody knows what else may come."""
    few, _ = in_turns(SETTLED_AFTER)
    early = few.predict(size(50))
    assert early is not None
    assert not early.trusted
    estimator, tasks = in_turns(SETTLED_AFTER + 2)
    found = estimator.predict(size(50))
    assert found is not None
    assert found.trusted
    assert estimator.observed.varies
    assert [found.structure, *(other.structure for other in found.others)] == [tasks[1], tasks[0]]
    assert np.allclose(found.values, 2 * found.others[0].values)


def test_a_new_path_is_waited_for_again() -> None:
    """A third task comes late."""
    estimator, _ = in_turns(SETTLED_AFTER + 2)
    structure, values = step(3)
    estimator.add(size(16), called(structure, "c"), values * 16)
    found = estimator.predict(size(16))
    assert found is not None
    assert not found.trusted
    assert len(found.others) == 2


def strange() -> tuple[Estimator, Values]:
    """One path is known, and a planned step took another one."""
    structure, values = step(2)
    estimator = Estimator()
    for length in (16, 24, 33, 40, 48):
        estimator.add(size(length), structure, values * length)
    known = estimator.predict(size(50))
    assert known is not None
    assert known.trusted
    assert estimator.unsettle(size(50))
    return estimator, known.values


def test_a_path_that_is_known_by_hearsay_is_waited_for() -> None:
    """A planned step called what none before it did: as many others have to show nothing of it."""
    estimator, expected = strange()
    structure, values = step(2)
    for number in range(SETTLED_AFTER):
        found = estimator.predict(size(50))
        assert found is not None
        assert not found.trusted
        length = 16 + 8 * (number % 5)
        estimator.add(size(length), structure, values * length)
    found = estimator.predict(size(50))
    assert found is not None
    assert found.trusted
    assert np.allclose(found.values, expected)


def test_a_measured_step_that_teaches_nothing_but_its_path_is_heeded() -> None:
    """A generator's first turn makes its optimizer's state; the next one is no step of the critic's alone."""
    estimator, (short, values), (long, _) = Estimator(), step(2), step(3)
    assert not estimator.heed(size(50), long), "nothing is planned yet"
    for length in (16, 24, 33, 40, 48):
        estimator.add(size(length), short, values * length)
    assert not estimator.heed(size(50), short)
    known = estimator.predict(size(50))
    assert known is not None
    assert known.trusted
    assert estimator.heed(size(50), long)
    found = estimator.predict(size(50))
    assert found is not None
    assert not found.trusted


def test_a_path_that_was_waited_for_takes_the_place_of_its_part() -> None:
    """It came: as many sizes as a fit needs, and no more."""
    estimator, _ = strange()
    structure, values = step(3)
    for length in (16, 24, 33, 40, 48):
        estimator.add(size(length), structure, values * length)
    found = estimator.predict(size(50))
    assert found is not None
    assert found.structure == structure
    assert found.trusted
    assert found.others == ()


def test_a_rare_path_is_waited_for_less_and_less_often() -> None:
    """A path that steps take one time in a hundred does not keep the others sheltered."""
    estimator, _ = in_turns(SETTLED_AFTER + 2)
    assert [estimator.unsettle(size(50)) for _ in range(9)] == [n in (1, 2, 4, 8) for n in range(1, 10)]
    structure, values = step(3)
    estimator.add(size(16), called(structure, "c"), values * 16)
    assert estimator.unsettle(size(50)), "a new one is as rare as it likes"


def of_own_sizes(steps: int) -> tuple[Estimator, list[Structure]]:
    """Two tasks in turns, each with batches of one size."""
    structure, values = step(3)
    tasks = [called(structure, "a"), called(structure, "b")]
    estimator = Estimator()
    for number in range(steps):
        length = (32, 64)[number % 2]
        estimator.add(size(length), tasks[number % 2], values * length)
    return estimator, tasks


def test_a_size_that_always_takes_one_path_is_expected_to() -> None:
    """What the other task takes with such a batch is not known, and need not be."""
    early, _ = of_own_sizes(SETTLED_AFTER)
    assert not any(found and found.trusted for found in map(early.predict, (size(32), size(64))))
    late, tasks = of_own_sizes(SETTLED_AFTER + 2)
    restored = Estimator()
    restored.load_state_dict(json.loads(json.dumps(late.state_dict())))
    for estimator in (late, restored):
        for length, task in zip((32, 64), tasks, strict=True):
            found = estimator.predict(size(length))
            assert found is not None
            assert found.trusted
            assert found.structure == task
            assert found.others == ()
            assert np.array_equal(found.values, step(3)[1] * length)
    late.add(size(32), tasks[1], step(3)[1] * 32)
    found = late.predict(size(32))
    assert found is not None
    assert len(found.others) == 1, "from now on, it may be either"


def test_what_is_waited_for_outlives_a_checkpoint() -> None:
    """A resumed run waits no longer than the first one would have."""
    for steps in (SETTLED_AFTER, SETTLED_AFTER + 2):
        estimator, _ = in_turns(steps)
        restored = Estimator()
        restored.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
        one, other = estimator.predict(size(50)), restored.predict(size(50))
        assert one is not None
        assert other is not None
        assert one.trusted is other.trusted is (steps > SETTLED_AFTER)


@pytest.mark.parametrize("period", [2, 13, 16, 40])
def test_a_path_that_comes_regularly_is_found(period: int) -> None:
    """Also one that comes less often than steps wait at first (a regularisation every 16 steps)."""
    waits, met = Waits(), 0
    for number in range(10 * period):
        rare = number % period == 0
        if waits.are_over(("batch",)):
            met += rare
            if rare:
                waits.strange(("batch",))
        elif rare:
            break
        else:
            waits.known(("batch",))
    else:
        pytest.fail(f"met {met} times, and never measured")


def test_a_path_that_was_seen_at_a_size_counts_there_whatever_came_since() -> None:
    """In steps of two shapes, so that nothing sure is known of it: that is no reason to forget it."""
    estimator, tasks = of_own_sizes(SETTLED_AFTER + 2)
    values = step(3)[1]
    estimator.add(size(32), tasks[1], values * 320)
    estimator.add(size(32), replace(tasks[1], old_gradient_bytes=5), values * 320)
    for _ in range(SETTLED_AFTER):
        estimator.add(size(32), tasks[0], values * 32)
    found = estimator.predict(size(32))
    assert found is not None
    assert found.others or not found.trusted


def test_batches_of_another_kind_settle_nothing() -> None:
    """Images beside texts in two tasks: what paths texts take is not known by them."""
    estimator, _ = in_turns(6)
    structure, values = step(2)
    for number in range(2 * SETTLED_AFTER):
        estimator.add({"batch": 2, "pixels:1": 16 + 8 * (number % 7)}, structure, values)
    found = estimator.predict(size(50))
    assert found is not None
    assert not found.trusted


def test_a_part_of_a_path_is_no_path_of_its_own() -> None:
    """A layer dropped at random: the longest path covers it."""
    long, short = step(3), step(2)
    assert short[0].path.is_part_of(long[0].path)
    estimator = Estimator()
    for length in (16, 24, 33, 40, 48):
        estimator.add(size(length), long[0], long[1] * length)
        estimator.add(size(length + 4), short[0], short[1] * length)
    found = estimator.predict(size(50))
    assert found is not None
    assert found.structure == long[0]
    assert found.trusted
    assert found.others == ()
