"""Inputs that calls are given and do not save, read off a recorded step: a mask, a table, a residual stream.

Were every call kept, nothing would hold them in backward; a call that runs again has to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.trace import LET_GO, StepTrace
from lightning_mimose.predict.shapes import NEVER, LooseShape


def loose_inputs(trace: StepTrace) -> dict[int, tuple[int, list[Call]]]:
    """Storage id -> bytes, and the calls that it was given to."""
    held = set(trace.saved_between)
    for call in trace.calls:
        held |= call.saved.keys()
    for call in trace.calls:
        # An operation that saves its own result holds what the call returned.
        held |= {given for given, kept in call.pairs if kept in held}
    found: dict[int, tuple[int, list[Call]]] = {}
    for call in trace.calls:
        if "backward" in call.marks:
            for number, size in call.inputs.items():
                if number not in held:
                    found.setdefault(number, (size, []))[1].append(call)
    return found


def held_to_ends(
    trace: StepTrace, inputs: Mapping[int, tuple[int, Sequence[Call]]], region_of: Mapping[int, Call]
) -> tuple[StepTrace, dict[int, int]]:
    """The step as if the last region to hold one of them did so to the end of the interval in which that is over.

    So that it can be taken off the whole interval.

    Args:
        trace: The recorded step.
        inputs: See `loose_inputs`.
        region_of: Identity of a call -> the region that it is in.

    Returns:
        That step; and storage id -> that interval.
    """
    besides, until = [0] * len(trace.pieces), dict[int, int]()
    for number, (size, calls) in inputs.items():
        if number in trace.outlived or trace.let_go.get(number) == NEVER:
            continue
        regions = _regions_among(calls, region_of)
        over, last = max(((at, call) for call in regions if (at := trace.over(call)) is not None), default=(-1, None))
        if last is None or any(call.held_until >= last.marks["dropped"] for call in regions if call is not last):
            continue
        until[number] = last.marks["dropped"]
        for index in range(over, trace.pieces_of[until[number]][-1] + 1):
            besides[index] += size
    pieces = [piece.beside(nbytes) for piece, nbytes in zip(trace.pieces, besides, strict=True)]
    return (replace(trace, pieces=tuple(pieces)) if until else trace), until


def _regions_among(calls: Sequence[Call], region_of: Mapping[int, Call]) -> list[Call]:
    """Those that ran again themselves."""
    return [call for call in calls if call is region_of[id(call)] and "again" in call.marks]


def _given(trace: StepTrace, index: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Storage id -> indices of all calls that were given it."""
    found: dict[int, list[int]] = {}
    for call in trace.calls:
        for number in call.inputs:
            found.setdefault(number, []).append(index[id(call)])
    return {number: tuple(calls) for number, calls in found.items()}


def loose_shapes(
    trace: StepTrace,
    inputs: Mapping[int, tuple[int, Sequence[Call]]],
    region_of: Mapping[int, Call],
    order: Sequence[int],
    pieces: Sequence[int],
    until: Mapping[int, int],
    add: Callable[[float], int],
) -> tuple[LooseShape, ...]:
    """What becomes of them.

    Args:
        trace: The recorded step.
        inputs: See `loose_inputs`.
        region_of: Identity of a call -> the region that it is in.
        order: Identities of all calls.
        pieces: Peaks of the trace's pieces, see `endings`.
        until: Until when they are there, of those of which that was seen, see `held_to_ends`.
        add: Adds a column, and returns its index.
    """
    index = {identity: i for i, identity in enumerate(order)}
    ends = endings(trace, {number: size for number, (size, _) in inputs.items()}, pieces)
    given = _given(trace, index)
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, to in given.items():
        alike.setdefault(to, []).append(number)
    found = []
    for number, (size, calls) in inputs.items():
        regions = _regions_among(calls, region_of)
        let_go = trace.let_go.get(number)
        holders = sorted(calls, key=lambda call: -call.marks["backward"])
        found.append(
            LooseShape(
                size=add(size),
                holders=tuple(index[id(call)] for call in holders),
                until_time=max((call.marks["backward"] for call in regions), default=-1),
                lasts_until=until.get(number, max((call.held_until for call in regions), default=-1)),
                since_time=None if let_go is None else min(let_go + 1, NEVER),
                ending=add(ends.get(number, 0)),
                outlives=number in trace.outlived,
                given=given[number],
                rank=alike[given[number]].index(number),
                alike=len(alike[given[number]]),
            )
        )
    return tuple(found)


def endings(trace: StepTrace, sizes: Mapping[int, int], pieces: Sequence[int]) -> dict[int, int]:
    """By how much intervals would be lower if regions did not hold what others let go of within them.

    Nothing, if memory was highest before; the whole size, if it is after that, too.

    Args:
        trace: The recorded step.
        sizes: Storage id -> bytes of what regions hold.
        pieces: Peaks of the trace's pieces, as they would be had every region been kept: where what one of them saves
            is gone before, since it ran again, memory was highest at another moment than it would be.

    Returns:
        Storage id -> bytes, for those of which the moment is known; together, in the order of these.
    """
    cuts: dict[int, list[tuple[int, int]]] = {}
    peaks: dict[int, list[int]] = {}  # of the pieces of every interval
    for piece, peak in zip(trace.pieces, pieces, strict=True):
        within = peaks.setdefault(piece.mark, [])
        if piece.event is not None and piece.event[1] == LET_GO and piece.event[2] in sizes:
            cuts.setdefault(piece.mark, []).append((len(within), piece.event[2]))
        within.append(peak)
    found = {}
    for mark, ends in cuts.items():
        within = peaks[mark]
        for begin, number in ends:
            before = max(within)
            within[begin:] = [peak - sizes[number] for peak in within[begin:]]
            found[number] = before - max(within)
    return found
