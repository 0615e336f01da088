"""The numbers under `mimose/` in the progress bar and the loggers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

from lightning_mimose.report.record import StepRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

PREFIX = "mimose/"
EPOCH_PREFIX = "mimose/epoch/"
PROGRESS_BAR = frozenset({"peak_bytes", "recomputed_units"})


@dataclass
class _Window:
    """Sums and extremes of some steps of this rank, in plain numbers: a step adds to them in about a microsecond."""

    steps: int = 0
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    recomputed_units: int = 0
    lean_units: int = 0
    cache_hits: int = 0
    planning_seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        peak, predicted = record.measured_peak_bytes, record.predicted_peak_bytes
        if peak is not None and (self.peak_bytes is None or peak > self.peak_bytes):
            self.peak_bytes = peak
        if predicted is not None and (self.predicted_peak_bytes is None or predicted > self.predicted_peak_bytes):
            self.predicted_peak_bytes = predicted
        self.budget_bytes = record.budget_bytes
        if record.actions:
            self.recomputed_units += record.recomputed_units
            self.lean_units += record.lean_units
        self.cache_hits += record.cache_hit
        self.planning_seconds += record.planning_seconds

    def join(self, later: _Window) -> None:
        """Take in the steps of a window that begins where this one ends."""
        self.steps += later.steps
        self.peak_bytes = _larger(self.peak_bytes, later.peak_bytes)
        self.predicted_peak_bytes = _larger(self.predicted_peak_bytes, later.predicted_peak_bytes)
        self.budget_bytes = self.budget_bytes if later.budget_bytes is None else later.budget_bytes
        self.recomputed_units += later.recomputed_units
        self.lean_units += later.lean_units
        self.cache_hits += later.cache_hits
        self.planning_seconds += later.planning_seconds

    def local(self) -> dict[str, float]:
        """This rank's values, by metric; what no step had is left out."""
        values = {
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "recomputed_units": self.recomputed_units / self.steps,
            "lean_units": self.lean_units / self.steps,
            "cache_hits": self.cache_hits,
            "planning_seconds": self.planning_seconds / self.steps,
        }
        return {name: value for name, value in values.items() if value is not None}

    def across_ranks(self, device: torch.device) -> dict[str, float]:
        """The values over all ranks, by metric. Every rank must call it, even one that has nothing to add."""
        nothing, steps = float("-inf"), float(self.steps)
        values: dict[str, tuple[Callable[[], Metric], tuple[float, ...]]] = {
            "peak_bytes": (MaxMetric, (nothing if self.peak_bytes is None else self.peak_bytes,)),
            "predicted_peak_bytes": (
                MaxMetric,
                (nothing if self.predicted_peak_bytes is None else self.predicted_peak_bytes,),
            ),
            "budget_bytes": (MaxMetric, (nothing if self.budget_bytes is None else self.budget_bytes,)),
            "recomputed_units": (MeanMetric, (self.recomputed_units / max(1.0, steps), steps)),
            "lean_units": (MeanMetric, (self.lean_units / max(1.0, steps), steps)),
            "cache_hits": (SumMetric, (self.cache_hits,)),
            "planning_seconds": (MeanMetric, (self.planning_seconds / max(1.0, steps), steps)),
        }
        # Single precision cannot tell bytes apart beyond 16 MB; Apple's device has nothing else.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        result = {}
        for name, (kind, arguments) in values.items():
            metric = kind().set_dtype(dtype).to(device)
            metric.update(*arguments)
            value = float(metric.compute())
            if torch.isfinite(torch.tensor(value)):  # on every rank or on none: the value is the same everywhere
                result[name] = value
        return result


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


class StepMetrics:
    """Logs what the steps cost, rarely and without touching the device or a generator.

    Every `trainer.log_every_n_steps` steps, of the steps since the last time (this rank's), in bytes, counts and
    seconds:

    - `mimose/peak_bytes`: largest measured peak; absent while none was measured
    - `mimose/predicted_peak_bytes`: largest predicted peak; absent while all were sheltered
    - `mimose/budget_bytes`: the budget in force
    - `mimose/recomputed_units`: units recomputed, mean per step
    - `mimose/lean_units`: units that kept recipes instead of some of their tensors, mean per step
    - `mimose/cache_hits`: number of steps whose plan was known
    - `mimose/planning_seconds`: time to find the plan, mean per step

    With `log_every_n_steps=1` these are the step's own values. At the end of an epoch the same over the whole epoch
    and all ranks, aggregated with torchmetrics, as `mimose/epoch/peak_bytes` and so on.
    """

    def __init__(self) -> None:
        self._latest = _Window()  # a step adds to this one alone: to both others it is joined when they are asked for
        self._recent = _Window()
        self._epoch = _Window()

    def log(self, trainer: Trainer, callback: Callback, record: StepRecord) -> None:
        """Take in one step, and log if this step is one that Lightning writes to its loggers.

        Args:
            trainer: The trainer.
            callback: Whose `log` is called, in its `on_train_batch_end`.
            record: The step.
        """
        self._latest.add(record)
        if trainer.barebones or not _logs_now(trainer):
            return
        self._join()
        for name, value in self._recent.local().items():
            _log(callback, PREFIX + name, value, on_step=True, on_epoch=False, prog_bar=name in PROGRESS_BAR)
        self._recent = _Window()

    def log_epoch(self, trainer: Trainer, callback: Callback) -> None:
        """Log the epoch's values, the same on every rank. Call it on every rank, in `on_train_epoch_end`."""
        self._join()
        epoch, self._epoch = self._epoch, _Window()
        if trainer.barebones:
            return
        device = trainer.strategy.root_device
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()  # by one rank, too
        for name, value in epoch.across_ranks(device).items():
            # The ranks agree already; Lightning would warn about epoch values that it does not reduce itself.
            more: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max", "device": device}
            _log(callback, EPOCH_PREFIX + name, value, on_step=False, on_epoch=True, **(more if shared else {}))

    def _join(self) -> None:
        latest, self._latest = self._latest, _Window()
        self._recent.join(latest)
        self._epoch.join(latest)


def _logs_now(trainer: Any) -> bool:
    """Whether Lightning writes its loggers after this batch.

    It counts batches that stepped (`global_step` counts optimizers), and writes nothing after one that accumulates.
    """
    loop, every = trainer.fit_loop, int(trainer.log_every_n_steps)
    due = every > 0 and (loop.epoch_loop._batches_that_stepped + 1) % every == 0
    if not due and not trainer.should_stop:
        return False
    return updates_now(trainer)


def updates_now(trainer: Any) -> bool:
    """Whether an update follows the batch that is running; in manual optimization one may, as far as is known."""
    return not (trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate())


def _log(callback: Any, name: str, value: float, *, device: torch.device | None = None, **options: Any) -> None:
    # A tensor in double precision on the host: Lightning would make a single-precision one on the device.
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    callback.log(name, torch.tensor(value, dtype=dtype, device=device or "cpu"), batch_size=1, **options)
