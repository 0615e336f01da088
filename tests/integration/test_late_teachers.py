"""Networks that are called without gradients from some step on: a teacher after a warm-up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.architectures import equal, train

BEGINS, LEARNING = 12, 4


class Student(nn.Module):
    """A few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 48), nn.Linear(48, 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, dropout=0.0) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Taught(nn.Module):
    """The teacher sees several views of every batch, after the student, so that its activations add to what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Student(), Student().requires_grad_(False)

    def forward(self, x: torch.Tensor, *, taught: bool) -> torch.Tensor:
        out = self.student(x)
        loss = out.logsumexp(-1).mean()
        if taught:
            with torch.no_grad():
                wanted = self.teacher(x.repeat(3, 1, 1)).view(3, *out.shape).mean(0)
            loss = loss + (out - wanted).square().mean()
        return loss


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_a_teacher_that_comes_late_breaks_the_budget_once_at_most(share: float) -> None:
    """The first step with one was planned without; the next is not."""
    rng = random.Random(0)
    data: list[dict[str, Any]] = [
        {"x": torch.randn(8, rng.randrange(30, 90), 8), "taught": step >= BEGINS} for step in range(30)
    ]

    def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"], taught=batch["taught"])
        return loss

    plain = train(Taught, data, None, loss_of)
    budget = plain.budget(share)
    done = train(Taught, data, budget, loss_of)
    records = list(done.mimose.records)
    assert equal(done, plain)
    assert {step for step, peak in enumerate(done.peaks) if peak > budget} <= {BEGINS}
    assert not records[BEGINS].sheltered
    assert records[BEGINS + 1].sheltered
    planned = [step for step in range(BEGINS + 1, len(data)) if not records[step].sheltered]
    assert len(planned) >= len(data) - BEGINS - 1 - LEARNING
    for step in planned:
        predicted = records[step].predicted_peak_bytes
        assert predicted is not None
        assert abs(predicted - done.peaks[step]) <= 0.01 * done.peaks[step]
