"""Units that keep a part of what they are given: recomputed, they hold all of it, and save next to nothing."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

from lightning_mimose import BudgetInfeasibleError
from tests.helpers.architectures import Trained, equal, train

WIDTH = 32


class Pool(nn.Module):
    """Keeps the first of six parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sixth as long."""
        part = x[:, : x.shape[1] // 6].clone()
        out: torch.Tensor = self.mix(part).relu()
        return out


class Mixed(nn.Module):
    """Layers that are worth recomputing, and before each pool a sequence that nobody saves."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)
        )
        self.pools = nn.ModuleList(Pool() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        for pool in self.pools:
            x = pool(torch.cat([x + number for number in range(6)], 1))
        return x.square().mean()


def build(layers: int) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return Mixed(layers)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model returns."""
    loss: torch.Tensor = model(x)
    return loss


def trained(layers: int, share: float) -> tuple[Trained, Trained, int, list[str]]:
    """Without and with a share of the activation memory: both, the budget, and the warnings."""
    chance = random.Random(0)
    batches = [torch.randn(4, chance.randrange(64, 257, 8), 8) for _ in range(24)]
    plain = train(lambda: build(layers), batches, None, loss_of)
    budget = plain.budget(share)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = train(lambda: build(layers), batches, budget, loss_of)
    return plain, done, budget, [str(each.message) for each in caught]


@pytest.mark.parametrize(("layers", "share"), [(0, 1.05), (0, 1.5), (2, 0.9)])
def test_what_the_shelter_is_better_off_without_is_kept_from_its_first_measured_step_on(
    layers: int, share: float
) -> None:
    """That one breaks a budget which would hold without saving anything, or with less; it does not end the training."""
    plain, done, budget, told = trained(layers, share)
    assert equal(plain, done)
    over = [step for step, peak in enumerate(done.peaks) if peak > budget]
    assert len(over) == 1
    assert done.mimose is not None
    records = done.mimose.records
    assert records[over[0]].sheltered
    assert ["hold more of what they are given than they save then" in each for each in told] == [True]
    assert not any(record.sheltered for record in list(records)[8:])
    for record in list(records)[over[0] + 1 :]:
        assert not (record.sheltered and any(unit.startswith("pools.") for unit in record.actions))


def test_a_budget_that_does_not_hold_without_them_either_is_refused() -> None:
    """As ever, with one that does."""
    with pytest.raises(BudgetInfeasibleError) as refused:
        trained(2, 0.2)
    assert refused.value.smallest_feasible_bytes is not None
    assert refused.value.smallest_feasible_bytes > refused.value.budget_bytes
