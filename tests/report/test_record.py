"""Records: kept small, and the same when they are looked at."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

from lightning_mimose.report.record import KNOWN_ACTIONS, MAX_RECORDS, History, StepRecord

UNITS = [f"encoder.layer.{index}" for index in range(48)]


def record(at: int, **changed: Any) -> StepRecord:
    """A step whose plan and size are those of no step near it."""
    acting = [unit for bit, unit in enumerate(UNITS) if (at * 2654435761) >> (bit % 32) & 1]
    given = StepRecord(
        step=0,
        batch_idx=at,
        epoch=at % 3,
        size={"batch": 8, "input_ids:1": 1000 + at},
        sheltered=False,
        cache_hit=False,
        retried=False,
        budget_bytes=10**9,
        resident_bytes=10**6 + at,
        predicted_peak_bytes=10**8 + at,
        measured_peak_bytes=None,
        reserved_peak_bytes=None,
        actions=dict.fromkeys(acting, "recompute" if at % 2 else "lean"),
        planning_seconds=at / 7,
    )
    return replace(given, **changed)


def test_a_record_comes_back_as_it_was_given() -> None:
    """With its number; by index, from the end, in slices and in a loop."""
    history = History()
    added = [history.add(record(step)) for step in range(20)]
    assert added == [record(step, step=step) for step in range(20)]
    assert history.records == added
    assert history.records[-1] == added[-1]
    assert history.records[3:5] == added[3:5]
    assert list(history.records) == added
    assert len(history.records) == 20


def test_steps_of_one_plan_share_their_actions() -> None:
    """One dictionary for many steps: each is counted and comes back, whatever came between them."""
    history, shared = History(), {"a": "recompute", "b": "lean+masks", "c": "recompute+lean"}
    for at in range(3 * KNOWN_ACTIONS):
        own = {"a": "offload", f"unit {at}": "split2"}
        history.add(record(at, actions=shared))
        history.add(record(at, actions=own))
    assert all(found.actions == shared for found in history.records[::2])
    total, steps = history.aggregates, 3 * KNOWN_ACTIONS
    assert [list(found.actions)[1] for found in history.records[1::2]] == [f"unit {at}" for at in range(steps)]
    assert (total.recomputed_units, total.lean_units) == (2 * steps, steps)
    assert (total.split_units, total.offloaded_units) == (steps, steps)


def test_what_a_record_gives_away_is_its_readers() -> None:
    """Writing into one record's actions changes no other record's."""
    history, shared = History(), {"a": "recompute"}
    for at in range(2):
        history.add(record(at, actions=shared))
    history.records[0].actions["a"] = "lean"
    assert history.records[0].actions == history.records[1].actions == shared == {"a": "recompute"}


def test_a_copy_goes_on_with_its_own_actions() -> None:
    """Although new dictionaries may have the identity of those that the original held."""
    history = History()
    for step in range(40):
        history.add(record(step))
    sent = pickle.dumps(history)
    del history
    copy = pickle.loads(sent)
    for step in range(100, 140):
        copy.add(record(step))
    assert [each.actions for each in copy.records[40:]] == [record(step).actions for step in range(100, 140)]


def test_units_without_number() -> None:
    """More choices than two bytes can number."""
    history, many = History(), {f"unit {index}": "recompute" for index in range((1 << 16) + 5)}
    history.add(record(1))
    history.add(record(2, actions=many))
    assert dict(history.records[1].actions) == many
    assert history.records[0] == record(1, step=0)


def test_the_newest_are_kept_with_their_numbers() -> None:
    """What was asked for before stays as it was."""
    history = History()
    for step in range(MAX_RECORDS):
        history.add(record(step))
    early = history.records
    history.add(record(MAX_RECORDS))
    assert (early[0].step, len(early)) == (0, MAX_RECORDS)
    assert (history.records[0].step, history.records[-1].step) == (1, MAX_RECORDS)


def test_ten_thousand_sizes_with_plans_of_their_own_take_half_a_kilobyte_each() -> None:
    """A dictionary of 24 actions alone takes more than a kilobyte."""
    history = History()
    tracemalloc.start()
    try:
        for step in range(MAX_RECORDS):
            history.add(record(step))
        assert tracemalloc.get_traced_memory()[0] < 600 * MAX_RECORDS
    finally:
        tracemalloc.stop()
