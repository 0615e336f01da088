"""The logged metrics: values, rhythm, and what must not happen."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import multiprocessing

from lightning_mimose.report.metrics import StepMetrics, _Window
from lightning_mimose.report.record import StepRecord
from tests.helpers.models import Task, TinyText, loader, quiet_trainer, text_batch

BASE = StepRecord(0, 0, 0, {"batch": 4}, False, False, False, 10**10, 10**5, 5 * 10**5, None, None, {}, 0.5)


class Logs(pl.Callback):
    """Feeds given records to `StepMetrics`, one per batch, as `MimoseCallback` does."""

    def __init__(self, records: list[StepRecord]) -> None:
        self.records, self.metrics, self.seen = records, StepMetrics(), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """One step."""
        self.metrics.log(trainer, self, self.records[self.seen])
        self.seen += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """One epoch."""
        self.metrics.log_epoch(trainer, self)


class Kept(pl.loggers.Logger):
    """A logger that keeps what it gets."""

    name, version = "kept", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep it."""
        self.rows.append((step, {k: v for k, v in metrics.items() if k.startswith("mimose/")}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore them."""


def run(records: list[StepRecord], **options: Any) -> tuple[pl.Trainer, Kept]:
    """Train one batch per record and log them."""
    kept = Kept()
    options = {"log_every_n_steps": 1, "logger": kept} | options
    trainer = quiet_trainer(Logs(records), **options)
    trainer.fit(Task(TinyText(1, 8)), loader([text_batch(2, 4)] * (len(records) // options.get("max_epochs", 1))))
    return trainer, kept


def rows(kept: Kept) -> list[dict[str, float]]:
    """The rows of steps, without the epochs'."""
    return [row for _, row in kept.rows if row and not any("epoch" in name for name in row)]


def test_every_step_is_logged_with_its_own_values() -> None:
    """With log_every_n_steps=1; what was not measured or predicted is absent, not zero."""
    _, kept = run(
        [
            replace(BASE, sheltered=True, predicted_peak_bytes=None, measured_peak_bytes=7_000_000_001),
            replace(BASE, cache_hit=True, actions={"a": "recompute", "b": "lean"}),
        ]
    )
    first, second = rows(kept)
    assert first == {
        "mimose/peak_bytes": 7_000_000_001,  # to the byte: not in single precision
        "mimose/budget_bytes": 10**10,
        "mimose/recomputed_units": 0,
        "mimose/lean_units": 0,
        "mimose/cache_hits": 0,
        "mimose/planning_seconds": 0.5,
    }
    assert second["mimose/predicted_peak_bytes"] == 500_000
    assert second["mimose/recomputed_units"] == second["mimose/lean_units"] == second["mimose/cache_hits"] == 1


def test_between_two_logs_the_largest_peak_and_the_mean_count() -> None:
    """A spike between two logged steps is not lost."""
    steps = [replace(BASE, measured_peak_bytes=peak, actions={"a": "recompute"}) for peak in (1, 900, None, 2)]
    _, kept = run([*steps, replace(BASE, cache_hit=True)], log_every_n_steps=4)
    (row,) = rows(kept)
    assert row["mimose/peak_bytes"] == 900
    assert row["mimose/recomputed_units"] == 1
    assert row["mimose/cache_hits"] == 0


def test_epochs_are_aggregated_and_begin_anew() -> None:
    """Maximum of peaks, mean of units and time, sum of hits, per epoch."""
    first = [replace(BASE, measured_peak_bytes=8, cache_hit=True), replace(BASE, actions={"a": "recompute"})]
    second = [replace(BASE, planning_seconds=1.5), replace(BASE, measured_peak_bytes=3, planning_seconds=0.5)]
    _, kept = run([*first, *second], max_epochs=2, log_every_n_steps=100)
    one, two = (row for _, row in kept.rows if "mimose/epoch/peak_bytes" in row)
    assert (one["mimose/epoch/peak_bytes"], two["mimose/epoch/peak_bytes"]) == (8, 3)
    assert (one["mimose/epoch/cache_hits"], two["mimose/epoch/cache_hits"]) == (1, 0)
    assert one["mimose/epoch/recomputed_units"] == 0.5
    assert two["mimose/epoch/planning_seconds"] == 1.0


def test_a_row_covers_the_end_of_an_epoch() -> None:
    """It is of all steps since the last row, while the epochs are told apart within them."""
    peaks = [50, 1, 2, 70, 3, 4]
    _, kept = run([replace(BASE, measured_peak_bytes=peak) for peak in peaks], max_epochs=2, log_every_n_steps=2)
    assert [row["mimose/peak_bytes"] for row in rows(kept)] == [50, 70, 4]
    epochs = [row["mimose/epoch/peak_bytes"] for _, row in kept.rows if "mimose/epoch/peak_bytes" in row]
    assert epochs == [50, 70]


def test_an_epoch_without_any_measurement_logs_the_rest() -> None:
    """No infinity and no nan reaches a logger."""
    trainer, _ = run([replace(BASE, predicted_peak_bytes=None)] * 2)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("mimose/")}
    assert "mimose/epoch/peak_bytes" not in values
    assert values["mimose/epoch/budget_bytes"] == 10**10
    assert all(value == value and abs(value) != float("inf") for value in values.values())


def test_accumulation_steps_are_in_the_next_row() -> None:
    """Lightning writes no row for an accumulating batch; its values are not lost."""
    steps = [replace(BASE, measured_peak_bytes=peak) for peak in (50, 1, 60, 2)]
    _, kept = run(steps, accumulate_grad_batches=2)
    assert [row["mimose/peak_bytes"] for row in rows(kept)] == [50, 60]


def test_callback_metrics_can_be_read_without_a_logger() -> None:
    """For monitors such as EarlyStopping, and for the progress bar."""
    trainer, _ = run([replace(BASE, measured_peak_bytes=5)], logger=False)
    assert trainer.callback_metrics["mimose/peak_bytes"] == 5
    assert trainer.progress_bar_metrics["mimose/peak_bytes"] == 5
    assert "mimose/budget_bytes" not in trainer.progress_bar_metrics


def test_barebones_logs_nothing_and_warns_nothing() -> None:
    """Warnings are errors in these tests."""
    trainer = pl.Trainer(barebones=True, accelerator="cpu", max_steps=2, callbacks=[])
    metrics, callback = StepMetrics(), SimpleNamespace(log=pytest.fail)
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.log_every_n_steps - 1
    metrics.log(trainer, callback, BASE)  # type: ignore[arg-type]
    metrics.log_epoch(trainer, callback)  # type: ignore[arg-type]


def test_a_real_csv_logger(tmp_path: Path) -> None:
    """A logger whose header must not change between rows."""
    run([BASE, replace(BASE, measured_peak_bytes=5)], logger=CSVLogger(tmp_path))
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "mimose/epoch/peak_bytes" in text
    assert "mimose/planning_seconds" in text


def test_generators_are_not_moved() -> None:
    """Logging draws nothing from torch's generator."""
    window = _Window()
    window.add(BASE)
    before = torch.get_rng_state()
    window.local()
    window.across_ranks(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_logs_nothing_costs_microseconds() -> None:
    """Far below the 100 us that a step may cost (a loose bound: the machine is shared)."""
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
        log_every_n_steps=50,
        should_stop=False,
        barebones=False,
    )
    metrics = StepMetrics()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            metrics.log(trainer, None, BASE)  # type: ignore[arg-type]
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 30e-6


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    window = _Window()
    if rank == 0:  # rank 1 has nothing measured, and fewer steps
        window.add(replace(BASE, measured_peak_bytes=7, cache_hit=True, actions={"a": "recompute"}))
        window.add(replace(BASE, measured_peak_bytes=5, actions={"a": "recompute"}))
    window.add(replace(BASE, predicted_peak_bytes=900_000, cache_hit=True))
    torch.save(window.across_ranks(torch.device("cpu")), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks_agree(tmp_path: Path) -> None:
    """Maximum, weighted mean and sum over ranks, the same on both."""
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    one, two = torch.load(tmp_path / "0"), torch.load(tmp_path / "1")
    assert one == two
    assert one["peak_bytes"] == 7
    assert one["predicted_peak_bytes"] == 900_000
    assert one["recomputed_units"] == pytest.approx(2 / 4)
    assert one["cache_hits"] == 3
