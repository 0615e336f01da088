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


def bytes_in(late: Iterable[Late], mark: int) -> int:
    """What goes in the midst of an interval.

    Example:
        >>> bytes_in([Late(4, 100, True), Late(4, 10, False), Late(5, 1, True)], 4)
        100
    """
    return sum(each.nbytes for each in late if each.cuts and each.went == mark)


def tops_kept(trace: StepTrace, late: Mapping[str, Iterable[Late]]) -> dict[int, Groups]:
    """Index of an interval that is cut where something goes -> its local maxima, had regions been kept.

    Args:
        trace: The recorded step.
        late: Key of a region -> what of it goes.
    """
    there: dict[int, dict[str, int]] = {}
    for key, parts in late.items():
        for went, nbytes, cuts, _ in parts:
            if cuts:
                there.setdefault(went, {}).setdefault(key, 0)
                there[went][key] += nbytes
    found: dict[int, Groups] = {}
    for mark, nbytes_of in there.items():
        groups = []
        # It goes bit by bit, and maybe at several moments: all of it counts until the last of it has gone.
        events = ((at, trace.pieces[at].event) for at in trace.pieces_of[mark])
        last = {event[0]: at for at, event in events if event is not None and event[1] == IS_LATE}
        ends = {at: key for key, at in last.items()}
        for at in trace.pieces_of[mark]:
            before = sum(nbytes_of.values())
            if at in ends:
                nbytes_of.pop(ends[at], None)
            groups.append(lowered(trace, at, -before, -sum(nbytes_of.values())))
        found[mark] = tuple(groups)
    return found


def _is_cut(trace: StepTrace, mark: int, region: Call) -> bool:
    """Whether an interval between regions is cut where something of one goes.

    Inside of regions other intervals are looked at in place of those of the forward.
    """
    owner = trace.by_key.get(trace.marks[mark].owner)
    if owner is not None and not (owner.region is owner and trace.marks[mark].name == "out"):
        return False
    events = (trace.pieces[at].event for at in trace.pieces_of[mark])
    return any(event is not None and event[:2] == (region.key, IS_LATE) for event in events)
