"""What a region's lean saves would spare, read off a recorded step: at every mark, and as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain

from lightning_mimose.measure.call import Call, LeanItem, ResultItem
from lightning_mimose.measure.handing import Handing
from lightning_mimose.measure.trace import DIES, GOES, IS_USED, StepTrace
from lightning_mimose.measure.twice import Twice, lowered
from lightning_mimose.predict.maxima import Groups


@dataclass(frozen=True)
class Savings:
    """One grade of lean saves of one region.

    Attributes:
        gain_bytes: What is spared between forward and backward.
        lent_bytes: Of that, what others hold as well for a while, see `lent.Lent`.
        work: What rebuilding costs, in floating-point operations.
        arguments: Storage ids of what the call was given, and has to keep for it.
        tops: Index of a mark in the region's recomputation or backward -> local maxima of its interval.
        alone: The same of its backward where the call is recomputed itself, so that what it returned is not there, and
            no other one's backward has made some of what it saves.
        until_last: Local maxima of its recomputation until the last tensor that it saves, or of all of it.
    """

    gain_bytes: int
    lent_bytes: int
    work: float
    arguments: frozenset[int]
    tops: dict[int, Groups]
    alone: dict[int, Groups]
    until_last: Groups


def savings(
    trace: StepTrace,
    call: Call,
    held: Set[int],
    lent: Set[int],
    grades: int,
    handed: Handing | None = None,
    twice: Twice | None = None,
) -> list[Savings]:
    """What each grade of lean saves would spare.

    Args:
        trace: The recorded step.
        call: A region's call.
        held: Storages that somebody else holds, whatever the region does.
        lent: Those that somebody else holds for a while.
        grades: How many there are.
        handed: What of its result the next call saves: whether or not that one rebuilds it, this one does not.
        twice: What it saves that is there twice in its backward, if there is something.
    """
    items = call.items or ()
    found = []
    last = trace.last_of(call)
    # Of a step's pieces, those in which something happens to it: to look at all of them goes with the square of calls.
    within = chain.from_iterable(trace.pieces_of[call.marks["again"] : last + 1])
    own = sorted({*trace.opened.get(call.key, ()), *within})
    for grade in range(1, grades + 1):
        lean = [0 < item.grade <= grade for item in items]
        if handed is not None and handed.item >= 0:
            lean[handed.item] = False
        taken = [is_lean and item.storage not in held for is_lean, item in zip(lean, items, strict=True)]
        early = frozenset[int]() if handed is None else handed.early(grade)
        found.append(_of_grade(trace, call, last, own, grade, lean, taken, items, lent, early, twice or Twice(call)))
    return found


def rebuilding_bytes(items: Sequence[LeanItem], results: Sequence[ResultItem] = ()) -> int:
    """The most that making one of them again takes, while nothing that is made on the way to it is there.

    Args:
        items: What a call saved.
        results: What it returned.

    Example:
        >>> rebuilding_bytes([LeanItem(1, 8, 1, 0.0, temporary_bytes=4), LeanItem(2, 8, 1, 0.0, also=(0,))])
        20
    """

    def making(*wanted: int) -> int:
        found: set[int] = set()
        waiting = list(wanted)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting.extend(items[number].also)
        return sum(items[i].made_bytes + items[i].temporary_bytes for i in found if items[i].grade)

    of_items = (making(index) for index, item in enumerate(items) if item.grade)
    of_results = (each.nbytes + each.temporary_bytes + making(*each.also) for each in results)
    return max((*of_items, *of_results), default=0)


def _of_grade(
    trace: StepTrace,
    call: Call,
    last: int,
    own: list[int],
    grade: int,
    lean: list[bool],
    taken: list[bool],
    items: tuple[LeanItem, ...],
    lent: Set[int],
    early: Set[int],
    twice: Twice,
) -> Savings:
    key, first, backward = call.key, call.marks["again"], call.marks["again_out"]
    spared: set[int] = set()
    used: set[int] = set()
    gone: set[int] = set()
    deaths: Counter[int] = Counter()
    beside: dict[int, int] = {}  # of what is there again: its other form, which goes with it
    tops: dict[int, list[tuple[int, ...]]] = {}
    alone: dict[int, list[tuple[int, ...]]] = {}
    until_last: list[tuple[int, ...]] = []
    stops = trace.stop_of(call, call)
    stays = {number for _, number in call.twins}  # with a module
    late = [(index, items[index].sources) for index, is_lean in enumerate(lean) if is_lean and items[index].sources]

    def held_for(waiting: Set[int]) -> dict[int, int]:
        """Sources that are gone without recipes, and are there for those of some items."""
        found = (each for index, sources in late if index in waiting for each in sources)
        return {source: size for source, size in found if source in gone and not lean[source]}

    waiting = {index for index, _ in late}
    sources_bytes = early_bytes = 0
    every = {index for index, is_taken in enumerate(taken) if is_taken and items[index].storage not in stays}
    relief = 0
    there, lean_of = twice.there(trace), {items[index].storage: index for index, each in enumerate(lean) if each}
    for at in own:
        piece, following = trace.pieces[at], trace.pieces[at + 1] if at + 1 < len(trace.pieces) else None
        besides = made = 0
        made_now: set[int] = set()
        if piece.event is not None and piece.event[0] == key:
            _, what, index = piece.event
            if what == DIES and taken[index]:
                since = items[index].since[deaths[index] :]
                deaths[index] += 1
                if not since or since[0] <= grade:
                    spared.add(index)
            elif what == IS_USED:
                rebuilt = [index]
                while rebuilt:
                    number = rebuilt.pop()
                    if number not in used and lean[number]:
                        # What somebody else holds is there twice once it is rebuilt.
                        is_there = taken[number] or items[number].storage in there.get(at, ((),))[0]
                        again = 0 if is_there else items[number].gain_bytes
                        besides = max(besides, items[number].temporary_bytes + again)
                        if taken[number]:
                            beside[number] = items[number].held_bytes
                        rebuilt.extend(items[number].also)
                        made_now.add(number)
                    used.add(number)
            elif what == GOES:
                gone.add(index)
            if gone:
                still = held_for(waiting - used)
                sources_bytes = sum(still.values())
                early_bytes = sources_bytes - sum(held_for(waiting - used - early).values()) if early else 0
                # It lets go of them once it is there.
                besides += sum(size for source, size in held_for(made_now).items() if source not in still)
            relief = sum(items[i].gain_bytes for i in spared - used)
        by_itself = relief
        if backward <= piece.mark <= last:
            by_itself = sum(items[i].gain_bytes for i in (every | spared) - used)
            if early:  # rebuilt in the next call's backward already, on the way to what it was handed
                relief = sum(items[i].gain_bytes for i in spared - used - early)
        if following is not None and following.event is not None and following.event[:2] == (key, DIES):
            # Its other form was made already.
            index = following.event[2]
            made = items[index].held_bytes if taken[index] else 0
        if first <= piece.mark <= last:
            here = (*(top + made for top in piece.tops), piece.level_bytes + besides)
            others = sum(beside.values()) + sources_bytes
            less = tuple([top - relief + others - early_bytes for top in here])
            # Of what somebody else holds there is no second one, unless it was rebuilt.
            before, now = (
                sum(twice.sizes[each] for each in numbers if lean_of.get(each) not in used)
                for numbers in there.get(at, ((), ()))
            )
            of_tops = [top + made - relief + others - early_bytes for top in lowered(trace, at, before, now)]
            tops.setdefault(piece.mark, []).append((*of_tops, less[-1] - before))
            if piece.mark >= backward:
                alone.setdefault(piece.mark, []).append(tuple([top - by_itself + others for top in here]))
            elif stops is None or at < stops:
                until_last.append(less)
            elif at == stops:  # it stops when it is told, and what is kept in another form has that by then
                until_last.append((piece.level_bytes + made - relief + others - early_bytes,))
        if piece.event is not None and piece.event[:2] == (key, IS_USED):
            beside.pop(piece.event[2], None)
    kept = [item for item, take in zip(items, taken, strict=True) if take]
    return Savings(
        sum(item.gain_bytes for item in kept),
        sum(item.gain_bytes for item in kept if item.is_cached or item.storage in lent),
        sum(item.work for item, is_lean in zip(items, lean, strict=True) if is_lean),
        frozenset(each for item, is_lean in zip(items, lean, strict=True) if is_lean for each in item.arguments),
        {mark: tuple(groups) for mark, groups in tops.items()},
        {mark: tuple(groups) for mark, groups in alone.items()},
        tuple(until_last),
    )
