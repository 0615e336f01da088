"""Trainings that are never learnt: after many steps most are sheltered as before, but not measured any more."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_mimose.advise.advice import Advice
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.plan import Plan
from lightning_mimose.predict.resting import LEARNT_STEPS
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sizes import BatchSize
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
    """They are held, and keep what there is room for; longer samples, of which nothing is known, are all measured."""
    plain = train(Critic, samples(), loss_fn=penalised)
    ours = train(Critic, samples(), plain.budget(1.05), penalised, units=["blocks.*"])
    assert ours.mimose is not None
    records = ours.mimose.records
    assert equal(plain, ours)
    assert max(ours.peaks) <= ours.mimose.budget_bytes
    shelter = records[0].actions
    assert set(shelter.values()) == {"recompute"}
    for record in records:
        assert record.actions == shelter if record.sheltered else record.actions.items() < shelter.items()
    assert all(record.sheltered for record in [*records[:LEARNT_STEPS], *records[STEPS + 1 :]])
    measured = [record.measured_peak_bytes is not None for record in records]
    assert all(measured[:LEARNT_STEPS])
    assert 0 < sum(measured[LEARNT_STEPS:STEPS]) < 0.5 * (STEPS - LEARNT_STEPS)
    assert all(measured[STEPS + 1 :])
    for record, peak in zip(records, ours.peaks, strict=True):
        assert record.measured_peak_bytes in (None, pytest.approx(peak, rel=0.01))


class Dropping(nn.Module):
    """Many blocks, of which every step leaves out others: hardly any is a part of another, or has them all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            if torch.rand(()) >= 0.2:
                x = x + block(x)
        return x.square().mean()


def dropping() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return Dropping()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What it gives."""
    out: torch.Tensor = model(x)
    return out


@pytest.mark.conformance("How people train", "a fifth of many blocks left out by chance in each step", "works")
def test_what_surely_fits_is_kept_where_nothing_is_learnt() -> None:
    """No plan is ever trusted; but what sheltered steps took, and all that the units kept would have saved, fits."""
    chance = random.Random(1)
    batches = [torch.randn(4, chance.randrange(40, 80), WIDTH) for _ in range(130)]
    plain = train(dropping, batches, loss_fn=loss_of)
    with pytest.warns(UserWarning, match="60 steps and more ran sheltered"):
        ours = train(dropping, batches, plain.budget(0.8), loss_of, units=["blocks.*"])
    assert ours.mimose is not None
    assert equal(plain, ours)
    assert max(ours.peaks) <= ours.mimose.budget_bytes
    later = ours.mimose.records[LEARNT_STEPS:]
    keeping = [record for record in later if not record.sheltered]
    assert len(keeping) > len(later) / 3
    assert all(0 < len(record.actions) < 24 for record in keeping)
    assert all(record.predicted_peak_bytes is None for record in keeping)


def test_a_step_that_runs_again_for_want_of_memory_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits for sure, as it seemed: it failed under a plan that was to fit as well."""
    chance = random.Random(1)
    failing = LEARNT_STEPS + 6
    batches = [torch.randn(4, chance.randrange(40, 80), WIDTH) for _ in range(failing + 2)]
    plain = train(dropping, batches, loss_fn=loss_of)
    unplanned, steps, failed = Advisor._unplanned, list[int](), list[bool]()

    def sometimes_planned(self: Advisor, size: BatchSize, resident: Resident, kept_bytes: int) -> Advice:
        steps.append(len(steps))
        if len(steps) == failing:
            return Advice(Plan((), tuple(self.shelter), kept_bytes, 0.0), kept_bytes, False)
        return unplanned(self, size, resident, kept_bytes)

    def fails_once(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        if len(steps) == failing and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory, as played")
        return loss

    monkeypatch.setattr(Advisor, "_unplanned", sometimes_planned)
    ours = train(dropping, batches, plain.budget(0.8), fails_once, units=["blocks.*"])
    assert ours.mimose is not None
    assert failed
    assert equal(plain, ours)
    (again,) = [record for record in ours.mimose.records if record.retried]
    assert len(again.actions) == 24
