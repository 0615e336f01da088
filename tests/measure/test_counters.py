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
        inactive_split_bytes=(130, 150),
        reserved_bytes=(300, 400),
    )
    calls: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: calls.append(device) or found)
    assert counters.read(CUDA) == Counters(90, 180, 230, 300, 400)
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


def test_a_device_that_cannot_be_read_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's has no such counters."""

    def fail(device: torch.device) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.accelerator, "memory_stats", fail)
    assert not counters.can_be_read(torch.device("mps"))
    assert counters.can_be_read(CUDA)


def test_a_peak_is_told_above_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are there at the start count as old ones, and what was there before is no peak."""
    device = torch.device("cpu")
    with play(monkeypatch) as accelerator:
        assert isinstance(accelerator, Accelerator)
        lasting, gradients = torch.zeros(1000), torch.zeros(500)
        before = torch.zeros(10_000)
        del before
        recorder = PeakRecorder(device, lasting.nbytes)
        recorder.start()
        more = torch.zeros(300)
        del gradients, more
        trace = recorder.stop()
    assert trace.peak_bytes == (500 + 300) * 4
    assert trace.allocator is not None
    assert trace.allocator.reserved_bytes >= trace.allocator.held_bytes >= (1000 + 500 + 300) * 4
