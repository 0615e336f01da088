"""A recorded step: its calls, its marks, and the curve between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from lightning_mimose.measure.call import RNG_STATE_BYTES, Call
from lightning_mimose.measure.interval import Allocator, Interval
from lightning_mimose.predict.ample import Spared
from lightning_mimose.predict.maxima import Groups

DIES, IS_USED, GOES, IS_GONE, LET_GO = "dies", "is used", "goes", "is gone", "is let go of"
"""What happens to an item: its forward lets go of it, backward asks for it, it goes. To what a region returned or would
have saved, by the id of its storage: nobody holds it any more. To inputs: nobody but regions does. And to what a
region's recomputation saves, counted from 0: `IS_LAST`. To a region: `IS_OVER`."""
IS_LAST = "is the last"
"""A call in the recomputation saves no more."""
IS_OVER = "is over"
"""Nothing of a region's graph is left."""
IS_ASKED = "is asked"
"""Backward asks for something that a call inside a region has saved, for the first time."""
IS_LATE = "is late"
"""Something goes in forward that a region saves, with a result that nobody wants."""
ENDS_EARLY, ENDS_LATE = "ends early", "ends late"
"""What a region has saved again goes; and the graph lets go of what stands for it, as of itself where it is kept."""


Event: TypeAlias = tuple[str, str, int]
"""What cuts an interval: (key of the call, what happens, to which item or storage)."""


@dataclass(frozen=True)
class Piece:
    """A part of an interval.

    Attributes:
        mark: Index of the mark that opens the interval.
        level_bytes: Live bytes at its start, relative as in `Interval`.
        peak_bytes: Largest bytes in it.
        event: What opens it, if it is not the mark.
        rest_bytes: Largest bytes in it after the first that went, where that is known.
        tops_bytes: Local maxima in it, where they are known.
    """

    mark: int
    level_bytes: int
    peak_bytes: int
    event: Event | None = None
    rest_bytes: int | None = None
    tops_bytes: tuple[int, ...] = ()

    @property
    def tops(self) -> tuple[int, ...]:
        """Local maxima in it, or at least the largest one."""
        return self.tops_bytes or (self.peak_bytes,)

    def followed_by(self, other: Piece) -> Piece:
        """Both as one."""
        known = self.tops_bytes and other.tops_bytes
        # Where it was cut on the way up, there is none.
        before = self.tops_bytes[:-1] if self.tops_bytes[-1:] == (other.level_bytes,) else self.tops_bytes
        return replace(
            self,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            rest_bytes=None if self.rest_bytes is None else max(self.rest_bytes, other.peak_bytes),
            tops_bytes=(*before, *other.tops_bytes) if known else (),
        )

    def beside(self, nbytes: int) -> Piece:
        """The same with so many bytes besides."""
        if not nbytes:
            return self
        return replace(
            self,
            level_bytes=self.level_bytes + nbytes,
            peak_bytes=self.peak_bytes + nbytes,
            rest_bytes=None if self.rest_bytes is None else self.rest_bytes + nbytes,
            tops_bytes=tuple([top + nbytes for top in self.tops_bytes]),
        )


def without_asking(pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], dict[str, tuple[int, int]]]:
    """Put pieces together again that were cut only to see what is there when a call is asked for what it saved.

    Args:
        pieces: All of a step.

    Returns:
        Those that are left; and by a call's key the mark in whose interval that was, and the bytes that were there.
    """
    left: list[Piece] = []
    asked: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        if piece.event is None or piece.event[1] != IS_ASKED:
            left.append(piece)
            continue
        asked[piece.event[0]] = piece.mark, piece.level_bytes
        left[-1] = left[-1].followed_by(piece)  # which the interval's own mark has opened, or another cut
    return tuple(left), asked


@dataclass(frozen=True)
class Mark:
    """One mark on the curve: whose (a call's key, or "step"), which, and the gradients alive at that moment."""

    owner: str
    name: str
    old_gradient_bytes: int
    new_gradient_bytes: int
    reached_gradient_bytes: int = 0
    """Of the older ones, those that backward has added to."""


@dataclass(frozen=True)
class StepTrace:
    """A measured step: its calls, its marks, and the interval that each mark opens.

    Attributes:
        calls: Every unit call, in forward order.
        marks: Every mark, in order of time.
        intervals: As many as `marks`.
        saved_between: Storage ids that operations outside every region saved for backward.
        allocator: What the device's allocator had at most, None where none counts.
        aside_peak_bytes: Largest bytes while something ran that is no part of the step (units being proven).
        passes_apart: Whether a region was recomputed for another pass than the step's own: a second one over the same
            graph, or one in the midst of the forward.
        pieces: The intervals cut at events, in order of time.
        outlived: Storage ids that were there when backward was over.
        let_go: Ids of storages of which it would be seen when only the regions that were given them are left to hold
            them -> the interval in which that happened; `NEVER` if others held them longer.
        asked: Keys of calls inside regions -> the interval in which backward first asked for something that they had
            saved, and what was there then, relative as in `Interval`.
        ended: Interval -> the storage that goes when it begins: a region, or a call inside it, had returned it, and
            the region would have saved it.
    """

    calls: tuple[Call, ...]
    marks: tuple[Mark, ...]
    intervals: tuple[Interval, ...]
    saved_between: frozenset[int] = frozenset()
    allocator: Allocator | None = None
    aside_peak_bytes: int = 0
    passes_apart: bool = False
    pieces: tuple[Piece, ...] = ()
    outlived: frozenset[int] = frozenset()
    let_go: Mapping[int, int] = field(default_factory=dict)
    asked: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ended: Mapping[int, int] = field(default_factory=dict)

    @property
    def left_bytes(self) -> int:
        """What is there at its end besides gradients: what a module keeps, or the step returns."""
        return self.intervals[-1].level_bytes - self.marks[-1].new_gradient_bytes

    @property
    def random_state_bytes(self) -> int:
        """What of a region's random state is seen: it is in the host's memory."""
        return RNG_STATE_BYTES if self.allocator is None else 0

    @cached_property
    def tops(self) -> list[Groups]:
        """Local maxima of every interval, of each of its pieces."""
        return [
            tuple([self.pieces[index].tops for index in indices]) or ((interval.peak_bytes,),)
            for indices, interval in zip(self.pieces_of, self.intervals, strict=True)
        ]

    @cached_property
    def by_key(self) -> dict[str, Call]:
        """Every call, by its key."""
        return {call.key: call for call in self.calls}

    @cached_property
    def pieces_of(self) -> list[list[int]]:
        """Of every interval, the indices of its pieces."""
        found: list[list[int]] = [[] for _ in self.marks]
        for index, piece in enumerate(self.pieces):
            found[piece.mark].append(index)
        return found

    def over(self, call: Call) -> int | None:
        """Index of the piece that is opened by the end of a region in backward, if that cuts an interval: `dropped`."""
        return self.ends.get((call.key, IS_OVER, 0))

    def stop_of(self, call: Call, region: Call) -> int | None:
        """Index of the piece in which a recomputation stops, for a call has saved its last tensor; None if not known.

        Args:
            call: The call.
            region: The one that was recomputed: itself, or around it.
        """
        # What is idle stays to the end, in this step and others that look at the graph, and in no column besides.
        if call.last_pack < 0 or region.idle:
            return None
        return self.ends.get((region.key, IS_LAST, call.last_pack - region.first_pack))

    def last_of(self, call: Call) -> int:
        """The last interval of a region's backward: as long as marks are its own, or of what is nested in it."""
        last = call.marks["again_out"]
        while last + 1 < len(self.marks):
            owner = self.by_key.get(self.marks[last + 1].owner)
            if owner is None or not owner.within(call):
                break
            last += 1
        return last

    @cached_property
    def opened(self) -> dict[str, list[int]]:
        """Keys of calls -> the indices of pieces that are opened by what happens to theirs."""
        found: dict[str, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            if piece.event is not None:
                found.setdefault(piece.event[0], []).append(index)
        return found

    @cached_property
    def ends(self) -> dict[Event, int]:
        """Ends of regions, and of what they return or save again, that cut an interval -> the piece that each opens."""
        opened = ((piece.event, index) for index, piece in enumerate(self.pieces))
        return {
            event: index for event, index in opened if event is not None and event[1] in (IS_GONE, IS_LAST, IS_OVER)
        }

    def reached_without(self, index: int) -> int:
        """Largest bytes in a piece after what opens it has gone: it is told right before, and is there at its start.

        Where no meter has seen that, what is left at the piece's end is all that is known of it.
        """
        piece = self.pieces[index]
        if piece.rest_bytes is not None:
            return piece.rest_bytes
        if piece.peak_bytes > piece.level_bytes or index + 1 == len(self.pieces):
            return piece.peak_bytes
        return self.pieces[index + 1].level_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest bytes above what is resident besides gradients."""
        peaks = [
            mark.old_gradient_bytes + interval.peak_bytes
            for mark, interval in zip(self.marks, self.intervals, strict=True)
        ]
        return max(peaks, default=0)

    @property
    def spared(self) -> dict[str, Spared]:
        """The units that were recomputed, and what that has spared and cost, over all calls."""
        saved: dict[str, dict[int, int]] = {}
        seconds: dict[str, float] = {}
        for call in self.calls:
            region = call.region
            if region is not None:
                saved.setdefault(region.unit, {}).update(call.saved)
                seconds[region.unit] = seconds.get(region.unit, 0.0) + (call.seconds if call is region else 0.0)
        return {unit: Spared(sum(sizes.values()), seconds[unit]) for unit, sizes in saved.items()}

    @property
    def kept_bytes(self) -> int:
        """No less than the step would have taken had everything been kept."""
        saved = {number: size for call in self.calls for number, size in call.saved.items()}
        return self.peak_bytes + sum(saved.values())
