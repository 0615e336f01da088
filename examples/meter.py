"""The independent meter behind the examples' proof; it lives in `lightning_mimose.bench.meter`."""

from __future__ import annotations

from lightning_mimose.bench.meter import MeterCallback, PeakMeter, StepTimes

__all__ = ["MeterCallback", "PeakMeter", "StepTimes"]
