"""One rank of a launch: fits of several kinds, each without and with a budget. Started by `launch.launch`."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional

from lightning_mimose import MimoseDDPStrategy
from lightning_mimose.predict.timeline import Timeline
from tests.distributed.launch import be_ranks
from tests.helpers.meter import MeterCallback
from tests.helpers.models import (
    Batch,
    Block,
    Task,
    TinyText,
    TinyVision,
    image_batch,
    loader,
    quiet_trainer,
    text_batch,
)

SIDES = (8, 12, 6, 10, 14, 7, 13, 9, 11, 14)


class TwoHeads(TinyText):
    """A branch of the first layers that every other batch leaves out, on each rank in its own turn."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Block(32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        if input_ids.shape[1] % 8:
            x = self.extra(x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


class Summed(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return Summed.forward(ctx, gradients[0])


class Talking(nn.Module):
    """A block that subtracts the mean over all ranks, with a gradient, as SyncBatchNorm does on accelerators."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = Block(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Early in the forward: a recomputation stops after the last tensor that is saved.
        return self.body(x - Summed.apply(x.mean((0, 1))) / torch.distributed.get_world_size())


class TalkingText(TinyText):
    """One block of four talks to the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, Talking(32))


def text(rank: int) -> list[Batch]:
    """Twice as long on odd ranks."""
    return [text_batch(4, side * (4 + 4 * (rank % 2)), 10 * i + rank) for i, side in enumerate(SIDES)]


class Words(Task):
    """Makes its tensors in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step({name: torch.tensor(numbers) for name, numbers in batch.items()}, batch_idx)


def words(rank: int) -> list[Any]:
    """The same as `text`, but no tensors."""
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in text(rank)]


def images(rank: int) -> list[Batch]:
    """Larger on odd ranks."""
    return [image_batch(4, side + 8 * (rank % 2) + 8, side + 8, 10 * i + rank) for i, side in enumerate(SIDES)]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Any]], dict[str, Any], dict[str, Any]]] = {
    "default": (TinyText, text, {}, {}),
    "find_unused": (TwoHeads, text, {"find_unused_parameters": True}, {}),
    "static": (TinyText, text, {"static_graph": True}, {}),
    "norms": (TinyVision, images, {"broadcast_buffers": True}, {"accumulate_grad_batches": 3}),
    "words": (TinyText, words, {}, {}),
    "talking": (TalkingText, text, {}, {}),
}


def forced(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
    """Other plans on other ranks: on even ones all blocks that may be recomputed, on odd ones none."""
    even = int(os.environ["LOCAL_RANK"]) % 2 == 0
    return {unit: action for unit, action in timeline.option_index if even and unit.count(".") == 2}


class Fit:
    """Fits on this rank of a number of ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def run(self, kind: str, budget: int | None = None) -> dict[str, Any]:
        """What is left of one fit."""
        make, data, ddp, options = KINDS[kind]
        meter, own = MeterCallback(), dict(process_group_backend="gloo", **ddp)
        pl.seed_everything(0, verbose=False)
        task = (Words if kind == "words" else Task)(make())
        pl.seed_everything(7 + self.rank, verbose=False)
        planner = forced if kind == "talking" else "auto"
        strategy = DDPStrategy(**own) if budget is None else MimoseDDPStrategy(budget=budget, planner=planner, **own)
        trainer = quiet_trainer(meter, strategy=strategy, devices=self.ranks, use_distributed_sampler=False, **options)
        trainer.fit(task, loader(data(self.rank)))
        digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in task.state_dict().values()))
        callback = getattr(strategy, "mimose_callback", None)
        return {
            "peaks": meter.peaks,
            "residents": meter.residents,
            "buckets": sum(p.nbytes for p in task.parameters()),
            "weights": digest.hexdigest(),
            "records": [record.to_dict() for record in callback.records] if callback is not None else [],
        }

    def both(self, kind: str) -> dict[str, Any]:
        """Without, and with a share of the activation memory that differs from rank to rank."""
        plain = self.run(kind)
        resident, share = max(plain["residents"]), (0.7, 0.85)[self.rank % 2]
        if kind == "talking":
            share = 10  # its plans are forced
        # Gradient buckets, which the meter cannot see, come on top.
        budget = int(resident + share * (max(plain["peaks"]) - resident)) + plain["buckets"]
        return {"plain": plain, "mimose": self.run(kind, budget), "budget": budget}


def main(rank: int, ranks: int, directory: Path, what: str) -> dict[str, Any]:
    """Fits of several kinds, each without and with a budget."""
    fit = Fit(rank, ranks)
    return {kind: fit.both(kind) for kind in what.split(",")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    be_ranks(main)
