"""Tiny models, each with a trait that breaks naive recomputation, and batches of any size for them.

Every model takes its batch as keyword arguments and returns its loss, or an object with a `.loss`, as those of
`transformers` do; `Task` puts one under Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    """A transformer-like layer: attention, dropout, two residual connections."""

    def __init__(self, hidden: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout, self.heads = nn.Dropout(dropout), heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`x` is batch x tokens x hidden, `mask` (batch x tokens) is added to the scores."""
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask[:, None, None, :]
        mixed = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyText(nn.Module):
    """A classifier of `Block`s: dropout, and attention that is quadratic in the number of tokens."""

    def __init__(self, layers: int = 3, hidden: int = 32, dropout: float = 0.1, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


class TinyKeywords(TinyText):
    """The same, but its blocks get every tensor by keyword, and a mask that requires no gradient."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x, mask = self.embed(input_ids), (input_ids == 0) * -1e4
        for layer in self.layers:
            x = layer(x=x, mask=mask)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


class DictBlock(nn.Module):
    """A layer that takes and returns a dictionary, with what is no tensor inside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = Block(hidden)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with `x` moved on."""
        return {**state, "x": self.body(state["x"]), "depth": state["depth"] + 1}


class TinyDict(TinyText):
    """Layers that hand a dictionary on."""

    def __init__(self, layers: int = 3, hidden: int = 32) -> None:
        super().__init__(layers, hidden)
        self.layers = nn.ModuleList(DictBlock(hidden) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        state: dict[str, Any] = {"x": self.embed(input_ids), "depth": 0, "note": None}
        for layer in self.layers:
            state = layer(state)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(state["x"].mean(1)), labels))


class ConvBlock(nn.Module):
    """A residual block with BatchNorm: its forward writes buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is batch x channels x height x width."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(x + self.bn2(self.conv2(y)))


class TinyVision(nn.Module):
    """A convolutional net with BatchNorm in `nn.Sequential` stages, for images of any size."""

    def __init__(self, blocks: int = 3, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stages = nn.Sequential(*(ConvBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.stages(self.stem(pixel_values)).mean((2, 3))
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x), labels))


class TinyNested(TinyText):
    """Stages of blocks, so that a stage and its blocks are both candidates; one block is used twice."""

    def __init__(self, stages: int = 2, hidden: int = 32) -> None:
        super().__init__(0, hidden)
        self.stages = nn.ModuleList(nn.Sequential(Block(hidden), Block(hidden)) for _ in range(stages))
        self.shared = Block(hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.embed(input_ids)
        for stage in self.stages:
            x = self.shared(stage(x))
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


def text_batch(batch: int = 4, tokens: int = 16, seed: int = 0, vocabulary: int = 64) -> Batch:
    """Random tokens (0 is padding) and labels."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator)
    return {"input_ids": input_ids, "labels": torch.randint(0, 2, (batch,), generator=generator)}


def image_batch(batch: int = 4, height: int = 12, width: int = 12, seed: int = 0) -> Batch:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch, 3, height, width, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (batch,), generator=generator)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "text": (TinyText, text_batch),
    "keywords": (TinyKeywords, text_batch),
    "dict": (TinyDict, text_batch),
    "nested": (TinyNested, text_batch),
    "vision": (TinyVision, image_batch),
}
"""Name -> how to build the model, how to make a batch for it."""


class Task(pl.LightningModule):
    """Any model above under Lightning.

    Args:
        model: The model.
        optimizer: The optimizer's class.
        lr: The learning rate.
    """

    def __init__(
        self, model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.model, self._optimizer, self._lr = model, optimizer, lr

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer asked for."""
        return self._optimizer(self.parameters(), lr=self._lr)  # type: ignore[call-arg]


class ValidatedTask(Task):
    """The same with a validation loop: Lightning warns of a `validation_step` without a loader for it."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Runs the forward; nothing is logged."""
        self.model(**batch)


def quiet_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A `Trainer` on the CPU that writes nothing to disk or screen."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def loader(batches: Sequence[Batch]) -> DataLoader[Batch]:
    """Ready-made batches as a loader: Lightning takes a plain list for several loaders."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(model: nn.Module, batches: Sequence[Batch], *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Trains a model on ready-made batches and returns the trainer."""
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(Task(model), loader(batches))
    return trainer


class Points(nn.Module):
    """Convolutions whose filters are one point wide, which make something wide of something narrow."""

    convolution: type[nn.Conv2d] | type[nn.ConvTranspose2d] = nn.Conv2d

    def __init__(self) -> None:
        super().__init__()
        narrow, wide = partial(self.convolution, 32, 16, 1), partial(self.convolution, 16, 32, 1)
        self.layers = nn.ModuleList(nn.Sequential(wide(), nn.ReLU(), narrow()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()
