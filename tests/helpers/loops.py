"""The same training loop without and with a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.report.record import StepRecord

Loss = Callable[[nn.Module, Any], torch.Tensor]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_fn: Loss) -> torch.Tensor:
    """What `Mimose.step` does without a budget."""
    loss = loss_fn(model, batch)
    model.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    model: nn.Module, batches: Sequence[Any], loss_fn: Loss, *, planned: bool, lr: float = 0.1, **options: Any
) -> Sequence[StepRecord]:
    """Train a model with SGD, under a budget that needs no saving, or plainly.

    Returns:
        The records of the steps; none in a plain loop.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if not planned:
        for batch in batches:
            plain_step(model, optimizer, batch, loss_fn)
        return []
    with Mimose(model, **{"budget": "1GB"} | options, optimizer=optimizer, loss_fn=loss_fn) as mimose:
        for batch in batches:
            mimose.step(batch)
        return mimose.records
