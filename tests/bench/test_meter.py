"""The benchmark's meter of an accelerator, on an allocator that is played on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_mimose.bench.meter import DeviceMeter, PeakMeter
from tests.helpers.allocator import Accelerator

KIB = 1024


def test_what_is_replaced_counts_once() -> None:
    """Whoever allocated it: here it was there before any session."""
    peaks = []
    for in_place in (False, True):
        model = nn.Linear(256, 256, bias=False)
        with PeakMeter(model) as meter:
            new = model.weight.data * 0.9
            if in_place:
                model.weight.data.copy_(new)
            else:
                model.weight.data = new
            del new
            kept = torch.ones(256, 512)
        peaks.append(meter.peak_bytes)
        del kept
    assert peaks == [3 * 256 * KIB, 3 * 256 * KIB]


@dataclass
class Graph:
    """A batch that pytree cannot take apart."""

    nodes: torch.Tensor
    edges: dict[str, torch.Tensor]


def test_what_is_in_a_batch_of_ones_own_is_resident() -> None:
    model, graph = nn.Linear(8, 8, bias=False), Graph(torch.ones(KIB), {"index": torch.ones(2 * KIB)})
    with PeakMeter(model, None, [graph, "a name"]) as meter:
        pass
    assert meter.resident_bytes == (64 + 3 * KIB) * 4


def test_who_puts_the_allocators_mark_back_hides_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package does so in every step that it measures."""
    accelerator = Accelerator(fragments=False)
    allocator = accelerator.allocator
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator.read().requested_bytes)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.read().requested_peak_bytes)
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "reset_peak_memory_stats", lambda device: allocator.reset_peaks())
    device = torch.device("cuda:0")
    with accelerator:
        model = torch.nn.Linear(8, 8)
        besides = torch.zeros(10 * KIB, dtype=torch.uint8)
        meter = DeviceMeter(PeakMeter(model), device)
        before = torch.cuda.reset_peak_memory_stats
        with meter:
            highest = torch.zeros(50 * KIB, dtype=torch.uint8)
            del highest
            torch.cuda.reset_peak_memory_stats(device)
            torch.accelerator.reset_peak_memory_stats(device)
            torch.zeros(20 * KIB, dtype=torch.uint8)
        assert torch.cuda.reset_peak_memory_stats is before
        del besides
    assert meter.peak_bytes - meter.resident_bytes == 50 * KIB
