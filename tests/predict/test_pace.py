"""The pace of an accelerator, from whole steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_mimose.measure.observe import observe
from lightning_mimose.menu import GRADES, OFFLOAD, RECOMPUTE, SPLITS
from lightning_mimose.predict.pace import CHANGED, FEWEST_LAPS, STEP, Pace, operations_of
from lightning_mimose.predict.shapes import LeanShape
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


def paced(*laps: tuple[float, float]) -> list[float | None]:
    """What it is after each of these steps: operations, seconds."""
    pace, found = Pace(), list[float | None]()
    for lap in laps:
        pace.add(*lap)
        found.append(pace.seconds_per_operation)
    return found


def test_a_few_steps_are_timed_before_they_are_believed() -> None:
    """Then it is what most of them took, not what one was disturbed by."""
    found = paced(*((1e12, seconds) for seconds in (0.1, 0.1, 5.0, 0.1, 0.1)))
    assert found[:-1] == [None] * (FEWEST_LAPS - 1)
    assert found[-1] == pytest.approx(1e-13)


def test_one_large_step_does_not_decide() -> None:
    """One for which kernels were chosen, or code compiled."""
    found = paced(*(16 * [(1e12, 0.1)]), (2.5e12, 20.0))
    assert found[-1] == pytest.approx(1e-13)


def test_small_steps_do_not_count_beside_large_ones() -> None:
    """They take the host's time, and nothing is saved in them."""
    found = paced(*(FEWEST_LAPS * [(1e12, 0.1), (1e10, 0.1)]))
    assert found[-1] == pytest.approx(1e-13)


def test_it_stays_where_it_hardly_changes() -> None:
    """A machine's speed varies by itself; plans are made anew for more."""
    found = paced(*(FEWEST_LAPS * [(1e12, 0.1)]), *(40 * [(1e12, 0.1 * (CHANGED - 0.1))]), *(40 * [(1e12, 0.2)]))
    assert found[FEWEST_LAPS - 1 : FEWEST_LAPS + 40] == [found[FEWEST_LAPS - 1]] * 41
    assert found[-1] == pytest.approx(2e-13)


def test_what_took_no_time_or_did_nothing_tells_nothing() -> None:
    """A clock may stand still."""
    assert paced(*(20 * [(0.0, 1.0), (1e9, 0.0)]))[-1] is None


def test_another_model_on_the_device_begins_with_what_is_known() -> None:
    """What its first steps take is believed as soon as there are a few."""
    pace = Pace()
    for _ in range(40):
        pace.add(1e12, 0.1)
    other = pace.anew()
    assert other.seconds_per_operation == pytest.approx(1e-13)
    for _ in range(FEWEST_LAPS):
        other.add(1e10, 0.1)
    assert other.seconds_per_operation == pytest.approx(1e-11)


def test_steps_that_waited_for_the_host_do_not_tell_what_operations_take() -> None:
    """Once there are enough that did not: of batches that take the device longer."""
    pace = Pace()
    for number in range(4 * FEWEST_LAPS):
        operations = 1e12 * (1 + number % 4)
        pace.add(operations, max(0.3, 1e-13 * operations), 0.29)
    assert pace.seconds_per_operation == pytest.approx(0.3 / 4e12)
    for _ in range(FEWEST_LAPS):
        pace.add(2e13, 1.0, 0.29)
    assert pace.seconds_per_operation == pytest.approx(5e-14)


def test_the_host_takes_what_quicker_steps_took_without_what_plans_add() -> None:
    """It may have had to wait for the device, or have been disturbed."""
    pace = Pace()
    for host_seconds in (0.5, 0.2, 0.2, 0.3, 0.9):
        pace.add(1e12, 1.0, host_seconds, 1.0)
    assert pace.host_seconds == pytest.approx(0.1)
    for _ in range(FEWEST_LAPS):
        pace.add(1e12, 1.0, 0.1 * 0.9)
    assert pace.host_seconds == pytest.approx(0.1), "hardly another one: plans are not made anew for that"
    for _ in range(FEWEST_LAPS):
        pace.add(1e12, 1.0, 0.05)
    assert pace.host_seconds == pytest.approx(0.05)


def test_who_knows_nothing_of_the_host_says_so() -> None:
    """A lap without it."""
    pace = Pace()
    for _ in range(FEWEST_LAPS):
        pace.add(1e12, 0.1)
    assert pace.host_seconds is None


@pytest.mark.parametrize("action", [OFFLOAD, SPLITS[0]])
def test_steps_that_wait_or_run_in_parts_tell_nothing(action: str) -> None:
    """What they wait for is no operation."""
    seen = observe(recorded(TinyText(layers=2), text_batch(4, 8)), 0)
    assert operations_of(seen.structure, seen.values, {"layers.0": action}) is None


def test_what_is_made_again_counts() -> None:
    """A recomputed unit runs its forward once more; a lean one rebuilds what it has not kept."""
    seen = observe(recorded(TinyText(layers=2), text_batch(4, 8)), 0)
    regions = [index for index, call in enumerate(seen.structure.calls) if call.region]
    lean = tuple(LeanShape(index, GRADES[0], 0, seen.structure.columns, ()) for index in regions)
    step, values = replace(seen.structure, lean=lean), np.append(seen.values, 1000.0)
    names = {step.calls[index].unit for index in regions}
    forward = sum(float(values[step.calls[i].flops] + values[step.calls[i].besides]) for i in regions)
    assert forward > 0
    assert operations_of(step, values, {}) == pytest.approx(STEP * forward)
    assert operations_of(step, values, dict.fromkeys(names, RECOMPUTE)) == pytest.approx((STEP + 1) * forward)
    rebuilding = operations_of(step, values, dict.fromkeys(names, GRADES[0]))
    assert rebuilding == pytest.approx(STEP * forward + 1000.0 * len(regions))
