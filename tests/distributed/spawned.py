"""The main process of fits whose ranks are forked or spawned. Started by itself."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_mimose import MimoseCallback
from tests.helpers.models import Task, TinyText, loader, quiet_trainer, text_batch


def fit(method: str, *callbacks: pl.Callback) -> dict[str, Any]:
    """Weights and metrics that came back."""
    pl.seed_everything(0, verbose=False)
    task = Task(TinyText())
    strategy = DDPStrategy(process_group_backend="gloo", start_method=method)  # type: ignore[arg-type]
    batches = [text_batch(4, tokens, tokens) for tokens in (24, 24, 16, 16, 32, 32, 20, 20, 28, 28, 44, 44)]
    trainer = quiet_trainer(*callbacks, strategy=strategy, devices=2, log_every_n_steps=1)
    trainer.fit(task, loader(batches))
    return {
        "weights": [p.detach().double().sum().item() for p in task.parameters()],
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {"plain": fit("fork")}
    for method in ("fork", "spawn"):
        callback = MimoseCallback(budget=1_600_000)
        found[method] = fit(method, callback)
    Path(sys.argv[1]).write_text(json.dumps(found))
