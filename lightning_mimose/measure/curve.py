"""The curve of one step: what a meter sees, cut into intervals that belong to the calls of units."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.interval import Allocator, Interval
from lightning_mimose.measure.meter import Meter, make_meter
from lightning_mimose.measure.trace import ENDS_EARLY, IS_GONE, LET_GO, Mark, Piece, without_asking
from lightning_mimose.predict.shapes import END_OF, result_at

MOST_ENDS = 2
"""Intervals after one call that results end in: what the one before it has returned is let go of when it returns, as a
rule, and what the last one has returned when its model does."""

GradientBytes = Callable[[], tuple[int, int, int]]
"""Returns the bytes of gradients that exist: (older than this step, made in it, of the older ones those added to)."""


class Measured(NamedTuple):
    """A curve that is complete, see `trace.StepTrace`."""

    marks: tuple[Mark, ...]
    intervals: tuple[Interval, ...]
    pieces: tuple[Piece, ...]
    allocator: Allocator | None
    aside_peak_bytes: int
    asked: dict[str, tuple[int, int]]


class Curve:
    """Measures from `start` to `stop`, and cuts what it measures at marks.

    Args:
        device: Where the step runs. The meter is chosen at `start`, when it is known whether a profiler runs.
        gradient_bytes: Tells the gradients alive now.
        profile: Whether torch's profiler is free to be used.
        compiles: See `meter.make_meter`.
        gradients_stay: Whether the memory of old gradients stays when they are let go of.

    Attributes:
        over: Whether the step is.
        ended: Interval -> the storage that goes when it begins, see `ends`.
    """

    def __init__(
        self,
        device: torch.device,
        gradient_bytes: GradientBytes,
        *,
        profile: bool,
        compiles: Callable[[], bool] = bool,
        gradients_stay: bool = False,
    ) -> None:
        self._device, self._gradient_bytes = device, gradient_bytes
        self._profile, self._compiles = profile, compiles
        self._gradients_stay = gradients_stay
        self._meter: Meter | None = None
        self._marks: list[Mark] = []
        self._owners: list[int | None] = []
        self._events: dict[int, tuple[str, str, int]] = {}
        self._aside: dict[int, int] = {}
        """What old gradients were there when something aside began, by its piece."""
        self._due = 0
        self._thread = 0
        self._missed = False
        self.over = False
        self.ended: dict[int, int] = {}

    def start(self) -> None:
        """Start the meter; the first interval belongs to the step."""
        self._meter = make_meter(self._device, profile=self._profile, compiles=self._compiles)
        self._thread = threading.get_ident()
        self._meter.start()
        self._open("step", "start")

    def _open(self, owner: str, name: str) -> int:
        self._marks.append(Mark(owner, name, *self._gradient_bytes()))
        self._owners.append(len(self._marks) - 1)
        return self.latest

    @property
    def latest(self) -> int:
        """The interval that was opened last."""
        return len(self._marks) - 1

    @property
    def sees_old_frees(self) -> bool:
        """Whether the meter sees memory go that is older than its start."""
        return self._meter is not None and self._meter.sees_old_frees

    def mark(self, owner: str, name: str) -> int:
        """Open an interval; returns its index."""
        assert self._meter is not None
        while self._due:
            self._open_end()
        self._meter.mark()
        # On CPU a meter sees the thread it was started in, and a backward may run in another one.
        self._missed = self._missed or (not counters.exist(self._device) and threading.get_ident() != self._thread)
        return self._open(owner, name)

    def cut(self, key: str, what: str, item: int) -> None:
        """Cut the interval that is open: something happened to an item of a call."""
        if self.over or self._meter is None:
            return
        self._meter.mark()
        self._owners.append(self._owners[-1])
        self._events[len(self._owners) - 1] = (key, what, item)
        if what in (ENDS_EARLY, IS_GONE, LET_GO):
            self._meter.expect_free()

    def expect_ends(self) -> None:
        """Before the next mark of anybody else there are `MOST_ENDS` intervals that results end in, if only empty ones.

        So that steps are alike wherever results end, and however many.
        """
        self._due = MOST_ENDS

    def ends(self, key: str, number: int, *, in_backward: bool) -> None:
        """Something goes that a call has returned: opens an interval, if there is one to be, and else cuts one.

        Args:
            key: Of the call.
            number: What goes; several calls may have returned it, and all of them tell.
            in_backward: Whether a loss lets go of it in its backward, at the same point of every step: then each opens
                one. What goes in the backward of a call cuts that one's.
        """
        if self.ended.get(self.latest) == number:
            return
        if in_backward:
            opens = self._marks[-1].owner == "step" or self._marks[-1].name == END_OF
        else:
            opens = self._due > 0 and threading.get_ident() == self._thread
        if not opens or self._owners[-1] is None:
            self.cut(key, IS_GONE, number)
            return
        self._open_end()
        self.ended[self.latest] = number
        assert self._meter is not None
        self._meter.expect_free()

    def _open_end(self) -> None:
        assert self._meter is not None
        self._due = max(0, self._due - 1)
        before = next(mark for mark in reversed(self._marks) if mark.name != END_OF)
        self._meter.mark()
        self._open(result_at(f"{before.name} {before.owner}"), END_OF)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no part of the step; the interval that was open goes on afterwards."""
        assert self._meter is not None
        interrupted = self._owners[-1]
        self._meter.mark()
        self._aside[len(self._owners)] = self._gradient_bytes()[0]
        self._owners.append(None)
        try:
            yield
        finally:
            self._meter.mark()
            self._owners.append(interrupted)

    def hold(self, owner: object, nbytes: int) -> None:
        """Bytes that no operator returns and that live as long as their owner."""
        assert self._meter is not None
        self._meter.hold(owner, nbytes)

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Name what is older than the start and is to be seen when it goes."""
        assert self._meter is not None
        self._meter.adopt(storages)

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Name what is resident: where it is replaced, the old goes and the new counts in its place."""
        assert self._meter is not None
        self._meter.follow(storages)

    def ask(self, storage: torch.UntypedStorage) -> None:
        """Ask whether a storage is older than the start; `older` tells at the end."""
        assert self._meter is not None
        self._meter.ask(storage)

    @property
    def older(self) -> list[bool]:
        """For each storage that was asked about: whether nothing of it is in the curve."""
        return [] if self._meter is None else self._meter.older

    def stop(self) -> Measured | None:
        """Stop the meter; None if nothing was measured."""
        if self._meter is None:  # it could not be started
            return None
        pieces = self._meter.stop()
        if self._missed or len(pieces) != len(self._owners):
            # Backward ran in another thread, or a profiler of the user's own began inside the step and took the session
            # over.
            return None
        for mark in self.ended:
            first = self._owners.index(mark)
            pieces[first] = pieces[first].after_the_first_went()
        owned: dict[int | None, list[Interval]] = {}
        for owner, piece in zip(self._owners, pieces, strict=True):
            owned.setdefault(owner, []).append(piece)
        intervals = [
            Interval(owned[i][0].level_bytes, max(piece.peak_bytes for piece in owned[i]))
            for i in range(len(self._marks))
        ]
        # Every trace counts what was made since the start; old gradients are accounted for at the marks.
        before = self._marks[0].old_gradient_bytes
        sees_them_go = self.sees_old_frees and not self._gradients_stay
        freed = [before - mark.old_gradient_bytes if sees_them_go else 0 for mark in self._marks]
        unseen = not self.sees_old_frees and not self._gradients_stay
        aside = [pieces[i].peak_bytes + (old - before if unseen else 0) for i, old in self._aside.items()]
        cut, asked = without_asking(
            Piece(
                owner,
                piece.level_bytes,
                piece.peak_bytes,
                self._events.get(index),
                piece.rest_bytes,
                piece.tops_bytes,
            ).beside(freed[owner])
            for index, (owner, piece) in enumerate(zip(self._owners, pieces, strict=True))
            if owner is not None
        )
        return Measured(
            tuple(self._marks),
            tuple([Interval(i.level_bytes + f, i.peak_bytes + f) for i, f in zip(intervals, freed, strict=True)]),
            cut,
            self._meter.allocator,
            before + max(aside, default=0),
            asked,
        )
