"""Peaks of validation: outside the budget's promise, reported separately; claimed where others share the budget."""

from __future__ import annotations

from typing import Any

from lightning_mimose.engine.core import Engine
from lightning_mimose.engine.tenancy import Tenancy
from lightning_mimose.measure import counters
from lightning_mimose.measure.meter import Meter, make_meter
from lightning_mimose.measure.others import bytes_beside
from lightning_mimose.measure.resident import batch_bytes


class EvaluationMeter:
    """Measures evaluation batches: all where it is free, on CPU the first of every run.

    In a shared budget a batch claims the most that any took, and one larger than all before all there is; that one is
    measured, too.

    Attributes:
        peaks: Stage -> largest peak in bytes, resident ones included.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._meter: Meter | None = None
        self._stage, self._loader = "", 0
        self._resident_bytes = self._batch_bytes = 0
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        """Stage and loader -> the largest batch that was measured, and the most that any took besides; in bytes."""
        self._tenancy: Tenancy | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled, knows what was measured, and measures no batch that is running."""
        return {**vars(self), "_meter": None, "_tenancy": None}

    def begin(self, engine: Engine, batch: Any, batch_idx: int, stage: str, loader: int = 0) -> None:
        """Start measuring a batch of one of the stage's loaders."""
        measured = counters.exist(engine.device) or not batch_idx
        self._tenancy = engine.tenancy
        if not measured and self._tenancy is None:
            return
        self._stage, self._loader, self._batch_bytes = stage, loader, batch_bytes(batch)
        engine.ledger.count_gradients()
        resident = engine.ledger.lasting_bytes() + engine.ledger.gradient_bytes
        self._resident_bytes = resident + self._batch_bytes
        if engine.tenancy is None:
            self._resident_bytes += bytes_beside(engine.device, engine.ledger.there_bytes() + self._batch_bytes)
        if self._tenancy is not None:
            largest, took = self._known.get((stage, loader), (-1, 0))
            fresh = self._batch_bytes > largest
            self._tenancy.begin_evaluation(None if fresh else self._resident_bytes + took)
            measured = measured or fresh
        if not measured:
            return
        self._meter = make_meter(engine.device, profile=engine.profile, compiles=engine.compiles)
        self._meter.start()

    def end(self) -> None:
        """Stop measuring, if a batch was being measured."""
        if self._meter is not None:
            intervals, self._meter = self._meter.stop(), None
            if intervals:  # else nothing could be measured
                took = max(i.peak_bytes for i in intervals)
                self.peaks[self._stage] = max(self._resident_bytes + took, self.peaks.get(self._stage, 0))
                key = self._stage, self._loader
                largest, most = self._known.get(key, (0, 0))
                self._known[key] = max(largest, self._batch_bytes), max(most, took)
        if self._tenancy is not None:
            self._tenancy.end()
            self._tenancy = None
