"""What is on an accelerator besides what the ledger knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.cap import PAGE_BYTES
from lightning_mimose.measure.others import GRAIN_SHARE, Others, bytes_beside, take_workspaces
from tests.helpers.allocator import WORKSPACE_BYTES, play

DEVICE = torch.device("cpu")
BUDGET = 10_000_000
GRAIN = int(GRAIN_SHARE * BUDGET)


def test_there_is_nothing_on_a_cpu() -> None:
    """Nobody counts what a process has there."""
    kept = torch.zeros(1 << 20)
    assert Others(DEVICE, BUDGET).count(0) == (0, 0)
    assert bytes_beside(DEVICE, 0) == 0
    del kept


def test_it_is_counted_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is left out, and the rest is rounded up, so that a few numbers more make no other plan."""
    with play(monkeypatch):
        known, besides = torch.zeros(1000), torch.zeros(10_000)
        counted = Others(DEVICE, BUDGET)
        assert bytes_beside(DEVICE, known.nbytes) == besides.nbytes
        there, first = counted.count(known.nbytes)
        assert there == besides.nbytes
        assert 0 <= first - there < GRAIN
        metric = torch.zeros(1)
        assert counted.count(known.nbytes) == (there + metric.nbytes, first)
        del metric
        assert counted.count(10 * known.nbytes + besides.nbytes) == (0, 0)


def test_what_comes_and_goes_is_reckoned_with_as_far_as_it_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """More counts at once."""
    with play(monkeypatch):
        counted = Others(DEVICE, BUDGET)
        kept = torch.zeros(10 * GRAIN, dtype=torch.uint8)
        assert counted.count(0) == (10 * GRAIN, 10 * GRAIN)
        comes = torch.zeros(GRAIN, dtype=torch.uint8)
        assert counted.count(0) == (11 * GRAIN, 11 * GRAIN)
        del comes
        assert counted.count(0) == (10 * GRAIN, 11 * GRAIN)
        del kept
        assert counted.count(0) == (0, 0)


def test_libraries_take_their_workspaces_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later products find them there."""
    with play(monkeypatch) as accelerator, torch.inference_mode():
        take_workspaces(DEVICE)
        before = accelerator.allocator.read().requested_bytes
        assert before == WORKSPACE_BYTES
        torch.ones(4, 4) @ torch.ones(4, 4)
        assert accelerator.allocator.read().requested_bytes == before


def test_what_the_allocator_must_not_give_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its segments grow by whole pages after it has looked at its limit."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: True")
    monkeypatch.setattr(counters, "read", lambda device: SimpleNamespace(requested_bytes=1000))
    budget = 4 << 30
    there, reckoned = Others(torch.device("cuda", 0), budget).count(400)
    assert there == 600 + PAGE_BYTES
    assert there <= reckoned < there + 2 * GRAIN_SHARE * budget
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert Others(torch.device("cuda", 0), budget).count(400)[0] == 600
