"""Fits of tiny models with and without a budget, and what must be the same before and after one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseCallback
from tests.helpers.meter import MeterCallback
from tests.helpers.models import MODELS, Batch, Task, image_batch, loader, quiet_trainer, text_batch


def batches(kind: str = "text", count: int = 12, seed: int = 0, last: int = 4) -> list[Batch]:
    """Batches of random sizes; `last` is the number of samples in the last one."""
    sizes = random.Random(seed)
    made = []
    for i in range(count):
        tokens, samples = sizes.choice(range(16, 96, 4)), last if i == count - 1 else 4
        made.append(
            image_batch(samples, tokens // 2, tokens // 2, i) if kind == "vision" else text_batch(samples, tokens, i)
        )
    return made


@dataclass
class Fit:
    """What is left of a fit."""

    task: Task
    trainer: pl.Trainer
    peaks: list[int]
    residents: list[int]

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of parameters and buffers."""
        return {name: tensor.clone() for name, tensor in self.task.state_dict().items()}

    def budget(self, share: float) -> int:
        """The budget at which this share of the activation memory may be used."""
        resident = max(self.residents)
        return int(resident + share * (max(self.peaks) - resident))


def run(
    *callbacks: pl.Callback,
    kind: str = "text",
    data: Sequence[Batch] | None = None,
    task: type[Task] = Task,
    metered: bool = True,
    val: Sequence[Batch] | None = None,
    **options: Any,
) -> Fit:
    """Trains a freshly seeded model, measured by the independent meter, which is the first of the callbacks."""
    pl.seed_everything(0, verbose=False)
    model = task(MODELS[kind][0]())
    meter = MeterCallback()
    pl.seed_everything(7, verbose=False)
    trainer = quiet_trainer(*([meter] if metered else []), *callbacks, **options)
    loaders = [loader(batches(kind) if data is None else data), *([loader(val)] if val is not None else [])]
    trainer.fit(model, *loaders)
    return Fit(model, trainer, meter.peaks, meter.residents)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def condition(model: nn.Module) -> list[Any]:
    """What a plugin must leave as it found it: attributes, classes, hooks, cache switches, keys."""
    found: list[Any] = [tuple(model.state_dict())]
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        config = getattr(module, "config", None)
        # Lightning keeps notes on its own modules.
        attributes = "forward" in vars(module) if isinstance(module, pl.LightningModule) else sorted(vars(module))
        found.append((name, type(module), attributes, hooks, getattr(config, "use_cache", None)))
    return found


def mimose(budget: Any, **options: Any) -> MimoseCallback:
    """A callback, as short as a test needs it."""
    return MimoseCallback(budget=budget, **options)


def check_kept(mimose: Mimose, batch: Batch) -> None:
    """What a step takes that keeps everything is the same whether or not there is anything else to choose from."""
    advisor = mimose._advisor
    _, prediction = advisor.timeline(batch)
    kept = advisor.kept_timeline(prediction, advisor.resident)
    whole = advisor.timeline_of(prediction, advisor.resident)
    assert kept is not None
    assert whole.options
    assert (kept.peak_bytes({}), kept.units) == (whole.peak_bytes({}), whole.units)
