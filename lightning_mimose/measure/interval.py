"""What meters tell: intervals of a step's curve, and what an accelerator's allocator had meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Interval:
    """Live bytes between one mark and the next, relative to the meter's start.

    Attributes:
        level_bytes: Live bytes at the mark that opens the interval.
        peak_bytes: Largest live bytes until the next mark (or the stop).
        rest_bytes: Largest of them after the first memory went; None where none did, or a meter cannot tell.
    """

    level_bytes: int
    peak_bytes: int
    rest_bytes: int | None = None


class Allocator(NamedTuple):
    """What the allocator of an accelerator had at most while a meter ran.

    Attributes:
        held_bytes: What it could not do without, see `counters.Counters`.
        reserved_bytes: What it had from the device.
    """

    held_bytes: int
    reserved_bytes: int
