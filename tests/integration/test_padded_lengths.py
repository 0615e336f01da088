"""Translations whose encoder pads its texts to whole windows inside: two lengths, one of which is rounded up."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.models import Batch, Task
from tests.helpers.pairs import pair

WIDTH, WINDOW, STEPS = 32, 32, 40


def attended(mixed: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Scores that are made one by one, as composite attention has them."""
    out: torch.Tensor = (mixed @ memory.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ memory
    return out


class Block(nn.Module):
    """A layer that reads: the windows of a text one by one, in the encoder; itself and a memory, in the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Adds to its input."""
        mixed = self.mixed(self.norm(x))
        if memory is None:
            windows = mixed.unflatten(1, (-1, WINDOW))
            x = x + attended(windows, windows).flatten(1, 2)
        else:
            x = x + attended(mixed, mixed) + attended(mixed, memory)
        out: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return out


class Translating(Task):
    """Three blocks of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = nn.ModuleDict(
            {
                "encoder": nn.ModuleList(Block() for _ in range(3)),
                "decoder": nn.ModuleList(Block() for _ in range(3)),
            }
        )
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        memory, x = self.embed(batch["input_ids"]), self.embed(batch["labels"])
        length = memory.shape[1]
        memory = functional.pad(memory, (0, 0, 0, -length % WINDOW))
        for block in self.model["encoder"]:  # type: ignore[index]
            memory = block(memory)
        memory = memory[:, :length]
        for block in self.model["decoder"]:  # type: ignore[index]
            x = block(x, memory)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For all of it."""
        return torch.optim.SGD(self.parameters(), 1e-2)


def test_padding_inside_an_encoder_is_predicted() -> None:
    """After a few sizes, though no dimension of the batch is the padded length."""
    chance, data = random.Random(0), []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        lengths = {"input_ids": chance.randint(20, 200), "labels": chance.randint(8, 80)}
        data.append({name: torch.randint(64, (2, length), generator=generator) for name, length in lengths.items()})
    both = pair(0.6, data=data, task=Translating)
    records = both.callback.records
    assert sum(record.sheltered for record in records) <= STEPS // 2
    for record, peak in zip(records, both.budgeted.peaks, strict=True):
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
