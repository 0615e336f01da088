"""One rank of a launch in which ranks fail and their scripts go on. Started by `launch.launch`."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_mimose import MimoseCallback
from tests.distributed.launch import be_ranks
from tests.helpers.models import Batch, Task, TinyText, loader, quiet_trainer, text_batch

PATIENCE = 40
"""Seconds that a rank which failed looks whether the others have noticed; the process group waits far longer."""


class Failing(Task):
    """Fails on rank 1."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ZeroDivisionError("a rank's own fault")
        return super().training_step(batch, batch_idx)


def attempt(rank: int, ranks: int, budget: str | int, task: type[Task] = Task, long: bool = False) -> str:
    """How a fit ends."""
    pl.seed_everything(0, verbose=False)
    batches = [text_batch(4, tokens, tokens) for tokens in (24, 16, 32, 20, 28, 40)]
    if long and rank == 0:
        batches[2] = text_batch(4, 256, 0)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(minutes=5))
    trainer = quiet_trainer(MimoseCallback(budget), strategy=strategy, devices=ranks, use_distributed_sampler=False)
    try:
        trainer.fit(task(TinyText()), loader(batches))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main(rank: int, ranks: int, directory: Path, what: str) -> dict[str, Any]:
    """What this rank saw; the one that failed stays until the others have noticed, or it loses patience."""
    found: dict[str, Any] = {}
    if what == "training_step":
        found["alone"] = attempt(rank, ranks, "1GB", Failing)
    else:
        found["all"] = attempt(rank, ranks, 100_000)
        found["then"] = attempt(rank, ranks, "1GB")
        found["alone"] = attempt(rank, ranks, 2_500_000, long=True)
    if rank == (1 if what == "training_step" else 0):
        until = time.monotonic() + PATIENCE
        noticed = directory / "noticed"
        while not noticed.exists() and time.monotonic() < until:
            time.sleep(0.1)
        found["noticed"] = noticed.exists()
    else:
        (directory / "noticed").touch()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    be_ranks(main)
