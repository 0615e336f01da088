"""One training of the benchmark `shared`: a stack of residual blocks with dropout, the same for the same seed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_mimose import Mimose


class Block(nn.Module):
    """A residual block with attention over the rows of a batch item, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        y = self.norm(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


@dataclass(frozen=True)
class Trainee:
    """What to train.

    Attributes:
        seed: Of weights, batches and dropout.
        steps: How many.
        rows: Batch size of the largest batches; those between are smaller.
        width: Of the model.
        depth: Of the model.
        tokens: Length of a row.
        vary: Whether batches differ in size.
    """

    seed: int
    steps: int
    rows: int = 8
    width: int = 128
    depth: int = 6
    tokens: int = 64
    vary: bool = True

    def model(self) -> nn.Module:
        """Its model, at its first weights."""
        torch.manual_seed(self.seed)
        return nn.Sequential(*(Block(self.width) for _ in range(self.depth)))

    def batches(self, step: int) -> torch.Tensor:
        """The batch of a step, from the training's own generator."""
        rows = max(1, self.rows - (step % 4) * self.rows // 8) if self.vary else self.rows
        return torch.randn(rows, self.tokens, self.width)


@dataclass
class Trained:
    """What came out.

    Attributes:
        digest: Of losses and weights.
        seconds: From the first planned step to the end.
        records: One per step.
    """

    digest: str
    seconds: float
    records: list[Any]


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar."""
    value: torch.Tensor = (model(batch) - batch.roll(1, 0)).pow(2).mean()
    return value


def train(what: Trainee, budget: Any, *, meanwhile: Callable[[int], None] = lambda step: None) -> Trained:
    """Train; the same numbers come out whatever else is going on."""
    model = what.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digest = hashlib.sha256()
    began = time.perf_counter()
    with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss) as mimose:
        for step in range(what.steps):
            digest.update(mimose.step(what.batches(step)).numpy().tobytes())
            meanwhile(step)
        records = mimose.records
    seconds = time.perf_counter() - began
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return Trained(digest.hexdigest(), seconds, records)
