"""One rank of a launch that trains models sharded by FSDP2. Started by `launch.launch`."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from lightning_mimose import Mimose, MimoseCallback, UnsupportedError
from lightning_mimose.sharding import is_sharded, local
from tests.distributed.failures import PATIENCE
from tests.distributed.launch import be_ranks
from tests.helpers.meter import MeterCallback, PeakMeter
from tests.helpers.models import Batch, Task, TinyText, loader, quiet_trainer, text_batch

SIDES = (8, 12, 6, 10, 14, 9, 11, 14)


def until_gloo_lets_go(collective: Callable[[], distributed.Work], *tensors: torch.Tensor) -> None:
    """Until it is over and gloo's threads hold none of its tensors any more, however busy the processor is."""
    holders = [tensor._use_count() for tensor in tensors]
    collective().wait()
    until = time.monotonic() + PATIENCE
    while [tensor._use_count() for tensor in tensors] != holders:
        assert time.monotonic() < until, "gloo does not let go"
        time.sleep(0.001)


def all_gather(
    own: Callable[..., distributed.Work], output: torch.Tensor, each: torch.Tensor, group: Any = None, **_: Any
) -> None:
    """The same, but that gloo has let go when it returns."""
    until_gloo_lets_go(partial(own, output, each, group=group, async_op=True), output, each)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Any, group: Any = None, **_: Any) -> None:
    """What gloo does, reducing a copy of everything, but that the copy goes here and not in a thread of gloo's."""
    every = input.clone()
    until_gloo_lets_go(partial(distributed.all_reduce, every, op=op, group=group, async_op=True), every)
    output.copy_(every.view(-1, *output.shape)[distributed.get_rank(group)])


def let_gloo_go_first() -> None:
    """A profiler sees no memory go in gloo's threads: whatever was theirs last stayed in the peaks it told."""
    # The names of torch 2.13, and those that it had before.
    gathers, scatters = (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
    own = next(getattr(distributed, name) for name in gathers if hasattr(distributed, name))
    for names, collective in ((gathers, partial(all_gather, own)), (scatters, reduce_scatter)):
        for name in names:
            if hasattr(distributed, name):
                setattr(distributed, name, collective)


class Sharded(Task):
    """Blocks and the rest of the model are sharded where Lightning has it."""

    def configure_model(self) -> None:
        """Called once per run."""
        if not is_sharded(self.model):
            for block in self.model.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def run_out(*_: Any) -> None:
    """A hook."""
    raise torch.OutOfMemoryError("out of memory")


class RunsOut(Sharded):
    """Rank 1 alone is out of memory, after its first block was gathered."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        if batch_idx == 2 and self.trainer.global_rank == 1:
            self.model.layers[0].register_forward_hook(run_out)
        return super().training_step(batch, batch_idx)


class Ranks:
    """This rank of some."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def trainer(self, *callbacks: pl.Callback) -> pl.Trainer:
        """With the model sharded over all ranks."""
        strategy = ModelParallelStrategy(self.ranks, 1, process_group_backend="gloo")
        return quiet_trainer(*callbacks, strategy=strategy, devices=self.ranks, use_distributed_sampler=False)

    def sizes(self) -> list[Batch]:
        """Longer on odd ranks."""
        return [text_batch(4, side * (4 + 3 * (self.rank % 2)), 10 * i + self.rank) for i, side in enumerate(SIDES)]

    def fit(self, budget: int | None) -> dict[str, Any]:
        """What is left of one fit."""
        meter = MeterCallback()
        pl.seed_everything(0, verbose=False)
        task = Sharded(TinyText())
        pl.seed_everything(7 + self.rank, verbose=False)
        callback = MimoseCallback(budget) if budget is not None else None
        self.trainer(meter, *filter(None, [callback])).fit(task, loader(self.sizes()))
        records = [record.to_dict() for record in callback.records] if callback is not None else []
        return {"peaks": meter.peaks, "residents": meter.residents, "weights": digest(task), "records": records}

    def both(self) -> dict[str, Any]:
        """Without, and with a share of the activation memory that differs from rank to rank."""
        plain = self.fit(None)
        budget = self.budget(plain, (0.6, 0.75)[self.rank % 2])
        return {"plain": plain, "mimose": self.fit(budget), "budget": budget}

    def budget(self, plain: dict[str, Any], share: float) -> int:
        """A share of the activation memory."""
        resident = max(plain["residents"])
        return int(resident + share * (max(plain["peaks"]) - resident))

    def loop(self, budget: int | None) -> dict[str, Any]:
        """A plain loop over a model with sharded modules inside sharded blocks; every second step follows a test."""
        torch.manual_seed(0)
        model, mesh = TinyText(), init_device_mesh("cpu", (self.ranks,))
        for block in model.layers:
            for part in (*block.mlp[::2], block) if block is model.layers[0] else (block,):
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(7 + self.rank)
        mimose = Mimose(model, budget=budget, optimizer=optimizer) if budget is not None else None
        peaks, residents = [], []
        for number, batch in enumerate(self.sizes()):
            if number % 2:
                with torch.no_grad():
                    model.eval()(**batch)
                model.train()
            for part in model.modules():
                if is_sharded(part):
                    part.reshard()  # so that the plain step begins as the other one does
            with PeakMeter(model, optimizer, batch) as meter:
                if mimose is not None:
                    mimose.step(batch)
                else:
                    loss = model(**batch).loss
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            peaks.append(meter.peak_bytes)
            residents.append(meter.resident_bytes)
        found = {"peaks": peaks, "residents": residents, "weights": digest(model), "records": [], "report": ""}
        if mimose is not None:
            found |= {"records": [record.to_dict() for record in mimose.records], "report": str(mimose.report())}
            mimose.close()
        return found

    def both_loops(self) -> dict[str, Any]:
        """The same with a share that leaves room for what cannot be recomputed."""
        plain = self.loop(None)
        budget = self.budget(plain, 0.85)
        return {"plain": plain, "mimose": self.loop(budget), "budget": budget}

    def attempt(self, budget: str | int, task: type[Task] = Sharded, tokens: tuple[int, ...] = (24, 16, 32)) -> str:
        """How a fit ends; rank 0 has batches of a size of their own, and a budget."""
        pl.seed_everything(0, verbose=False)
        batches = [text_batch(4, length if self.rank == 0 else 24, i) for i, length in enumerate(tokens)]
        callback = MimoseCallback(budget if self.rank == 0 else "1GB", actions=["recompute"])
        try:
            self.trainer(callback).fit(task(TinyText()), loader(batches))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    def tensor_parallel(self) -> str:
        """What is said of parameters that are no plain FSDP2 ones."""
        model = TinyText()
        weight = distribute_tensor(model.layers[0].out.weight.detach(), init_device_mesh("cpu", (self.ranks,)))
        model.layers[0].out.weight = nn.Parameter(weight)
        try:
            Mimose(model, budget="1GB")
        except UnsupportedError as error:
            return str(error)
        return ""


def digest(model: nn.Module) -> str:
    """This rank's part of the weights."""
    return hashlib.sha256(b"".join(local(p).detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(rank: int, ranks: int, directory: Path, what: str) -> dict[str, Any]:
    """Some fits; after the last one a rank that failed alone stays until the other has noticed."""
    each = Ranks(rank, ranks)
    found: dict[str, Any] = {}
    if what == "refusal":
        found["refused"] = each.attempt(1_400_000, tokens=(24, 256, 32))
        found["then"] = each.attempt("1GB")
        return found
    if what == "alone":
        found["alone"] = each.attempt("1GB", RunsOut)
        if rank == 1:
            until = time.monotonic() + PATIENCE
            while not (directory / "noticed").exists() and time.monotonic() < until:
                time.sleep(0.1)
            found["noticed"] = (directory / "noticed").exists()
        else:
            (directory / "noticed").touch()
        return found
    let_gloo_go_first()
    found["fit"] = each.both()
    if what == "all":
        found["loop"] = each.both_loops()
        found["tensor parallel"] = each.tensor_parallel()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    be_ranks(main)
