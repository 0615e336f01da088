"""Regions, calls that were recomputed whole: what is in one, what recomputing it frees, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.lent import Lent, SavedBy
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.measure.unwanted import late_of
from lightning_mimose.menu import RECOMPUTE
from lightning_mimose.predict.shapes import NEVER


def region_around(call: Call) -> Call:
    """The outermost call around it that was recomputed; the outermost of all if none was."""
    around = [call]
    while around[-1].parent is not None:
        around.append(around[-1].parent)
    return next((outer for outer in reversed(around) if outer.action == RECOMPUTE), around[-1])


def held_until(trace: StepTrace, region_of: Mapping[int, Call]) -> dict[int, int]:
    """Until when recomputed calls hold what they are given: regions do so themselves, parts go with theirs."""
    found = {
        id(call): call.held_until if trace.over(call) is None else max(call.held_until, call.marks["dropped"])
        for call in trace.calls
    }
    for call in trace.calls:
        around = call.parent
        while around is not None and around is not region_of[id(call)]:
            found[id(around)] = max(found[id(around)], call.held_until)
            around = around.parent
    return found


def saved_by(
    trace: StepTrace, region_of: Mapping[int, Call], holding: Mapping[int, int], state_bytes: int
) -> dict[int, SavedBy]:
    """What recomputing each call would free, by its identity."""
    members: dict[int, list[Call]] = {}
    given_to: dict[int, list[Call]] = {}
    calls = trace.calls
    for call in calls:
        members.setdefault(id(region_of[id(call)]), []).append(call)
        for number in call.inputs:
            given_to.setdefault(number, []).append(region_of[id(call)])
    found = {}
    for call in calls:
        region = region_of[id(call)]
        family = members[id(region)]
        inside = [c for c in family if c.within(call)]
        held = set(call.inputs)
        for other in family:
            if not other.within(call):
                held |= other.saved.keys()
                if not call.within(other):
                    held |= other.inputs.keys()
        # Somebody holds it until the region runs again; or another one that is over right before it begins to.
        begins, again = region.marks.get("backward", NEVER), region.marks.get("again", NEVER)
        for given, kept in ((given, kept) for other in family for given, kept in other.pairs if given in other.held):
            gone = min((other.gone[given] for other in family if given in other.gone), default=NEVER)
            others = (each for each in given_to.get(given, ()) if each is not region and each.action == RECOMPUTE)
            if gone >= again or any(holding[id(each)] >= begins - 1 for each in others):
                held.add(kept)
        mine: dict[int, int] = {}
        for c in inside:
            mine.update(c.saved)
        only = {number: size for number, size in mine.items() if number not in held}
        # What the region returned is there as long as somebody has that.
        returned = {kept: region.gone.get(given, NEVER) for given, kept in region.pairs}
        found[id(call)] = SavedBy(
            sum(only.values()) - state_bytes - call.stashed_bytes,
            only,
            mine,
            held,
            tuple(c for c in inside if c is not call),
            late_of(trace, region, inside, mine.keys() | held, returned),
        )
    return found


def dropped_per_interval(
    regions: Iterable[Call], by_call: Mapping[int, SavedBy], lends: Mapping[int, Lent], count: int
) -> NDArray[np.int64]:
    """Bytes that would be alive besides at each mark had every region been kept; less, where they save next to none."""
    dropped = np.zeros(count, dtype=np.int64)
    for call in regions:
        out, end = call.marks["out"], call.marks.get("again", call.marks.get("dropped", NEVER) + 1)
        dropped[out:end] += by_call[id(call)].nbytes
        dropped[out : min(end, lends[id(call)].until)] -= lends[id(call)].nbytes
        for each in by_call[id(call)].late:
            dropped[max(out, each.since) : min(end, each.until)] += each.nbytes
    return dropped
