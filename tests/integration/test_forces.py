"""Backward inside forward: units that return gradients of their own results, as force fields and energy models do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose

WIDTH = 16
ROWS = (8, 16, 8, 24, 12, 16)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.inside(x)
        return out


class Stage(nn.Module):
    """Blocks, an energy of what they return, and the force that it is the potential of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Follows the force."""
        x = x if x.requires_grad else x.requires_grad_()
        out = x
        for block in self.blocks:
            out = block(out)
        (force,) = torch.autograd.grad(self.energy(out).sum(), x, create_graph=True)
        return out - force


class Field(nn.Module):
    """Stages one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        for stage in self.stages:
            x = stage(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("units", [None, ["stages.*.blocks.*"], ["stages.?", "stages.?.blocks.?"]])
@pytest.mark.filterwarnings("ignore:A step ran backward twice")
def test_gradients_inside_a_forward(units: list[str] | None) -> None:
    """Bit-equal, whichever of the nested units are planned."""
    weights = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Field()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(rows, WIDTH) for rows in ROWS]
        if planned:
            with Mimose(model, budget="1GB", optimizer=optimizer, units=units) as mimose:
                for batch in batches:
                    mimose.step(batch)
            assert all(record.measured_peak_bytes for record in mimose.records if record.sheltered)
        else:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
