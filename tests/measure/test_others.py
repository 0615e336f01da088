"""What is on an accelerator besides what the ledger knows."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose.measure import others
from lightning_mimose.measure.others import LOWER_STEPS, Others, bytes_beside, take_workspaces
from tests.helpers.allocator import WORKSPACE_BYTES, play

DEVICE = torch.device("cpu")


def test_there_is_nothing_on_a_cpu() -> None:
    """Nobody counts what a process has there."""
    kept = torch.zeros(1 << 20)
    assert Others(DEVICE).count(0) == bytes_beside(DEVICE, 0) == 0
    del kept


def test_it_is_counted_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is left out, and the rest is rounded up, so that a few numbers more make no other plan."""
    with play(monkeypatch):
        known, besides = torch.zeros(1000), torch.zeros(10_000)
        counted = Others(DEVICE)
        assert bytes_beside(DEVICE, known.nbytes) == besides.nbytes
        first = counted.count(known.nbytes)
        assert besides.nbytes <= first < besides.nbytes + others.GRAIN_BYTES
        metric = torch.zeros(1)
        assert counted.count(known.nbytes) == first
        assert counted.count(10 * known.nbytes + besides.nbytes) == first
        del metric


def test_more_counts_at_once_and_less_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes and goes is reckoned with in the steps between."""
    with play(monkeypatch):
        grain, counted = others.GRAIN_BYTES, Others(DEVICE)
        kept = torch.zeros(grain, dtype=torch.uint8)
        assert counted.count(0) == grain
        comes = torch.zeros(2 * grain, dtype=torch.uint8)
        assert counted.count(0) == 3 * grain
        del comes
        assert {counted.count(0) for _ in range(LOWER_STEPS - 1)} == {3 * grain}
        assert counted.count(0) == grain
        del kept


def test_libraries_take_their_workspaces_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later products find them there."""
    with play(monkeypatch) as accelerator, torch.inference_mode():
        take_workspaces(DEVICE)
        before = accelerator.allocator.read().requested_bytes
        assert before == WORKSPACE_BYTES
        torch.ones(4, 4) @ torch.ones(4, 4)
        assert accelerator.allocator.read().requested_bytes == before
