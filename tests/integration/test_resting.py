"""Trainings that are never learnt: after many steps most are sheltered as before, but not measured any more."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_mimose.predict.resting import LEARNT_STEPS
from tests.helpers.architectures import Batch, equal, train

STEPS, LONGER_STEPS, WIDTH = 100, 20, 32
SHORT, LONG = range(50, 61), range(80, 86)


class Critic(nn.Module):
    """A score for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of batch x tokens x width."""
        score: torch.Tensor = self.head(self.blocks(x).mean(1))
        return score


def penalised(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss whose step runs backward in its midst, as no plan expects."""
    x = batch["x"].clone().requires_grad_()
    score = model(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss: torch.Tensor = score.square().mean() + 10 * gradient.square().sum()
    return loss


def samples() -> list[Batch]:
    """Of many lengths, and at the end longer ones."""
    chance = random.Random(0)
    lengths = [*chance.choices(SHORT, k=STEPS), *chance.choices(LONG, k=LONGER_STEPS)]
    return [{"x": torch.randn(4, n, WIDTH, generator=torch.Generator().manual_seed(i))} for i, n in enumerate(lengths)]


@pytest.mark.filterwarnings("ignore:A step ran backward twice over one graph")
def test_most_steps_of_those_that_are_never_learnt_are_not_measured() -> None:
    """They are held as before; and longer samples, of which nothing is known, are all measured again."""
    plain = train(Critic, samples(), loss_fn=penalised)
    ours = train(Critic, samples(), plain.budget(1.05), penalised, units=["blocks.*"])
    assert ours.mimose is not None
    records = ours.mimose.records
    assert equal(plain, ours)
    assert max(ours.peaks) <= ours.mimose.budget_bytes
    assert all(record.sheltered and record.actions == records[0].actions for record in records)
    assert set(records[0].actions.values()) == {"recompute"}
    measured = [record.measured_peak_bytes is not None for record in records]
    assert all(measured[:LEARNT_STEPS])
    assert 0 < sum(measured[LEARNT_STEPS:STEPS]) < 0.5 * (STEPS - LEARNT_STEPS)
    assert all(measured[STEPS + 1 :])
    for record, peak in zip(records, ours.peaks, strict=True):
        assert record.measured_peak_bytes in (None, pytest.approx(peak, rel=0.01))
