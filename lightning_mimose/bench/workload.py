"""Workloads: a model and batches of it whose size varies.

A `Workload` knows how to build its model, how to make a batch of a given size, and how sizes are drawn.

Example:
    >>> dims = {"width": range(2, 6)}
    >>> tiny = Workload("tiny", lambda: nn.Linear(5, 1), lambda *sizes, **dims: {}, dims, batch_size=6)
    >>> tiny.sizes(3, seed=1, order="longest first")
    [{'batch_size': 6, 'width': 5}, {'batch_size': 6, 'width': 2}, {'batch_size': 4, 'width': 4}]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Order = Literal["random", "longest first", "longest last"]

VOCABULARY = 4096
CLASSES = 4


@dataclass(frozen=True)
class Workload:
    """A model and the batches it is trained on.

    Attributes:
        name: What tables call it.
        build: Makes the model; call `make`, which seeds.
        tensors: (generator, batch size, **dimensions) -> batch, as the model's keyword arguments; call `batch`.
        dims: Name of each varying dimension -> the sizes it may have.
        batch_size: Samples per batch; a shorter last batch has about half.
        extra: Further keyword arguments of the model's forward.
    """

    name: str
    build: Callable[[], nn.Module]
    tensors: Callable[..., Batch]
    dims: Mapping[str, range]
    batch_size: int = 8
    extra: Mapping[str, Any] | None = None

    def make(self, seed: int = 0) -> nn.Module:
        """The model with random weights, in training mode."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build().train()

    def batch(self, generator: torch.Generator, batch_size: int | None = None, **dims: int) -> Batch:
        """A batch; a dimension that is not given has its largest size."""
        sizes = {name: dims.get(name, allowed[-1]) for name, allowed in self.dims.items()}
        return self.tensors(generator, batch_size or self.batch_size, **sizes)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of one batch."""
        loss: torch.Tensor = model(**batch, **(self.extra or {})).loss
        return loss

    def sizes(self, steps: int, seed: int = 0, order: Order = "random") -> list[dict[str, int]]:
        """Random sizes for an epoch, `batch_size` among them; the last batch is shorter.

        Args:
            steps: How many batches.
            seed: Of the random choice.
            order: Where the largest batch stands: the largest of every dimension is put first or last but one.
        """
        choose = random.Random(seed)
        drawn = [
            {"batch_size": self.batch_size, **{name: choose.choice(allowed) for name, allowed in self.dims.items()}}
            for _ in range(steps)
        ]
        largest = {"batch_size": self.batch_size, **{name: allowed[-1] for name, allowed in self.dims.items()}}
        if order == "longest first":
            drawn[0] = largest
        elif order == "longest last":
            drawn[-2 if steps > 1 else -1] = largest
        if steps > 1:
            drawn[-1]["batch_size"] = self.batch_size // 2 + 1
        return drawn

    def batches(self, steps: int, seed: int = 0, order: Order = "random") -> list[Batch]:
        """The batches of an epoch, see `sizes`."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator, **size) for size in self.sizes(steps, seed, order)]


def _tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def text(generator: torch.Generator, batch_size: int, tokens: int) -> Batch:
    """For a classifier; texts are padded to the longest, as a collate function would."""
    input_ids = _tokens(generator, batch_size, tokens)
    lengths = torch.randint(1, tokens + 1, (batch_size,), generator=generator)
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
    return {"input_ids": input_ids * mask, "attention_mask": mask, "labels": labels}


def causal(generator: torch.Generator, batch_size: int, tokens: int) -> Batch:
    """For a language model."""
    input_ids = _tokens(generator, batch_size, tokens)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def translation(generator: torch.Generator, batch_size: int, source: int, target: int) -> Batch:
    """For an encoder and a decoder, each with a length of its own."""
    return {"input_ids": _tokens(generator, batch_size, source), "labels": _tokens(generator, batch_size, target)}


def images(generator: torch.Generator, batch_size: int, height: int, width: int) -> Batch:
    """Images of one height and width per batch, and their classes."""
    pixels = torch.randn(batch_size, 3, height, width, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (batch_size,), generator=generator)}
