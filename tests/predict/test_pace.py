"""The pace of an accelerator, from whole steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_mimose.measure.observe import observe
from lightning_mimose.menu import GRADES, RECOMPUTE
from lightning_mimose.predict.pace import CHANGED, FEWEST_LAPS, STEP, Pace, operations_of
from lightning_mimose.predict.shapes import LeanShape
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


def test_a_few_steps_are_timed_before_they_are_believed() -> None:
    """Then it is what most of them took, not what one was disturbed by."""
    pace = Pace()
    news = [pace.add(1e12, seconds) for seconds in (0.1, 0.1, 5.0, 0.1, 0.1)]
    assert news == [False] * (FEWEST_LAPS - 1) + [True]
    assert pace.seconds_per_operation == pytest.approx(1e-13)


def test_small_steps_do_not_count_beside_large_ones() -> None:
    """They take the host's time, and nothing is saved in them."""
    pace = Pace()
    for _ in range(FEWEST_LAPS):
        pace.add(1e12, 0.1)
        pace.add(1e10, 0.1)
    assert pace.seconds_per_operation == pytest.approx(1e-13)


def test_plans_are_made_anew_only_where_it_differs_much() -> None:
    """A machine's speed varies by itself."""
    pace = Pace()
    for _ in range(FEWEST_LAPS):
        pace.add(1e12, 0.1)
    assert not any(pace.add(1e12, 0.1 * (CHANGED - 0.1)) for _ in range(40))
    assert pace.seconds_per_operation == pytest.approx(1e-13)
    assert sum(pace.add(1e12, 0.2) for _ in range(40)) == 1
    assert pace.seconds_per_operation == pytest.approx(2e-13)


def test_what_took_no_time_or_did_nothing_tells_nothing() -> None:
    """A clock may stand still."""
    pace = Pace()
    assert not any(pace.add(operations, seconds) for operations, seconds in 20 * [(0.0, 1.0), (1e9, 0.0)])
    assert pace.seconds_per_operation is None


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
