"""Running out of memory on purpose, at a chosen place of a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn

from tests.helpers.blocks import BatchNormed, Net

STAGES = ("forward", "loss", "backward", "last gradient")


class Faults:
    """Raises `torch.OutOfMemoryError` where it is armed, `times` times."""

    def __init__(self) -> None:
        self.stage, self.times, self.raised = "", 0, 0

    def arm(self, stage: str, times: int = 1) -> None:
        """From now on."""
        self.stage, self.times = stage, times

    def pass_by(self, stage: str) -> None:
        """Fail here, if this is the place."""
        if stage == self.stage and self.times > 0:
            self.times -= 1
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB (injected)")


class InBackward(torch.autograd.Function):
    """The identity, whose backward calls something: `InBackward.apply(x, call)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], Any]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call()
        return grad, None


class Faulty(Net):
    """Blocks with BatchNorm and dropout that can run out of memory at every stage of a step."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(BatchNormed, 3)
        self.faults, self.drop = faults, nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x = InBackward.apply(self.embed(x), partial(self.faults.pass_by, "last gradient"))
        for i, block in enumerate(self.blocks):
            x = self.drop(block(x))
            if i == 1:
                self.faults.pass_by("forward")
                x = InBackward.apply(x, partial(self.faults.pass_by, "backward"))
        loss = self.head(x).pow(2).mean()
        self.faults.pass_by("loss")
        return SimpleNamespace(loss=loss)


class LoggingTask(pl.LightningModule):
    """Logs a mean, keeps a metric and a list, as people do."""

    def __init__(self, faults: Faults, when: tuple[int, ...] = (), stage: str = "", times: int = 1) -> None:
        super().__init__()
        self.model, self.faults = Faulty(faults), faults
        self.metric = torchmetrics.MeanMetric()
        self.outputs: list[float] = []
        self._when, self._stage, self._times = when, stage, times

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._when:
            self.faults.arm(self._stage, self._times)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("size", float(len(batch)), on_step=False, on_epoch=True, batch_size=1)
        if batch_idx > 3:
            self.log("late", float(batch_idx), on_step=True, on_epoch=True, batch_size=len(batch))
        loss = self.model(batch).loss
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.outputs.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
