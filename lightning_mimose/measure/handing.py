"""Results that a region returns and the next one saves, and that could be rebuilt from what the first one saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_mimose.measure.call import Call, ResultItem
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.predict.handing import NO_GRADE, HandingShape, limits
from lightning_mimose.predict.shapes import NEVER


@dataclass(frozen=True)
class Handing:
    """One such result.

    Attributes:
        call: The region that returns it.
        taker: The region that saves it.
        place: Which of the storages that the region returns it is, from 0.
        nbytes: Its bytes.
        result: What was found out when the first one ran again; None if nothing rebuilds it.
        needs: (index of another, number of the grade from which on that is needed for it).
        limit: Up to which grade it is handed on, see `predict.handing.limits`.
        since_time: From when on nobody else holds it, `NEVER` if that was not seen.
    """

    call: Call
    taker: Call
    place: int
    nbytes: int
    result: ResultItem | None
    needs: tuple[tuple[int, int], ...]
    limit: int
    since_time: int

    def early(self, grade: int) -> frozenset[int]:
        """Items of the call that are rebuilt before its own backward, if it is handed on in a grade."""
        return self.on_the_way(grade) if self.grade <= grade <= self.limit else frozenset()

    @property
    def grade(self) -> int:
        """The least grade that has it."""
        return NO_GRADE if self.result is None else self.result.grade

    @property
    def item(self) -> int:
        """Its own index among the items of the call; -1 where it is none."""
        return -1 if self.result is None else self.result.item

    def on_the_way(self, grade: int) -> frozenset[int]:
        """Items that are rebuilt on the way to it in a grade, and stay."""
        items = self.call.items or ()
        found: set[int] = set()
        waiting = [] if self.result is None else list(self.result.also)
        while waiting:
            index = waiting.pop()
            if 0 < items[index].grade <= grade and index not in found and index != self.item:
                found.add(index)
                waiting.extend(items[index].also)
        return frozenset(found)

    def also_bytes(self, grade: int) -> int:
        """Bytes of these."""
        return sum((self.call.items or ())[index].made_bytes for index in self.on_the_way(grade))

    def temporary_bytes(self, grade: int) -> int:
        """What lives besides while it is rebuilt."""
        items, own = self.call.items or (), 0 if self.result is None else self.result.temporary_bytes
        return max(own, *(items[i].temporary_bytes for i in self.on_the_way(grade)), 0)


def handings(trace: StepTrace, region_of: Mapping[int, Call]) -> list[Handing]:
    """Find them, in order of the forward.

    It has to be given to one region alone, which saves it, and to be returned by no other, and the only such result of
    its unit; each of the two units is called once in the step.

    Args:
        trace: The recorded step.
        region_of: Identity of a call -> the region that it is in.
    """
    given: dict[int, set[int]] = {}
    saved: dict[int, set[int]] = {}
    returned: dict[int, set[int]] = {}
    for call in trace.calls:
        region = id(region_of[id(call)])
        for numbers, by in ((call.inputs, given), (call.saved, saved), (call.returned, returned)):
            for number in numbers:
                by.setdefault(number, set()).add(region)
    regions = {id(c): c for c in trace.calls if c is region_of[id(c)] and {"again", "backward"} <= c.marks.keys()}
    calls = Counter(call.unit for call in trace.calls)
    results: list[tuple[Call, Call, int, ResultItem | None]] = []
    for call in regions.values():
        known = {result.storage: result for result in call.results}
        for storage, twin in dict(zip(call.returned, call.outputs, strict=False)).items():
            if call.items is None or storage in trace.saved_between or returned[storage] != {id(call)}:
                continue
            users = given.get(storage, set())
            taker = regions.get(next(iter(users))) if len(users) == 1 else None
            if taker is None or taker is call or taker.items is None:  # it was not looked at: compiled code is not
                continue
            if saved.get(storage) != users or storage not in taker.inputs:
                continue
            if calls[call.unit] == calls[taker.unit] == 1:
                result = known.get(twin)
                if result is not None and taker.versions.get(storage) != result.version:
                    result = None  # it is another one by the time that it is saved
                results.append((call, taker, storage, result))
    several = Counter(call.unit for call, *_ in results)
    results = [each for each in results if several[each[0].unit] == 1]
    index = {storage: i for i, (_, _, storage, _) in enumerate(results)}
    needs = [
        tuple((index[a], grade) for a, grade in result.arguments if a in index) if result is not None else ()
        for _, _, _, result in results
    ]
    found = []
    for (call, taker, storage, result), before, limit in zip(
        results, needs, limits(needs, [NO_GRADE if r is None else r.grade for *_, r in results]), strict=True
    ):
        let_go = trace.let_go.get(storage, NEVER)
        since = NEVER if let_go >= NEVER else max(let_go + 1, taker.marks["out"])
        place = call.returned.index(storage)
        found.append(Handing(call, taker, place, taker.inputs[storage], result, before, limit, since))
    return found


def handing_shapes(
    found: Sequence[Handing], order: Sequence[int], grades: int, add: Callable[[float], int]
) -> tuple[HandingShape, ...]:
    """The same as parts of a structure.

    Args:
        found: See `handings`.
        order: Identities of all calls.
        grades: How many there are.
        add: Adds a column, and returns its index.
    """
    index = {identity: i for i, identity in enumerate(order)}
    return tuple(
        HandingShape(
            call=index[id(each.call)],
            taker=index[id(each.taker)],
            place=each.place,
            size=add(each.nbytes),
            work=add(0.0 if each.result is None else each.result.work),
            temporary=add(each.temporary_bytes(grades)),
            also=tuple(add(each.also_bytes(grade)) for grade in range(1, grades + 1)),
            grade=each.grade,
            needs=each.needs,
            since_time=each.since_time,
        )
        for each in found
    )
