"""`torch.nn.utils.parametrize.cached()`: weights that are made once, and taken from a table afterwards."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import equal, train

WIDTH = 32


class Symmetric(nn.Module):
    """Makes a square matrix symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The upper half, twice."""
        return weight.triu() + weight.triu(1).mT


class Block(nn.Module):
    """Adds to its input, by a normalised weight and one that is the same for both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back = weight_norm(nn.Linear(width, 4 * width)), nn.Linear(4 * width, width)
        self.same = nn.Linear(width, width)
        parametrize.register_parametrization(self.same, "weight", Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        out: torch.Tensor = x + self.same(self.back(nn.functional.gelu(self.wide(x))))
        return out


class Rounds(nn.Module):
    """Calls its blocks so many times, as a recurrent network does."""

    def __init__(self, rounds: int, width: int = WIDTH) -> None:
        super().__init__()
        self.rounds = rounds
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        out: torch.Tensor = self.head(x).square().mean()
        return out


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Torch's documented use: the context around the whole forward."""
    with parametrize.cached():
        loss: torch.Tensor = model(x)
    return loss


@pytest.mark.conformance("How people train", "parametrized weights that are cached around the forward", "works")
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_cached_weights_are_found_again(rounds: int, share: float) -> None:
    """A trial's weights are not the step's; a block that runs again finds those that its forward found, no others."""
    torch.manual_seed(0)
    build = partial(seeded, rounds)
    batches = [torch.randn(48 + 16 * (step * 5 % 7), 12, WIDTH) for step in range(14)]
    plain = train(build, batches, None, loss_of)
    budget = plain.budget(share)
    done = train(build, batches, budget, loss_of)
    assert equal(done, plain)
    assert done.mimose is not None
    planned = [
        (record, peak) for record, peak in zip(done.mimose.records, done.peaks, strict=True) if not record.sheltered
    ]
    assert len(planned) >= 8
    assert any(record.actions for record, _ in planned)
    for record, peak in planned:
        assert peak <= budget
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    assert not parametrize._cache_enabled
    assert not parametrize._cache


def seeded(rounds: int) -> Rounds:
    """The same weights each time."""
    torch.manual_seed(1)
    return Rounds(rounds)


@pytest.mark.parametrize("unit", ["blocks.1", "blocks.1.wide", "blocks.3.wide"])
def test_cached_weights_live_as_long_as_the_table(unit: str) -> None:
    """Whether the unit that makes one is recomputed or kept: the weights are most of what a small batch takes."""
    width = 256

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Rounds(1, width)

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        return {unit: "recompute"} if (unit, "recompute") in timeline.option_index else {}

    batches = [torch.randn(2, 10 + 2 * (step * 5 % 7), width) for step in range(9)]
    done = train(build, batches, "2GB", loss_of, planner=planner)
    assert done.mimose is not None
    planned = [*zip(done.mimose.records, done.peaks, strict=True)][4:]
    assert any(record.actions == {unit: "recompute"} for record, _ in planned)
    for record, peak in planned:
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.002)


@pytest.mark.parametrize("actions", [["split"], ["lean", "recompute", "split"]])
def test_a_split_that_is_tried_leaves_no_weights_either(actions: list[str]) -> None:
    """Its trial runs without gradients: weights from there would get none. The budget holds everything."""
    torch.manual_seed(0)
    batches = [torch.randn(48 + 16 * (step * 5 % 7), 12, WIDTH) for step in range(8)]
    plain = train(partial(seeded, 1), batches, None, loss_of)
    done = train(partial(seeded, 1), batches, plain.budget(2.0), loss_of, actions=actions)
    assert equal(done, plain)
