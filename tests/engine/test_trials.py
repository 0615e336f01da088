"""Recipes are tried where there is room, also when few sizes come again and again, and never break the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.actions.session import Session
from lightning_mimose.engine.trials import Trials
from lightning_mimose.menu import GRADES, RECOMPUTE
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.meter import PeakMeter


class Block(nn.Module):
    """Convolutions, norms and activations, of which the activations can be rebuilt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(3)]
        self.layers = nn.Sequential(*(each for layer in layers for each in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        out: torch.Tensor = x + self.layers(x)
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[Block(16) for _ in range(5)])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def as_lean_as_may_be(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
    """Lean whatever may be, and no more recomputed than has to be: which is faster is the machine's business."""
    chosen: dict[str, str] = {}
    units = [unit for unit, parent in zip(timeline.units, timeline.parents, strict=True) if parent < 0]
    for unit in units:
        grades = [grade for grade in GRADES if (unit, grade) in timeline.option_index]
        if grades:
            chosen[unit] = grades[-1]
    for unit in units:
        if timeline.peak_bytes(chosen) <= 0.98 * budget_bytes:
            break
        if (unit, RECOMPUTE) in timeline.option_index:
            chosen[unit] = RECOMPUTE
    return chosen


def test_few_sizes_in_a_tight_budget() -> None:
    """Two sizes, whose plans are known after a step each: every block is tried all the same, within the budget."""
    torch.manual_seed(1)
    batches = [torch.randn(8, 3, 24, 24), torch.randn(8, 3, 32, 32)]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    peaks = []
    for batch in (*batches, *batches):
        with PeakMeter(model, optimizer, batch) as meter:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        peaks.append((meter.peak_bytes, meter.resident_bytes))
    peak, resident = max(peaks)
    budget = int(resident + 0.45 * (peak - resident))

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    highest = []
    with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss_of, planner=as_lean_as_may_be) as mimose:
        for batch in batches * 5:
            with PeakMeter(model, optimizer, batch) as meter:
                mimose.step(batch)
            highest.append(meter.peak_bytes)
        last = list(mimose.records)[-len(batches) :]
    assert max(highest) <= budget
    assert all(record.cache_hit for record in last)
    assert sum(record.lean_units for record in last) > sum(record.recomputed_units for record in last)


def test_what_another_rank_refused_for_this_step_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the plan and the step, where the shelter has lost it already."""
    monkeypatch.setattr("lightning_mimose.engine.trials.room_to_try", lambda *_: {"a", "b"})
    advisor: Any = SimpleNamespace(
        shelter={"a": "recompute", "b": "recompute"},
        budget_bytes=1,
        indivisible={},
        limit=lambda *_: None,
    )
    session, step = (
        Session(),
        SimpleNamespace(retried=False, size=1, resident=None, advice=SimpleNamespace(cache_hit=False)),
    )
    session.untried.update(("a", "b"))
    trials = Trials(advisor, session)
    trials.limit_menu()
    del advisor.shelter["b"]
    session.news = True
    trials.arm(step)  # type: ignore[arg-type]
    assert session.tries == {"a"}
