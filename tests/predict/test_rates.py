"""What actions cost where the host and an accelerator work beside each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.menu import GRADES, LEAN, RECOMPUTE
from lightning_mimose.predict.assemble import assemble
from lightning_mimose.predict.rates import AGAIN_WORK, LEAN_WORK, LEAST, Rates, host_work, overlapped
from lightning_mimose.predict.shapes import Resident
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded

HOST = 0.06
"""Seconds of forward and backward on the host."""


@pytest.fixture(scope="module")
def seen() -> Observation:
    """A step of a few layers."""
    return observe(recorded(TinyText(layers=4), text_batch(4, 32), lean=True), 0, grades=GRADES)


def rates(seen: Observation, forward_seconds: float, host_seconds: float = HOST) -> Rates:
    """Where the device takes so long for the forward."""
    per_operation = forward_seconds / seen.structure.forward_operations(seen.values)
    return overlapped(seen.structure, seen.values, per_operation, host_seconds)


def prices(seen: Observation, rates: Rates) -> dict[tuple[str, str], float]:
    """What each unit's actions cost."""
    timeline = assemble(seen.structure, seen.values, Resident(0, 0, True, 0), rates=rates, minimum_share=0.0)
    return {(timeline.units[each.unit], each.action): each.added_seconds for each in timeline.options}


def total(found: dict[tuple[str, str], float], action: str, seen: Observation) -> float:
    """Of all units that nothing encloses."""
    outer = {call.unit for call in seen.structure.calls if call.region}
    return sum(seconds for (unit, each), seconds in found.items() if each == action and unit in outer)


def test_where_the_device_takes_the_time_the_host_is_free_and_operations_are_not(seen: Observation) -> None:
    """A larger batch: lean saves cost hardly anything, recomputation a third of the step."""
    found = prices(seen, rates(seen, 1.0))
    assert total(found, RECOMPUTE, seen) == pytest.approx(1.0, rel=0.05)
    assert total(found, LEAN, seen) < 0.15


def test_where_the_host_takes_the_time_operations_are_free(seen: Observation) -> None:
    """A small batch: recomputation costs what the host takes to start it all again, however little is computed."""
    found = prices(seen, rates(seen, 1e-4))
    assert total(found, RECOMPUTE, seen) == pytest.approx(AGAIN_WORK.share * HOST, rel=0.02)
    assert total(found, LEAN, seen) == pytest.approx(LEAN_WORK.share * HOST, rel=0.02)
    assert prices(seen, rates(seen, 1e-5)) == pytest.approx(found, rel=0.02)


def test_units_inside_others_cost_the_host_what_goes_with_what_they_save(seen: Observation) -> None:
    """Nobody has looked into them; they are not free for that."""
    found = prices(seen, rates(seen, 1e-4))
    inner = found["layers.0.mlp", RECOMPUTE]
    assert 0.1 * found["layers.0", RECOMPUTE] < inner < found["layers.0", RECOMPUTE]


@given(forward=st.floats(1e-4, 1.0), host=st.floats(1e-3, 1.0))
def test_all_recomputed_costs_what_the_slower_one_takes_longer(seen: Observation, forward: float, host: float) -> None:
    """In each of forward and backward; what is hidden behind the other one a little besides."""
    more = AGAIN_WORK.share * host
    first, last = more * AGAIN_WORK.in_forward, more * (1 - AGAIN_WORK.in_forward)
    longer = max(host / 2 + first, forward) - max(host / 2, forward)
    longer += max(host / 2 + last, 3 * forward) - max(host / 2, 2 * forward)
    found = total(prices(seen, rates(seen, forward, host)), RECOMPUTE, seen)
    assert longer * 0.999 <= found <= longer + LEAST * (more + forward) + 1e-9


def test_nothing_is_ever_for_nothing(seen: Observation) -> None:
    """Of two actions that are hidden, the one that does less is taken."""
    for forward in (1e-4, 1.0):
        assert min(prices(seen, rates(seen, forward)).values()) > 0


def test_units_that_nobody_has_looked_into_are_priced_by_their_operations(seen: Observation) -> None:
    """Where only recomputation is planned with."""
    bare = replace(seen.structure, lean=())
    assert overlapped(bare, seen.values, 1e-12, HOST) == Rates(1e-12)
    assert host_work(bare, seen.values, {}) == 0


def test_what_a_plan_adds_on_the_host(seen: Observation) -> None:
    """By the tensors that its units save: all of them, or some."""
    outer = [call.unit for call in seen.structure.calls if call.region]
    assert host_work(seen.structure, seen.values, dict.fromkeys(outer, RECOMPUTE)) == pytest.approx(AGAIN_WORK.share)
    assert host_work(seen.structure, seen.values, dict.fromkeys(outer, LEAN)) == pytest.approx(LEAN_WORK.share)
    assert 0 < host_work(seen.structure, seen.values, {outer[0]: LEAN}) < LEAN_WORK.share
