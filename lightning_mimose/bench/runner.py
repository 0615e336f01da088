"""One copy of the model, trained in one way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_mimose.bench.work import Work
from lightning_mimose.loop import Mimose
from lightning_mimose.measure.cap import ReservedCap
from lightning_mimose.measure.others import bytes_beside
from lightning_mimose.measure.resident import batch_bytes
from lightning_mimose.parts import storage_bytes


class NotRun(Exception):
    """An alternative cannot run here; the message says why, for its row in the table."""


@dataclass
class Case:
    """What an alternative is made for.

    Attributes:
        work: Model, loss and batches.
        device: Where they are.
        budget_bytes: What a step may reach; meaningless to alternatives that know no budget.
        largest: The batch with the highest peak when everything is kept.
        resident_bytes: What a plain step finds resident.
        shared: Kept between the budgets of one work, for what is found out once.
        tell: Told what takes long.
    """

    work: Work
    device: torch.device
    budget_bytes: int
    largest: Any
    resident_bytes: int
    shared: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda text: None


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Runner:
    """Trains one copy of the model; what an alternative does to it happens in `prepare` and around the forward.

    Args:
        case: What it is made for.
        prepare: Changes the model before its first step.
        around: Entered around every forward.
        notes: What a reader must know, for below the table.
        planning_seconds: What planning took before training.

    Attributes:
        model: The copy.
        optimizer: AdamW.
        counts_flops: Whether the operations it runs can be counted.
    """

    def __init__(
        self,
        case: Case,
        *,
        prepare: Callable[[nn.Module], None] = lambda model: None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        notes: Sequence[str] = (),
        planning_seconds: float | None = None,
        counts_flops: bool = True,
    ) -> None:
        self.case, self.notes, self.planning_seconds = case, list(notes), planning_seconds
        self.counts_flops, self._around = counts_flops, around
        self.model = case.work.build()
        prepare(self.model)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward."""
        return self.case.work.loss(self.model, batch)

    def step(self, batch: Any) -> None:
        """One step, in the order of Lightning's automatic optimization: gradients are freed after the forward."""
        with self._around():
            loss = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @contextmanager
    def present(self, *, capped: bool = True) -> Iterator[None]:
        """On an accelerator, brings everything there and takes it away again: others must find its memory empty.

        Args:
            capped: Whether one that caps what may be allocated does so.
        """
        if self.case.device.type == "cpu":
            yield
            return
        self._move(self.case.device)
        try:
            yield
        finally:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        """Parameters, buffers, gradients and the optimizer's state, each staying the object that it is."""
        parameters = list(self.model.parameters())
        state = [leaf for leaf in tree_leaves(list(self.optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
        steps = {id(values["step"]) for values in self.optimizer.state.values() if "step" in values}  # kept on the host
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for tensor in (*parameters, *self.model.buffers(), *gradients, *(t for t in state if id(t) not in steps)):
            if tensor.layout != torch.strided:  # which cannot be page-locked
                tensor.data = tensor.data.to(device)
                continue
            there = torch.empty_like(tensor.data, device=device, pin_memory=device.type == "cpu")
            tensor.data = there.copy_(tensor.data, non_blocking=True)
        synchronize(self.case.device)

    def remarks(self) -> list[str]:
        """What a reader must know, once everything has run."""
        return self.notes

    def close(self) -> None:
        """Let go of everything."""


class MimoseRunner(Runner):
    """Trains under this package.

    On an accelerator its budget is for all that the process has there, and caps it; other alternatives are in the same
    process. So what lies there besides is added to the budget, and the cap is in force only while it trains.

    Args:
        case: What it is made for.
        notes: What a reader must know.
        options: Keyword arguments of `Mimose`.
    """

    def __init__(self, case: Case, *, notes: Sequence[str] = (), **options: Any) -> None:
        super().__init__(case, notes=notes)
        gc.collect()  # what others have left is no part of it
        own_bytes = storage_bytes([*self.model.parameters(), *self.model.buffers()]) + batch_bytes(case.largest)
        budget_bytes = case.budget_bytes + bytes_beside(case.device, own_bytes)
        self.mimose = Mimose(
            self.model,
            budget=budget_bytes,
            optimizer=self.optimizer,
            loss_fn=case.work.loss,
            **options,
        )
        self._cap = ReservedCap(case.device, budget_bytes)
        if case.device.type == "cuda":  # not its own cap: that one is in force until it is closed
            torch.cuda.set_per_process_memory_fraction(1.0, case.device)

    @contextmanager
    def present(self, *, capped: bool = True) -> Iterator[None]:
        """With the cap, or without it where kernels run that training does not."""
        with super().present(), ExitStack() as stack:
            if capped:
                stack.callback(self._cap.restore)
                self._cap.apply()
            yield

    def step(self, batch: Any) -> None:
        """One step inside the budget."""
        self.mimose.step(batch)

    def remarks(self) -> list[str]:
        """With how often a step failed, of memory mostly, and ran again; those are in the columns like others."""
        again = sum(record.retried for record in self.mimose.records)
        ran = [f"{again} of {len(self.mimose.records)} steps failed once and ran again."] if again else []
        return [*super().remarks(), *ran]

    def close(self) -> None:
        """Leave the model as it was."""
        self.mimose.close()
