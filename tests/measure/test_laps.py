"""Times of steps on an accelerator, which is not waited for."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose.measure.laps import MOST_WAITING, Laps
from tests.helpers.allocator import Event, play

CPU = torch.device("cpu")


def test_what_the_device_has_not_come_to_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step once, in order; nothing is waited for."""
    play(monkeypatch)
    reached: set[int] = set()
    ends: list[Event] = []
    monkeypatch.setattr(Event, "query", lambda self: ends.index(self) in reached)
    laps: Laps[str] = Laps(CPU)
    for name in ("one", "two"):
        laps.end(laps.now(), name)
        ends.append(laps._waiting[-1][1])
    assert list(laps.over()) == []
    reached.add(0)
    assert [name for name, *_ in laps.over()] == ["one"]
    assert list(laps.over()) == []
    reached.add(1)
    told = list(laps.over())
    assert [name for name, *_ in told] == ["two"]
    assert all(seconds >= 0 and host_seconds >= 0 for _, seconds, host_seconds in told)


def test_a_device_that_never_comes_to_an_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are let go of."""
    play(monkeypatch)
    monkeypatch.setattr(Event, "query", lambda self: False)
    laps: Laps[int] = Laps(CPU)
    for step in range(3 * MOST_WAITING):
        laps.end(laps.now(), step)
    monkeypatch.undo()
    play(monkeypatch)
    assert [step for step, *_ in laps.over()] == list(range(2 * MOST_WAITING, 3 * MOST_WAITING))


def test_the_hosts_time_is_told_only_where_it_had_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that looks at its mask waits for all of the step before."""
    play(monkeypatch)
    behind = False
    monkeypatch.setattr(Event, "query", lambda self: not behind)
    laps: Laps[str] = Laps(CPU)
    laps.end(laps.now(), "the first")
    laps.end(laps.now(), "idle")
    behind = True
    laps.end(laps.now(), "behind")
    behind = False
    assert [(name, host_seconds > 0) for name, _, host_seconds in laps.over()] == [
        ("the first", True),
        ("idle", True),
        ("behind", False),
    ]


def test_where_the_host_is_the_device_its_time_is_told_once() -> None:
    """What it takes for operations is no time of its own."""
    laps: Laps[str] = Laps(CPU)
    laps.end(laps.now(), "a step")
    [(_, seconds, host_seconds)] = laps.over()
    assert seconds > 0
    assert host_seconds == 0
