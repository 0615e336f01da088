"""Budgets that lean saves keep and recomputing every unit does not: one unit is most of the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mimose import BudgetInfeasibleError, Mimose
from tests.helpers.loops import plain_step
from tests.helpers.meter import PeakMeter

WIDTH, WIDE, DEPTH = 16, 96, 6
LENGTHS = (96, 48, 192, 192, 192, 64, 96, 192, 160, 192)


class Chain(nn.Module):
    """Element-wise operations one after the other: recomputed, all that they save is there at once."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.inside = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(self.inside(functional.gelu(self.up(x))))
        return out


class Uneven(nn.Module):
    """A wide block among small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chain(WIDTH, 1), Chain(WIDE, DEPTH), Chain(WIDTH, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of batch x tokens x width, a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The model's own."""
    value: torch.Tensor = model(batch)
    return value


def train(budget: int | None, **options: Any) -> tuple[dict[str, torch.Tensor], list[int], int, list[Any]]:
    """Weights, the meter's peaks, what was resident, and what the plugin has written down."""
    torch.manual_seed(0)
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    mimose = None
    if budget is not None:
        mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss, units=["blocks.*"], **options)
    peaks, resident = [], 0
    for i, length in enumerate(LENGTHS):
        batch = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(i))
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is None:
                plain_step(model, optimizer, batch, loss)
            else:
                mimose.step(batch)
        peaks.append(meter.peak_bytes)
        resident = max(resident, meter.resident_bytes)
    records = [] if mimose is None else list(mimose.records)
    if mimose is not None:
        mimose.close()
    return dict(model.state_dict()), peaks, resident, records


def budget_of(share: float) -> tuple[int, dict[str, torch.Tensor]]:
    """The budget at which this share of the activation memory may be used, and the weights without one."""
    weights, peaks, resident, _ = train(None)
    return int(resident + share * (max(peaks) - resident)), weights


def test_what_the_shelter_breaks_once_plans_keep() -> None:
    """The first large batch is over, for nothing was known of its size; who asks to go on is held from then on."""
    budget, weights = budget_of(0.6)
    with pytest.raises(BudgetInfeasibleError, match=r'hold this budget .*: on_infeasible="warn" goes on with them'):
        train(budget)
    with pytest.warns(UserWarning, match="goes on with them") as told:
        found, peaks, _, records = train(budget, on_infeasible="warn")
    assert len(told) == 1
    assert [i for i, peak in enumerate(peaks) if peak > budget] == [2]
    assert records[2].sheltered
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    for record, peak in zip(records[3:], peaks[3:], strict=True):
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


def test_what_no_plan_keeps_is_refused() -> None:
    """Lean saves spare too little as well, and nothing else is said."""
    budget, _ = budget_of(0.4)
    with pytest.raises(BudgetInfeasibleError, match=r"with every unit recomputed[.;]|with every unit recomputed now"):
        train(budget)


def test_where_only_recomputing_is_asked_for_it_is_refused() -> None:
    """The same budget that lean saves would keep."""
    budget, _ = budget_of(0.6)
    with pytest.raises(BudgetInfeasibleError, match="with every unit recomputed"), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(budget, actions=["recompute"])


def test_steps_that_are_sheltered_every_time_are_refused() -> None:
    """That plans keep the budget is not said of a penalty's steps, of which nothing is learnt."""
    budget, _ = budget_of(0.7)
    torch.manual_seed(0)
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def penalized(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = loss(model, batch)
        if batch.requires_grad:
            (slope,) = torch.autograd.grad(value, batch, create_graph=True)
            value = value + slope.square().sum()
        return value

    def step(mimose: Mimose, i: int) -> None:
        length = LENGTHS[i] if i < 3 else 192
        mimose.step(torch.randn(4, length, WIDTH).requires_grad_(i > 6 and i % 3 == 2))

    with (
        warnings.catch_warnings(),
        Mimose(model, budget=budget, optimizer=optimizer, loss_fn=penalized, units=["blocks.*"]) as mimose,
    ):
        warnings.simplefilter("ignore")
        for i in range(8):
            step(mimose, i)
        with pytest.raises(BudgetInfeasibleError, match="with every unit recomputed") as refused:
            step(mimose, 8)
        assert "goes on with them" not in str(refused.value)
