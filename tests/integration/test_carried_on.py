"""What a loop carries on or makes and gives to units, and what units return in objects of their users' own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from lightning_mimose import Mimose
from tests.helpers.inside import Case, sgd, trained
from tests.helpers.meter import PeakMeter

WIDTH, MEMORY = 32, 24


class Block(nn.Module):
    """Attention to what came before, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.tells, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Of batch x tokens x width, beside what came before them."""
        keys, values = self.tells(torch.cat([before, x], 1)).chunk(2, -1)
        x = x + self.out((self.asks(x) @ keys.transpose(1, 2)).softmax(-1) @ values)
        out: torch.Tensor = x + self.dropout(self.mlp(x))
        return out


class Remembering(nn.Module):
    """Each block sees the end of what it was given in the step before, as Transformer-XL's do."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, memories: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result, and the memories of the next step."""
        x, following = self.into(x), []
        for block, memory in zip(self.blocks, memories, strict=True):
            following.append(torch.cat([memory, x.detach()], 1)[:, -MEMORY:].clone())
            x = block(x, memory)
        return x, following


class Loop:
    """Carries the memories."""

    def __init__(self) -> None:
        self.memories = [torch.zeros(4, MEMORY, WIDTH)] * 4

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The mean square."""
        out, self.memories = model(batch, self.memories)
        loss: torch.Tensor = out.square().mean()
        return loss


@dataclass
class Output:
    """What a block returns."""

    hidden: torch.Tensor
    size: torch.Tensor


@dataclass(slots=True)
class Slotted(Output):
    """The same without a dictionary."""


class Returning(Block):
    """Returns an object."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        """What comes out, and how large it is."""
        hidden = super().forward(functional.dropout(x, 0.1), x)
        return self.kind(hidden=hidden, size=hidden.mean())


class Objects(nn.Module):
    """Blocks that return such."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Returning(kind) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x, sizes = self.into(x), []
        for block in self.blocks:
            out = block(x)
            x = out.hidden
            sizes.append(out.size)
        return x.square().mean() + 0.1 * torch.stack(sizes).sum()


class Plain(nn.Module):
    """Blocks that see nothing but what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square."""
        x = self.into(x)
        for block in self.blocks:
            x = block(x, x[:, :1])
        return x.square().mean()


def noisy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss under weights that are made for this step."""
    weights = {name: weight * 1.01 for name, weight in model.named_parameters()}
    loss: torch.Tensor = functional_call(model, weights, (batch,))
    return loss


def batch(chance: random.Random, number: int) -> torch.Tensor:
    """Texts of one length."""
    return torch.randn(4, chance.randint(32, 96), 8, generator=torch.Generator().manual_seed(number))


def held(make_case: Any, share: float, sheltered: int) -> None:
    plain = trained(make_case())
    budget = plain.budget(share)
    ours = trained(make_case(), budget)
    assert max(ours.peaks) <= budget
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)
    planned = [(record, peak) for record, peak in zip(ours.records, ours.peaks, strict=True) if not record.sheltered]
    assert len(ours.records) - len(planned) <= sheltered
    assert any(record.actions for record, _ in planned)
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_memories_that_a_loop_gives_back(share: float) -> None:
    held(lambda: Case(Remembering, batch, Loop().loss, 0), share, sheltered=8)


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_weights_that_are_made_in_the_step(share: float) -> None:
    held(lambda: Case(Plain, batch, noisy, 0), share, sheltered=5)


PLANS: list[dict[str, str]] = [
    {},
    {"blocks.0": "recompute"},
    {"blocks.1": "lean", "blocks.2": "lean+masks"},
    {"blocks.0": "lean+masks", "blocks.1.mlp": "recompute", "blocks.3": "lean"},
]


@pytest.mark.parametrize("kind", [Output, Slotted, SimpleNamespace])
def test_results_in_objects(kind: Any) -> None:
    torch.manual_seed(0)
    model, chance, plan = Objects(kind), random.Random(0), PLANS[0]
    optimizer = sgd(model)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        return loss

    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss_of, planner=lambda *_: plan) as mimose:
        for number in range(8):
            mimose.step(batch(chance, number))
        for number, plan in enumerate(PLANS, 8):
            x = batch(chance, number)
            with PeakMeter(model, optimizer, x) as meter:
                mimose.step(x)
            record = mimose.records[-1]
            assert dict(record.actions) == plan
            assert record.predicted_peak_bytes == pytest.approx(meter.peak_bytes, rel=0.005)
