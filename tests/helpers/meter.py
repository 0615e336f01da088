"""The independent meter, from the one place where it lives."""

from __future__ import annotations

from lightning_mimose.bench.meter import MeterCallback, PeakMeter, StepTimes

__all__ = ["MeterCallback", "PeakMeter", "StepTimes"]
