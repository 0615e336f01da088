"""Images of any size: convolutions halve their sides, rounding up, and attention goes over what is left."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.helpers.models import Batch, Task
from tests.helpers.pairs import pair

STEPS = 26


class Attending(nn.Module):
    """A block of an encoder, which makes its scores itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        queries, keys, values = self.mixed(self.norm(x)).chunk(3, -1)
        x = x + (queries @ keys.transpose(1, 2)).softmax(-1) @ values
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Detecting(Task):
    """Three stages and an encoder, as DETR has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        widths = (3, 8, 16, 24)
        self.model = nn.ModuleDict(
            {
                "stages": nn.ModuleList(
                    nn.Sequential(nn.Conv2d(one, other, 3, 2, 1), nn.BatchNorm2d(other), nn.ReLU())
                    for one, other in pairwise(widths)
                ),
                "encoder": nn.ModuleList(Attending(24) for _ in range(3)),
            }
        )
        self.head = nn.Linear(24, 4)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        x = batch["image"]
        for stage in self.model["stages"]:  # type: ignore[index]
            x = stage(x)
        x = x.flatten(2).transpose(1, 2)
        for block in self.model["encoder"]:  # type: ignore[index]
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For all of it."""
        return torch.optim.SGD(self.parameters(), 1e-2)


def test_scores_over_a_map_of_halved_sides_are_predicted() -> None:
    """From the first few sizes on, whatever the remainders are."""
    chance, data = random.Random(0), []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        sides = chance.randrange(60, 180), chance.randrange(60, 180)
        data.append({"image": torch.randn(2, 3, *sides, generator=generator), "labels": torch.tensor([number % 4, 1])})
    both = pair(0.6, data=data, task=Detecting)
    records = both.callback.records
    assert sum(record.sheltered for record in records) <= STEPS // 2
    for record, peak in zip(records, both.budgeted.peaks, strict=True):
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
