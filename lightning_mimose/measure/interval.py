"""What meters tell: intervals of a step's curve, and what an accelerator's allocator had meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TOPS = 512
"""Local maxima of an interval that are told: one with more of them is no part of a block."""


@dataclass(frozen=True)
class Interval:
    """Live bytes between one mark and the next, relative to the meter's start.

    Attributes:
        level_bytes: Live bytes at the mark that opens the interval.
        peak_bytes: Largest live bytes until the next mark (or the stop).
        rest_bytes: Largest of them after the first memory went; None where none did, or a meter cannot tell.
        tops_bytes: Every local maximum, in order of time: the largest is the peak. Empty where a meter cannot tell.
    """

    level_bytes: int
    peak_bytes: int
    rest_bytes: int | None = None
    tops_bytes: tuple[int, ...] = field(default=(), compare=False)

    def after_the_first_went(self) -> Interval:
        """The same from when something has gone that is there at its start, for that was told right before.

        What is above the start came later. Where no meter has seen anything go, it is as high as at its start.

        Example:
            >>> Interval(60, 80, 80, (60, 80)).after_the_first_went()
            Interval(level_bytes=60, peak_bytes=80, rest_bytes=80, tops_bytes=(80,))
            >>> Interval(60, 60, 45, (60,)).after_the_first_went()
            Interval(level_bytes=45, peak_bytes=45, rest_bytes=45, tops_bytes=(45,))
        """
        if self.rest_bytes is None:
            return self
        peak = self.peak_bytes if self.peak_bytes > self.level_bytes else self.rest_bytes
        tops = self.tops_bytes[1:] if self.tops_bytes[:1] == (self.level_bytes,) else self.tops_bytes
        tops = tops or ((peak,) if self.tops_bytes else ())
        return Interval(min(self.level_bytes, peak), peak, self.rest_bytes, tops)


class Climb:
    """Live bytes going up and down in an interval.

    Attributes:
        level_bytes: What they are now.

    Example:
        >>> climb = Climb()
        >>> for nbytes in (4, -1, 3, 2, -8):
        ...     climb.changes(nbytes)
        >>> climb.closed()
        Interval(level_bytes=0, peak_bytes=8, rest_bytes=8, tops_bytes=(4, 8))
        >>> climb.closed()
        Interval(level_bytes=0, peak_bytes=0, rest_bytes=None, tops_bytes=(0,))
    """

    def __init__(self) -> None:
        self.level_bytes = 0
        self._open()

    def _open(self) -> None:
        self._opened = self._high = self.level_bytes
        self._rest: int | None = None
        self._tops: list[int] = []
        self._rising = True

    def changes(self, nbytes: int) -> None:
        """So many bytes more are alive, or less."""
        self.level_bytes += nbytes
        if nbytes >= 0:
            self._rises_to(self.level_bytes)
        else:
            self._falls()
            self._rest = self.level_bytes if self._rest is None else self._rest

    def takes_for_a_moment(self, nbytes: int) -> None:
        """So many bytes more are alive, and gone again."""
        if nbytes:
            self._rises_to(self.level_bytes + nbytes)
            self._falls()

    def _rises_to(self, nbytes: int) -> None:
        self._high = max(self._high, nbytes) if self._rising else nbytes
        self._rising = True
        self._rest = None if self._rest is None else max(self._rest, nbytes)

    def _falls(self) -> None:
        if self._rising:
            self._tops.append(self._high)
        self._rising = False

    def closed(self) -> Interval:
        """The interval that is over; the next one begins."""
        tops = (*self._tops, self._high) if self._rising else tuple(self._tops)
        interval = Interval(self._opened, max(tops), self._rest, tops if len(tops) <= MOST_TOPS else ())
        self._open()
        return interval


class Allocator(NamedTuple):
    """What the allocator of an accelerator had at most while a meter ran.

    Attributes:
        held_bytes: What it could not do without, see `counters.Counters`.
        reserved_bytes: What it had from the device.
    """

    held_bytes: int
    reserved_bytes: int
