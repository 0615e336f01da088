"""`torch._functorch.config.activation_memory_budget` under `torch.compile`.

Its budget is a ratio of saved activations, not a bound on bytes. So several ratios are compiled and measured on the
largest batch, and the one whose peak is nearest under the budget is compared.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_mimose.bench.meter import meter_of
from lightning_mimose.bench.runner import Case, NotRun, Runner

RATIOS = (1.0, 0.7, 0.5, 0.3, 0.1)
"""Ratios that are tried, in this order, until one keeps the budget: each compiles the model, which takes long."""


class _Compiled:
    """The forward compiled under one ratio, for every copy of the model.

    Attributes:
        graphs: How many graphs were compiled.
        seconds: What the first step took, its compilation above all.
        peak_bytes: What the largest batch reached.
    """

    def __init__(self, case: Case, ratio: float) -> None:
        self.ratio, self.graphs, self.seconds, self.peak_bytes = ratio, 0, 0.0, 0

        def forward(model: nn.Module, batch: Any) -> torch.Tensor:
            return case.work.loss(model, batch)

        # A backend of its own keeps out graphs of other ratios: compiled code does not look at the ratio again.
        self.forward: Callable[..., torch.Tensor] = torch.compile(forward, backend=self._compile, dynamic=True)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        with config.patch(activation_memory_budget=self.ratio):
            return compile_fx(graph, inputs)


class CompiledRunner(Runner):
    """Trains with a compiled forward.

    Args:
        case: What it is made for.
        compiled: The forward.
    """

    def __init__(self, case: Case, compiled: _Compiled) -> None:
        super().__init__(case, counts_flops=False)
        self._compiled = compiled

    def loss(self, batch: Any) -> torch.Tensor:
        """The compiled forward."""
        return self._compiled.forward(self.model, batch)

    def remarks(self) -> list[str]:
        """What was compiled, known at the end only."""
        compiled = self._compiled
        return [
            f"activation_memory_budget={compiled.ratio}, dynamic=True. Graphs compiled: {compiled.graphs}, outside the "
            "times; plan is what compiling all ratios tried took (less where torch finds them in its cache on disk). "
            "Fused kernels make it another program: its time and peak are not the budget's alone.",
            *self.notes,
        ]


def memory_budget(case: Case) -> Runner:
    """The ratio whose measured peak is nearest under the budget; if none is under, the one with the lowest."""
    if case.device.type == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        raise NotRun("no C++ compiler")
    scan: dict[float, _Compiled] = case.shared.setdefault("ratios", {})
    for ratio in RATIOS:
        if ratio not in scan and not _fitting(scan, case.budget_bytes):
            case.tell(f"torch.compile with a memory budget of {ratio}")
            scan[ratio] = _measured(case, ratio)
    under = _fitting(scan, case.budget_bytes)
    best = max(under, key=lambda e: e.peak_bytes) if under else min(scan.values(), key=lambda e: e.peak_bytes)
    runner = CompiledRunner(case, best)
    runner.planning_seconds = sum(each.seconds for each in scan.values())
    peaks = ", ".join(f"{each.ratio}: {each.peak_bytes / 1e6:,.0f} MB" for each in scan.values())
    runner.notes.append(f"Peaks of the largest batch by ratio: {peaks}.")
    if not under:
        runner.notes.append("No ratio keeps the budget; the one with the lowest peak is shown.")
    return runner


def _fitting(scan: dict[float, _Compiled], budget_bytes: int) -> list[_Compiled]:
    return [each for each in scan.values() if each.peak_bytes <= budget_bytes]


def _measured(case: Case, ratio: float) -> _Compiled:
    """The second of two steps of the largest batch: the first makes the optimizer's state."""
    compiled = _Compiled(case, ratio)
    runner = CompiledRunner(case, compiled)
    began = time.perf_counter()
    runner.step(case.largest)
    compiled.seconds = time.perf_counter() - began
    with meter_of(case.device, runner.model, runner.optimizer, case.largest) as meter:
        runner.step(case.largest)
    compiled.peak_bytes = meter.peak_bytes
    return compiled
