"""Peaks of validation: outside the budget's promise, reported separately."""

from __future__ import annotations

from typing import Any

from lightning_mimose.engine import Engine
from lightning_mimose.measure.meter import Meter, make_meter
from lightning_mimose.measure.resident import batch_bytes


class EvaluationMeter:
    """Measures evaluation batches: all where it is free, the first of every run on CPU.

    Attributes:
        peaks: Stage -> largest peak in bytes, resident ones included.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._meter: Meter | None = None
        self._stage = ""
        self._resident_bytes = 0

    def begin(self, engine: Engine, batch: Any, batch_idx: int, stage: str) -> None:
        """Start measuring a batch."""
        if engine.device.type == "cpu" and batch_idx:
            return
        self._stage = stage
        engine.ledger.count_gradients()
        self._resident_bytes = engine.ledger.lasting_bytes() + engine.ledger.gradient_bytes + batch_bytes(batch)
        self._meter = make_meter(engine.device, profile=engine.profile)
        self._meter.start()

    def end(self) -> None:
        """Stop measuring, if a batch was being measured."""
        if self._meter is not None:
            intervals, self._meter = self._meter.stop(), None
            peak = self._resident_bytes + max((i.peak_bytes for i in intervals), default=0)
            self.peaks[self._stage] = max(peak, self.peaks.get(self._stage, 0))
