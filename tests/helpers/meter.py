"""The independent meter, from the one place where it lives: `examples/meter.py`."""

from __future__ import annotations

from meter import MeterCallback, PeakMeter, StepTimes

__all__ = ["MeterCallback", "PeakMeter", "StepTimes"]
