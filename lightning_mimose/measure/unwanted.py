"""What a region saves and goes in forward all the same, with a result that nobody wants.

Where the region is kept that is there until the result goes, in the midst of some interval; where it is recomputed, no
part of it ever is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.trace import IS_LATE, StepTrace
from lightning_mimose.measure.twice import lowered
from lightning_mimose.predict.maxima import Groups


class Late(NamedTuple):
    """What of a region goes in one interval.

    Attributes:
        went: That interval.
        nbytes: What goes in it.
        cuts: Whether what is there before and afterwards is told apart; if not, it counts in all of the interval.
        since: The interval from which on nobody else holds it.
    """

    went: int
    nbytes: int
    cuts: bool
    since: int = 0

    @property
    def until(self) -> int:
        """The first interval in which it is not there throughout."""
        return self.went if self.cuts else self.went + 1


def late_of(
    trace: StepTrace, region: Call, members: Iterable[Call], there: Collection[int], returned: Mapping[int, int]
) -> tuple[Late, ...]:
    """What of a region goes in forward, the first first.

    Args:
        trace: The recorded step.
        region: The region's call.
        members: It, or a call inside, and the calls inside that.
        there: Storages that are there for another reason.
        returned: Those that the region has returned, too -> the interval in which whoever was given them let go.
    """
    went: dict[int, tuple[int, int]] = {}
    for at, number, size in (each for call in members for each in call.late):
        if number not in there and returned.get(number, 0) <= at:
            went[number] = max((at, size), went.get(number, (-1, 0)))
    total: dict[tuple[int, int], int] = {}
    for number, (at, size) in went.items():
        slot = at, returned.get(number, 0)
        total[slot] = total.get(slot, 0) + size
    return tuple(Late(at, total[at, since], _is_cut(trace, at, region), since) for at, since in sorted(total))


def cut_by(late: Mapping[str, Iterable[Late]]) -> dict[int, dict[str, int]]:
    """Index of an interval that is cut where something goes -> key of a region -> what of it goes there.

    Args:
        late: Key of a region -> what of it goes.

    Example:
        >>> cut_by({"a": [Late(4, 100, True), Late(4, 20, True, 3), Late(4, 10, False)], "b": [Late(5, 1, True)]})
        {4: {'a': 120}, 5: {'b': 1}}
    """
    found: dict[int, dict[str, int]] = {}
    for key, parts in late.items():
        for each in parts:
            if each.cuts:
                here = found.setdefault(each.went, {})
                here[key] = here.get(key, 0) + each.nbytes
    return found


def tops_kept(trace: StepTrace, mark: int, nbytes_of: Mapping[str, int]) -> Groups:
    """Local maxima of an interval that is cut where something goes, had regions been kept.

    It goes bit by bit, and maybe at several moments: all of it counts until the last of it has gone.

    Args:
        trace: The recorded step.
        mark: Index of the interval.
        nbytes_of: Key of a region -> what of it goes there.
    """
    there, groups = dict(nbytes_of), []
    events = ((at, trace.pieces[at].event) for at in trace.pieces_of[mark])
    last = {event[0]: at for at, event in events if event is not None and event[1] == IS_LATE}
    ends = {at: key for key, at in last.items()}
    for at in trace.pieces_of[mark]:
        before = sum(there.values())
        if at in ends:
            there.pop(ends[at], None)
        groups.append(lowered(trace, at, -before, -sum(there.values())))
    return tuple(groups)


def _is_cut(trace: StepTrace, mark: int, region: Call) -> bool:
    """Whether an interval between regions is cut where something of one goes.

    Inside of regions other intervals are looked at in place of those of the forward.
    """
    owner = trace.by_key.get(trace.marks[mark].owner)
    if owner is not None and not (owner.region is owner and trace.marks[mark].name == "out"):
        return False
    events = (trace.pieces[at].event for at in trace.pieces_of[mark])
    return any(event is not None and event[:2] == (region.key, IS_LATE) for event in events)
