"""What a call saves that others hold as well for a while: whoever was handed its result, and autocast's cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.trace import IS_GONE, Event, StepTrace
from lightning_mimose.measure.unwanted import Late
from lightning_mimose.menu import RECOMPUTE
from lightning_mimose.predict.shapes import END_OF, NEVER


class SavedBy(NamedTuple):
    """What recomputing a call would free.

    Attributes:
        nbytes: Of the storages that only it saves, less the random state and copies of other state that it would hold;
            negative where it saves next to nothing: cut off at zero, it would follow no polynomial in sizes on both
            sides of that.
        only: Storage id -> bytes of these.
        storages: Storage id -> bytes of all that it saves.
        held: Storages that somebody else holds.
        inside: The calls nested in it.
        late: What goes in forward with a result that nobody wants, see `unwanted`.
    """

    nbytes: int
    only: dict[int, int]
    storages: dict[int, int]
    held: set[int]
    inside: tuple[Call, ...] = ()
    late: tuple[Late, ...] = ()


class Lent(NamedTuple):
    """A part of what a call saves that is alive whether the call keeps it or not.

    Attributes:
        may_be: Whether there can be such a part, in any step of this shape.
        nbytes: Of it.
        until: The first interval from which on it is the call's alone.
        storages: Those of them that the call returned; the others are casts.
        ends: What cuts the last interval before `until` at each moment at which some of it ends, in order of time, and
            the bytes that end there; none where all of it lasts as long as that.
    """

    may_be: bool
    nbytes: int
    until: int
    storages: frozenset[int]
    ends: tuple[tuple[Event, int], ...] = ()


def lent(trace: StepTrace, call: Call, saved: SavedBy) -> Lent:
    """What of a call's saved storages somebody else holds.

    A block that returns its attention's probabilities besides its result saves them as well. Recomputed, it does not
    save them in forward, but whoever was handed them holds them, until the next block's are handed over, say: to count
    them as saved beside what is alive would be to count them twice. So it is with what a hook inside the block took,
    and what a loss holds until its own backward.

    Args:
        trace: The recorded step.
        call: A call.
        saved: What it saves.
    """
    calls = (call, *saved.inside)
    pairs = [(given, kept, each.gone.get(given)) for each in calls for given, kept in each.pairs]
    may_be = call.cached_bytes > 0 or any(kept in saved.storages for _, kept, _ in pairs)
    # What went in its own forward nobody else held, and what goes in its own backward counts as its own.
    first, last = call.marks.get("out", -1), call.marks.get("backward", NEVER)
    gone = {given: at for given, _, at in pairs if at is not None and first <= at < last}
    returned = {kept: given for given, kept, _ in pairs if kept in saved.only and given in gone}
    late = {kept: given for kept, given in returned.items() if any(given in each.held for each in calls)}
    # Those that are there when backward begins, or until shortly before: that is where steps are highest.
    returned = late or _ending_last(trace, returned, gone)
    if not returned or call.cached_bytes:
        # Both at once end at different times; casts are more.
        return Lent(may_be, min(call.cached_bytes, max(0, saved.nbytes)), call.cached_until, frozenset())
    nbytes = min(sum(saved.only[kept] for kept in returned), max(0, saved.nbytes))
    until = min(gone[given] for given in returned.values())
    if trace.ended.get(until) in returned.values():
        # It goes when that interval begins; what else of it is there for a part of that is counted as spared in it.
        return Lent(may_be, nbytes, until, frozenset(returned))
    if call.action != RECOMPUTE:
        # Within a region nothing is cut: it is there for a part of that interval, and so is spared in none of it.
        return Lent(may_be, nbytes, until + 1, frozenset(returned))
    found = Lent(may_be, nbytes, until, frozenset(returned))
    sizes: dict[Event, int] = {(call.key, IS_GONE, given): saved.only[kept] for kept, given in returned.items()}
    ends, left = list[tuple[Event, int]](), nbytes
    for event in sorted(sizes.keys() & trace.ends.keys(), key=trace.ends.__getitem__):
        if trace.pieces[trace.ends[event]].mark == until:
            ends.append((event, min(sizes[event], left)))
            left -= ends[-1][1]
    return found._replace(until=until + 1, ends=tuple(ends)) if ends else found


def _ending_last(trace: StepTrace, returned: Mapping[int, int], gone: Mapping[int, int]) -> dict[int, int]:
    """Of what a call returned, what ends last: after the same mark, but for those that only tell of ends."""

    def ends_after(given: int) -> int:
        mark = gone[given]
        while trace.marks[mark].name == END_OF:
            mark -= 1
        return mark

    last = max(map(ends_after, returned.values()), default=0)
    return {kept: given for kept, given in returned.items() if ends_after(given) == last}


def pieces_beside(trace: StepTrace, lends: Iterable[Lent]) -> list[int]:
    """Peaks of all pieces, as if everything lent that ends in an interval were there to the interval's end.

    So that it can be taken off the whole interval; relative as in `Interval`.
    """
    ends = dict(end for each in lends for end in each.ends)
    gone: dict[int, int] = {}
    peaks = []
    for index, piece in enumerate(trace.pieces):
        before = gone.get(piece.mark, 0)
        peak = piece.peak_bytes + before
        if piece.event in ends:
            gone[piece.mark] = before + ends[piece.event]
            peak = max(piece.level_bytes + before, trace.reached_without(index) + gone[piece.mark])
        peaks.append(peak)
    return peaks


def peaks_beside(trace: StepTrace, lends: Sequence[Lent], pieces: Sequence[int]) -> dict[int, int]:
    """Peaks of the intervals in which something lent ends: of their pieces, see `pieces_beside`."""
    ends = {event for each in lends for event, _ in each.ends}
    marks = {piece.mark for piece in trace.pieces if piece.event in ends}
    peaks: dict[int, int] = {}
    for piece, peak in zip(trace.pieces, pieces, strict=True):
        if piece.mark in marks:
            peaks[piece.mark] = max(peaks.get(piece.mark, peak), peak)
    return peaks
