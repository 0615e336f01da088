"""Frontier: what each budget costs in time, by which actions, side by side in one run.

For every batch of a workload, each budget and menu takes its turn, several times and in another order each time. Two
equal models in one process differ by some percent, by where their memory lies, and a machine's speed changes within
seconds. So a turn is a pair: a step, and a plain one of the same model right before or after it, with the package
attached and nothing planned. Each of the two runs three times in a row, of which the first does not count, for it pays
for memory that the one before it had given back. A budget's cost is the sum over all batches of the median differences
against that of the median plain steps, by the clock and in processor time of the training thread, which other work
disturbs less; "give or take" is its standard error, from the spread of the differences. The row "plain" is a model that
never had the package, whose steps are all plain: what is noise. Peaks are read off an independent meter in a pass of
their own, so that no meter runs while time is taken.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench.large import LARGE
from bench.models import Batch, Workload
from lightning_mimose import BudgetInfeasibleError, Mimose
from meter import PeakMeter

MENUS: dict[str, list[str] | None] = {"all": None, "recompute": ["recompute"], "lean": ["lean"]}
Key = tuple[str, float]
K = TypeVar("K", bound=Hashable)
CONTROL = ("plain", 1.0)
COLUMNS = ("added time", "give or take", "added processor time")
LAPS = 2
"""Steps of a turn that count."""


class Runner:
    """One copy of the model, trained under one budget and menu (or plainly)."""

    def __init__(
        self,
        workload: Workload,
        budget_bytes: int | None,
        menu: str | None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.workload, self.budget_bytes = workload, budget_bytes
        self.model = workload.make()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-4)  # type: ignore[call-arg]
        self.error: BudgetInfeasibleError | None = None
        self.mimose: Mimose | None = None
        if budget_bytes is not None:
            try:
                self.mimose = Mimose(
                    self.model,
                    budget=budget_bytes,
                    optimizer=self.optimizer,
                    loss_fn=self._loss,
                    actions=MENUS[menu or "all"],
                )
            except BudgetInfeasibleError as error:
                self.error = error

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.workload.loss(model, batch)

    def step(self, batch: Batch, seed: int, *, plain: bool = False) -> None:
        """One training step, with the same dropout for everyone.

        Args:
            batch: What is trained on.
            seed: Of the dropout.
            plain: Whether to step past the package, which stays attached.
        """
        torch.manual_seed(seed)
        if plain or self.mimose is None:
            loss = self.workload.loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        elif self.error is None:
            try:
                self.mimose.step(batch)
            except BudgetInfeasibleError as error:
                self.error = error

    def peaks(self, batches: Sequence[Batch]) -> tuple[list[int], int]:
        """True peak of every batch, and the largest resident bytes."""
        found, resident = [], 0
        for seed, batch in enumerate(batches):
            with PeakMeter(self.model, self.optimizer, batch) as meter:
                self.step(batch, seed)
            found.append(meter.peak_bytes)
            resident = max(resident, meter.resident_bytes)
        return found, resident


def rows(
    names: Sequence[str],
    steps: int,
    results: Path,
    *,
    repeats: int,
    shares: Sequence[float],
    menus: Sequence[str],
    seed: int = 11,
) -> Iterator[dict[str, Any]]:
    """One row per workload, menu and budget; draws the frontier of each workload."""
    for name in names:
        workload = LARGE[name]
        batches = workload.batches(steps, seed=seed, order="longest first")
        plain, runners = prepared(workload, batches, menus, shares)
        outcomes = {key: outcome(runner, batches) for key, runner in runners.items()}
        able = {key: runner for key, runner in runners.items() if runner.error is None}
        added = timed({CONTROL: plain, **able}, batches, repeats)
        yield {"model": name, "menu": "plain", "budget share": "1", **added[CONTROL].columns()}
        for menu, share in runners:
            found = added.get((menu, share))
            costs = dict.fromkeys(COLUMNS) if found is None else found.columns()
            yield {"model": name, "menu": menu, "budget share": f"{share}", **costs, **outcomes[menu, share]}
        drawn = [(menu, share, added[menu, share].time) for menu, share in able]
        draw(name, drawn, results / f"frontier-{name}.png", "added time, %")


def prepared(
    workload: Workload, batches: Sequence[Batch], menus: Sequence[str], shares: Sequence[float]
) -> tuple[Runner, dict[Key, Runner]]:
    """A plain copy of the model, and one for each menu and budget, whose plans have settled."""
    plain = Runner(workload, None, None)
    plain.peaks(batches[:2])  # the optimizer's state comes with the first update
    peaks, resident = plain.peaks(batches)
    runners = {
        (menu, share): Runner(workload, int(resident + share * (max(peaks) - resident)), menu)
        for menu in menus
        for share in shares
    }
    for runner in runners.values():
        for index, batch in enumerate((*batches, *batches)):  # what is learnt, tried and cached comes first
            runner.step(batch, index % len(batches))
    return plain, runners


def outcome(runner: Runner, batches: Sequence[Batch]) -> dict[str, Any]:
    """What came of a budget: true peaks against it, and what the plans were."""
    measured, planned = [], []
    if runner.error is None and runner.mimose is not None:
        measured = runner.peaks(batches)[0]
        planned = list(runner.mimose.records)[-len(batches) :]
    return {
        "steps over": sum(peak > (runner.budget_bytes or 0) for peak in measured),
        "highest peak": round(max(measured) / (runner.budget_bytes or 1), 4) if measured else None,
        "lean units": round(statistics.mean([r.lean_units for r in planned]), 1) if planned else 0.0,
        "recomputed units": round(statistics.mean([r.recomputed_units for r in planned]), 1) if planned else 0.0,
        "refused": "yes" if runner.error is not None else "",
    }


class Added(NamedTuple):
    """What is added to a plain step, as a share of it.

    Attributes:
        time: By the clock.
        processor_time: Of the training thread's processor: the less disturbed by what else runs.
        time_error: Standard error of `time`; None if every step had one turn only.
    """

    time: float
    processor_time: float
    time_error: float | None

    def columns(self) -> dict[str, float | None]:
        """As tables and JSON have it."""
        rounded = (
            None if each is None else round(each, 4) for each in (self.time, self.time_error, self.processor_time)
        )
        return dict(zip(COLUMNS, rounded, strict=True))


def laps(runner: Runner, batch: Batch, seed: int, *, plain: bool = False) -> list[tuple[float, float]]:
    """Seconds of steps after an equal one, by the clock and in processor time of the training thread."""
    runner.step(batch, seed, plain=plain)
    found = []
    for _ in range(LAPS):
        began = time.perf_counter(), time.thread_time()
        runner.step(batch, seed, plain=plain)
        found.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
    return found


def timed(everyone: Mapping[K, Runner], batches: Sequence[Batch], repeats: int) -> dict[K, Added]:
    """What each runner's steps add to plain ones of its own, over all batches; kept calls are patched in both."""
    order = random.Random(0)
    # Stepped and plain, batch, turn, lap, both clocks.
    seconds = {key: np.zeros((2, len(batches), repeats, LAPS, 2)) for key in everyone}
    for index, batch in enumerate(batches):
        for turn in range(repeats):
            for key, runner in order.sample(list(everyone.items()), len(everyone)):
                for plain in order.sample((0, 1), 2):
                    seconds[key][plain, index, turn] = laps(runner, batch, index, plain=bool(plain))
    return {key: _added(*found) for key, found in seconds.items()}


def _added(stepped: NDArray[np.float64], plain: NDArray[np.float64]) -> Added:
    """From seconds of steps and of plain ones beside them: shape (batches, turns, laps, clocks)."""
    added = np.median(stepped - plain, axis=(1, 2)).sum(0)
    whole = np.median(plain, axis=(1, 2)).sum(0)
    ratio = added / whole
    turns = plain.shape[1]
    if turns < 2:
        return Added(*ratio.tolist(), None)
    # Laps of a turn share what disturbs it. The factor is a median's, of what is spread normally.
    spread = (stepped - plain - ratio * plain)[..., 0].mean(2)
    variance = np.pi / 2 * spread.var(axis=1, ddof=1) / turns
    return Added(*ratio.tolist(), float(np.sqrt(variance.sum()) / whole[0]))


def draw(name: str, points: Sequence[tuple[str, float, float]], path: Path, label: str) -> None:
    """Budget against what is added (a share), a curve for each menu."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for menu, colour in zip(MENUS, ("#0072B2", "#E69F00", "#009E73"), strict=True):
        curve = [(100 * share, 100 * added) for kind, share, added in points if kind == menu]
        if curve:
            # Beneath the others, and seen around them: it is often equal to one.
            width = 5 if menu == "all" else 1.5
            axes.plot(*zip(*curve, strict=True), marker="o", color=colour, label=menu, linewidth=width)
    axes.set_xlabel("budget, % of the activation memory of the largest batch")
    axes.set_ylabel(label)
    axes.set_title(f"{name}: what a budget costs, by the actions allowed")
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
