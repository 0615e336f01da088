"""Penalties on gradients in some steps: nobody knows before, but for the input that wants a gradient."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_mimose import BudgetInfeasibleError
from tests.helpers.inside import Case, Trained, trained

WIDTH, EVERY = 32, 4
TOLD = pytest.mark.filterwarnings("ignore:A step ran backward twice over one graph")


class Block(nn.Module):
    """A residual MLP that is smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Critic(nn.Module):
    """A score for each sample."""

    def __init__(self, *, stem: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of batch x tokens x width."""
        score: torch.Tensor = self.head(self.blocks(self.stem(x)).mean(1))
        return score


def penalised(model: nn.Module, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
    """A loss, with a penalty on its input's gradient where that is due."""
    x, due = batch
    if not due:
        loss: torch.Tensor = model(x).square().mean()
        return loss
    x = x.clone().requires_grad_()
    score = model(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.square().mean() + 10 * gradient.square().sum()


def prepared(model: nn.Module, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
    """Every input wants a gradient, as adapters' do in a frozen model; there is no penalty."""
    loss: torch.Tensor = model(batch[0].clone().requires_grad_()).square().mean()
    return loss


def batch(chance: random.Random, number: int) -> tuple[torch.Tensor, bool]:
    """The penalty is due in every fourth step, for the first time when everything else is learnt."""
    x = torch.randn(4, chance.randint(16, 64), WIDTH, generator=torch.Generator().manual_seed(number))
    return x, number % EVERY == EVERY - 1 and number > EVERY


def exact(ours: Trained, plain: Trained) -> None:
    for record, peak in zip(ours.records, ours.peaks, strict=True):
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)


@TOLD
@pytest.mark.parametrize("stem", [False, True])
def test_penalties_that_come_now_and_then_are_sheltered_and_nothing_else_is(stem: bool) -> None:
    def case() -> Case:
        return Case(lambda: Critic(stem=stem), batch, penalised, 0, units=tuple(f"blocks.{i}" for i in range(4)))

    plain = trained(case())
    budget = plain.budget(1.05)
    ours = trained(case(), budget)
    assert max(ours.peaks) <= budget
    exact(ours, plain)
    due = [number % EVERY == EVERY - 1 for number in range(len(ours.records))]
    assert [record.sheltered for record in ours.records][EVERY:] == due[EVERY:]


@TOLD
def test_a_budget_that_no_penalty_fits_into_is_refused() -> None:
    def case() -> Case:
        return Case(lambda: Critic(stem=False), batch, penalised, 0)

    with pytest.raises(BudgetInfeasibleError, match="with every unit recomputed"):
        trained(case(), trained(case()).budget(0.6))


def test_inputs_that_want_gradients_in_every_step_are_planned() -> None:
    def case() -> Case:
        return Case(lambda: Critic(stem=False), batch, prepared, 0)

    plain = trained(case())
    budget = plain.budget(0.6)
    ours = trained(case(), budget)
    assert max(ours.peaks) <= budget
    exact(ours, plain)
    assert sum(record.sheltered for record in ours.records) <= 4
    assert any(record.actions for record in ours.records if not record.sheltered)
