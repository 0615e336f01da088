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
    """

    went: int
    nbytes: int
    cuts: bool

    @property
    def until(self) -> int:
        """The first interval in which it is not there throughout."""
        return self.went if self.cuts else self.went + 1


def late_of(trace: StepTrace, region: Call, members: Iterable[Call], there: Collection[int]) -> tuple[Late, ...]:
    """What of a region goes in forward, the first first.

    Args:
        trace: The recorded step.
        region: The region's call.
        members: It, or a call inside, and the calls inside that.
        there: Storages that are there for another reason.
    """
    went: dict[int, tuple[int, int]] = {}
    for at, number, size in (each for call in members for each in call.late):
        if number not in there:
            went[number] = max((at, size), went.get(number, (-1, 0)))
    total: dict[int, int] = {}
    for at, size in went.values():
        total[at] = total.get(at, 0) + size
    return tuple(Late(at, total[at], _cut_of(trace, at, region) is not None) for at in sorted(total))


def bytes_in(late: Iterable[Late], mark: int) -> int:
    """What goes in the midst of an interval.

    Example:
        >>> bytes_in([Late(4, 100, True), Late(4, 10, False), Late(5, 1, True)], 4)
        100
    """
    return sum(nbytes for went, nbytes, cuts in late if cuts and went == mark)


def tops_kept(trace: StepTrace, late: Mapping[str, Iterable[Late]]) -> dict[int, Groups]:
    """Index of an interval that is cut where something goes -> its local maxima, had regions been kept.

    Args:
        trace: The recorded step.
        late: Key of a region -> what of it goes.
    """
    there: dict[int, dict[str, int]] = {}
    for key, parts in late.items():
        for went, nbytes, cuts in parts:
            if cuts:
                there.setdefault(went, {})[key] = nbytes
    found: dict[int, Groups] = {}
    for mark, nbytes_of in there.items():
        groups = []
        for at in trace.pieces_of[mark]:
            before, event = sum(nbytes_of.values()), trace.pieces[at].event
            if event is not None and event[1] == IS_LATE:
                nbytes_of.pop(event[0], None)
            groups.append(lowered(trace, at, -before, -sum(nbytes_of.values())))
        found[mark] = tuple(groups)
    return found


def _cut_of(trace: StepTrace, mark: int, region: Call) -> int | None:
    """Index of the piece that begins where something of a region goes, in an interval between regions.

    Inside of regions other intervals are looked at in place of those of the forward.
    """
    owner = trace.by_key.get(trace.marks[mark].owner)
    if owner is not None and not (owner.region is owner and trace.marks[mark].name == "out"):
        return None
    events = ((at, trace.pieces[at].event) for at in trace.pieces_of[mark])
    return next((at for at, event in events if event is not None and event[:2] == (region.key, IS_LATE)), None)
