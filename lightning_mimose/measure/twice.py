"""What is there in a region's backward only once it has run again, or only where it is kept.

What it returned and saves, and somebody holds all the time (a module, for plots, or the unit itself), is there twice
once the region has run again; where it is kept, it is what the other one holds. What its graph holds for longer than
is used (see `longer`) is there for so long only where it is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.trace import ENDS_EARLY, ENDS_LATE, IS_GONE, Piece, StepTrace
from lightning_mimose.predict.maxima import Groups
from lightning_mimose.predict.shapes import NEVER


@dataclass(frozen=True)
class Twice:
    """Of one region.

    Attributes:
        call: The region's.
        sizes: Storage id, in the recomputation -> bytes of what is there twice when that is over. Or its complement ->
            bytes, below zero, of what goes although it would be there where the region is kept.
        given: The same -> its storage id in forward.
        last: The last interval of the region's backward.
    """

    call: Call
    sizes: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    last: int = -1

    @classmethod
    def of(cls, trace: StepTrace, call: Call, members: Iterable[Call], saved: Mapping[int, int]) -> Twice:
        """Look for it.

        Args:
            trace: The recorded step.
            call: A region's that was recomputed.
            members: It, and the calls inside.
            saved: Storage id -> bytes of what it saves.
        """
        members = list(members)
        gone: dict[int, int] = {}
        for each in members:
            for number, at in each.gone.items():
                gone[number] = min(at, gone.get(number, NEVER))
        over = call.marks["again_out"]
        given = {
            kept: number
            for each in members
            for number, kept in each.pairs
            if kept != number and kept in saved and number in each.held and gone.get(number, NEVER) >= over
        }
        sizes = {kept: saved[kept] for kept in given} | {~number: -size for number, size in call.longer.items()}
        return cls(call, sizes, given, trace.last_of(call))

    def there(self, trace: StepTrace) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
        """Index of a piece of the region's backward -> which of `sizes` count at its start, and after what opens it."""
        found: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        now = frozenset(self.given)
        for mark in range(self.call.marks["again_out"], self.last + 1) if self.sizes else ():
            for at in trace.pieces_of[mark]:
                before, event = now, trace.pieces[at].event
                if event is not None and event[0] == self.call.key:
                    _, what, number = event
                    if what == IS_GONE:
                        now = frozenset(each for each in now if number not in (each, self.given.get(each)))
                    elif what in (ENDS_EARLY, ENDS_LATE):
                        now = now | {~number} if what == ENDS_EARLY else now - {~number}
                found[at] = before, now
        return found

    def concerns(self, own: Mapping[int, int]) -> bool:
        """Whether some of it is among what a call saved."""
        return any(each in own or ~each in own for each in self.sizes)

    def bytes_at(self, trace: StepTrace, mark: int, own: Mapping[int, int]) -> int:
        """What is there besides when a call inside is first asked for what it saved.

        Args:
            trace: The recorded step.
            mark: In whose interval that is.
            own: What the call saved: until then nothing of it goes.
        """
        pieces = trace.pieces_of[mark]
        there = self.there(trace)
        if not pieces or pieces[0] not in there:
            return 0
        alive = there[pieces[-1]][1] | (there[pieces[0]][0] & own.keys())
        return sum(self.sizes[number] for number in alive)

    def once(self, trace: StepTrace, again: Collection[int] = ()) -> dict[int, Groups]:
        """Index of an interval of the region's backward -> its local maxima, had the region been kept.

        Args:
            trace: The recorded step.
            again: Storage ids of what a call inside saves, if that had run again all the same.
        """
        found: dict[int, list[tuple[int, ...]]] = {}
        for at, (before, now) in self.there(trace).items():
            first, then = (
                sum(self.sizes[each] for each in numbers if each not in again and ~each not in again)
                for numbers in (before, now)
            )
            found.setdefault(trace.pieces[at].mark, []).append(lowered(trace, at, first, then))
        return {mark: tuple(groups) for mark, groups in found.items()}


def lowered(trace: StepTrace, index: int, before: int, now: int) -> tuple[int, ...]:
    """Local maxima of a piece without some bytes of its start, and others after what opens it."""
    piece: Piece = trace.pieces[index]
    if before == now:
        return tuple([top - now for top in piece.tops])
    if not piece.tops_bytes:
        return (max(piece.level_bytes - before, trace.reached_without(index) - now),)
    first, *others = piece.tops_bytes
    return (first - (before if first == piece.level_bytes else now), *(top - now for top in others))
