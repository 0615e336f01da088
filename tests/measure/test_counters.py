"""The allocator's counters: what is read of them, of torch's own allocator and of others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.counters import Counters
from lightning_mimose.measure.peak import PeakRecorder
from tests.helpers.allocator import Accelerator, play

CUDA, OTHER = torch.device("cuda:0"), torch.device("xpu:0")


def pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    """One counter, as torch has it for each pool."""
    return {"all": {"current": current, "peak": peak}, "small_pool": {"current": 1, "peak": 1}}


def stats(**counted: tuple[int, int]) -> dict[str, Any]:
    return {"num_ooms": 0, **{name: pools(*both) for name, both in counted.items()}}


def test_all_counters_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device with torch's own allocator: what was asked for, and what cannot be given back."""
    found = stats(
        requested_bytes=(90, 180),
        allocated_bytes=(100, 200),
        active_bytes=(110, 210),
        inactive_split_bytes=(130, 150),
        reserved_bytes=(300, 400),
    )
    calls: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: calls.append(device) or found)
    assert counters.read(CUDA) == Counters(90, 180, 240, 300, 400)
    assert calls == [CUDA]


def test_an_allocator_that_does_not_count_what_was_asked_for_is_read_by_what_it_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cudaMallocAsync says 0."""
    found = stats(requested_bytes=(0, 0), allocated_bytes=(100, 200), reserved_bytes=(300, 400))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: found)
    assert counters.read(CUDA) == Counters(100, 200, 200, 300, 400)


def test_another_kind_of_accelerator_is_read_by_the_general_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has them flat, and has none before anything was allocated."""
    flat = OrderedDict({"allocated_bytes.all.current": 7, "allocated_bytes.all.peak": 9})
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: flat)
    assert counters.read(OTHER) == Counters(7, 9, 9, 0, 0)
    flat.clear()
    assert counters.read(OTHER) == Counters(0, 0, 0, 0, 0)


@pytest.mark.parametrize("device", [OTHER, CUDA], ids=str)
def test_a_device_that_cannot_be_read_is_known(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's has no such counters, nor has an allocator that was plugged in."""

    def fail(*_: object) -> None:
        raise NotImplementedError if device is OTHER else RuntimeError("CUDAPluggableAllocator has no stats")

    for module in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(module, "reset_peak_memory_stats", fail)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert not counters.can_be_read(device)


def test_a_peak_is_told_above_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are there at the start count as old ones, and what was there before is no peak.

    A later part of the step begins with what the first one has left.
    """
    device = torch.device("cpu")
    with play(monkeypatch) as accelerator:
        assert isinstance(accelerator, Accelerator)
        lasting, gradients = torch.zeros(1000), torch.zeros(500)
        before = torch.zeros(10_000)
        del before
        recorder = PeakRecorder(device, lambda there: there - 500 * 4)
        recorder.start()
        more, left = torch.zeros(300), torch.zeros(200)
        del gradients, more
        recorder.look()
        trace = recorder.stop()
        update = PeakRecorder(device, lambda there: recorder.lasting_bytes)
        update.start()
        torch.zeros(900)
        later = update.stop()
        del lasting, left
    assert trace.peak_bytes == (500 + 300 + 200) * 4
    assert trace.allocator is not None
    assert trace.allocator.reserved_bytes >= trace.allocator.held_bytes >= (1000 + 500 + 300 + 200) * 4
    assert later.peak_bytes == (200 + 900) * 4
    assert [each.intervals[-1].level_bytes for each in (trace, later)] == [(200 - 500) * 4, 0]
