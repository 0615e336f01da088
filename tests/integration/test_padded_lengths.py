"""What is rounded inside of a model: texts that an encoder pads to whole windows, sequences that strides shorten."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.architectures import train
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


class Listening(nn.Module):
    """Convolutions with strides, and attention over what they leave."""

    def __init__(self, kernel: int, stride: int, padding: int, count: int) -> None:
        super().__init__()
        channels = (16, *(WIDTH,) * count)
        self.strides = nn.ModuleList(nn.Conv1d(*between, kernel, stride, padding) for between in pairwise(channels))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(3))

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        for convolution in self.strides:
            sound = convolution(sound).relu()
        x = sound.transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.logsumexp(-1).mean()


@pytest.mark.parametrize("convolutions", [(3, 2, 1, 1), (4, 4, 0, 1), (3, 2, 0, 2)])
def test_sequences_that_strides_shorten(convolutions: tuple[int, int, int, int]) -> None:
    """By a share that is rounded, with padding and without: attention goes with the square of that."""
    draw = random.Random(0)
    batches = [{"sound": torch.randn(4, 16, draw.randrange(100, 400))} for _ in range(32)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Listening(*convolutions)

    done = train(build, batches, "2GB", lambda model, batch: model(batch["sound"]))
    planned = [
        (record.predicted_peak_bytes or 0) / peak - 1
        for record, peak in zip(done.mimose.records, done.peaks, strict=True)
        if not record.sheltered
    ]
    assert len(planned) >= 22
    assert max(map(abs, planned)) < 0.01
    assert max(map(abs, planned[-20:])) < 0.001, "exactly, once there are enough of them"
