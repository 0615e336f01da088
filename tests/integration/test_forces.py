"""Backward inside forward: units that return gradients of their own results, as force fields and energy models do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from tests.helpers.meter import PeakMeter

WIDTH = 16
ROWS = (80, 160, 80, 240, 120, 160)


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

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.energy = nn.Linear(WIDTH, 1)
        self.learns = learns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Follows the force."""
        at = x if self.learns and x.requires_grad else x.detach().requires_grad_()
        out = at
        for block in self.blocks:
            out = block(out)
        (force,) = torch.autograd.grad(self.energy(out).sum(), at, create_graph=self.learns)
        if self.learns:
            return out - force
        for block in self.blocks:
            x = block(x - force)
        return x


class Field(nn.Module):
    """Stages one after the other.

    Args:
        learns: Whether the force is learnt through; otherwise it is followed.
    """

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(learns) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        for stage in self.stages:
            x = stage(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("units", [None, ["stages.*.blocks.*"], ["stages.?", "stages.?.blocks.?"]])
@pytest.mark.filterwarnings("ignore:A step ran backward twice")
def test_gradients_inside_a_forward(units: list[str] | None, learns: bool) -> None:
    """Bit-equal, whichever of the nested units are planned; nothing wrong is learnt, so the budget is kept."""
    weights, highest = [], 0
    for planned in (False, True):
        torch.manual_seed(0)
        model = Field(learns)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(rows, WIDTH) for rows in ROWS * 3]
        mimose = Mimose(model, budget=highest, optimizer=optimizer, units=units) if planned else None
        for batch in batches:
            with PeakMeter(model, optimizer, batch) as meter:
                if mimose is not None:
                    mimose.step(batch)
                else:
                    loss = model(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            if not planned:
                highest = max(highest, meter.peak_bytes)
            else:
                assert meter.peak_bytes <= highest
        if mimose is not None:
            assert all(record.measured_peak_bytes for record in mimose.records if record.sheltered)
            mimose.close()
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
