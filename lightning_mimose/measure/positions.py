"""The places of a measured step: what is there when all is kept, and where a unit is lean or runs again instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.columns import Columns
from lightning_mimose.measure.kept import KeptStep
from lightning_mimose.measure.savings import Savings
from lightning_mimose.measure.trace import Mark
from lightning_mimose.measure.unwanted import tops_kept
from lightning_mimose.menu import GRADE_INSIDE
from lightning_mimose.predict.maxima import Groups, moved
from lightning_mimose.predict.shapes import NEVER, CallShape, Position

Instead = list[tuple[int, int]]
"""Index of a position, column of what is there."""


class Positions:
    """Reads the marks of a step, in order.

    Args:
        kept: The step.
        shapes: Its calls.
        spared: Region that was surveyed -> what each grade of lean saves spares of it.
        grades: Their names.
        columns: The step's.

    Attributes:
        found: The positions.
        lean: Region -> index of a position, and of every grade the column of what is there.
        lean_again: Region -> what is there if it is recomputed with lean saves.
        again: Call -> what is there if it runs again, where that is something else than was measured.
    """

    def __init__(
        self,
        kept: KeptStep,
        shapes: Mapping[int, CallShape],
        spared: Mapping[int, Sequence[Savings]],
        grades: Sequence[str],
        columns: Columns,
    ) -> None:
        self._kept, self._shapes, self._spared, self._columns = kept, shapes, spared, columns
        self._inside = grades.index(GRADE_INSIDE) if GRADE_INSIDE in grades else -1
        self._own_dropped = {id(c): kept.dropped_of(c) for c in kept.regions if id(c) in spared}
        self.found: list[Position] = []
        self.lean = defaultdict[int, list[tuple[int, list[int]]]](list)
        self.lean_again = defaultdict[int, Instead](list)
        self.again = defaultdict[int, Instead](list)

    def read(self, old_gradient_bytes: int | None) -> None:
        """Read them all.

        Args:
            old_gradient_bytes: See `observe`.
        """
        for index, mark in enumerate(self._kept.trace.marks):
            if mark.name not in ("again", "again_out"):  # these are parts of a region's backward
                self._read(index, mark, old_gradient_bytes)

    def _read(self, index: int, mark: Mark, old_gradient_bytes: int | None) -> None:
        kept, columns = self._kept, self._columns
        owner = kept.trace.by_key.get(mark.owner) if mark.owner != "step" else None
        instead = {i: kept.once[i][0] for i in (index, kept.resumed.get(index, -1)) if i in kept.once}
        unwanted = kept.unwanted.get(index, {})
        if unwanted:
            instead[index] = tops_kept(kept.trace, index, unwanted)
        reached = kept.reached_in(index, instead)
        entry = -1
        if index in kept.unseen:  # in the forward of a region that never ran again
            beside = kept.dropped[index] - kept.trace.random_state_bytes
            reached = ((kept.unseen[index] - mark.new_gradient_bytes + beside,),)
        elif owner is not None and mark.name in ("in", "out"):
            region = kept.region_of[id(owner)]
            if "again" in region.marks and not (owner is region and mark.name == "out"):
                # Inside a region the forward that keeps everything is the recomputation.
                twin = owner.marks.get("again" if mark.name == "in" else "again_out")
                if twin is None:
                    return
                reached, entry = self._in_recomputation(index, twin, region), self._shapes[id(region)].entry
        elif owner is not None and id(kept.region_of[id(owner)]) in self._spared:
            self._add_lean(index, kept.region_of[id(owner)], reached)
        if index in kept.resumed:  # a region's backward goes on after its recomputation
            reached += kept.reached_in(kept.resumed[index], instead)
        self._add_wanted(index, unwanted, instead)
        self._add_repeated(index, instead)
        self.found.append(
            Position(
                label=f"{mark.name} {mark.owner}",
                time=index,
                backward=index >= kept.began,
                column=columns.add_highest(reached),
                entry=entry,
                gradient_bytes=mark.new_gradient_bytes,
                old_gradient_bytes=0 if old_gradient_bytes is None else mark.old_gradient_bytes,
                reached_gradient_bytes=mark.reached_gradient_bytes,
            )
        )

    def _in_recomputation(self, index: int, twin: int, region: Call) -> Groups:
        """Inside a region, above its start: where its recomputation comes to the same place.

        Args:
            index: The mark in forward.
            twin: That in the recomputation.
            region: The region.
        """
        kept, start = self._kept, self._kept.levels[region.marks["again"]]
        saved_by = kept.saved_by[id(region)]
        idle = region.idle_bytes(index, saved_by.storages.keys() | saved_by.held)
        spared = self._spared.get(id(region))
        if spared is not None:
            above = kept.trace.marks[twin].new_gradient_bytes + start
            tops = [self._columns.add_highest(each.tops[twin], above) for each in spared]
            self.lean[id(region)].append((len(self.found), tops))
        return moved(kept.tops[twin], -start - idle)

    def _add_lean(self, index: int, region: Call, reached: Groups) -> None:
        """In backward of what is in a region that was surveyed: what is there with each grade of lean saves."""
        kept, spared = self._kept, self._spared[id(region)]
        ways = [(each.gain_bytes, each.tops) for each in spared]
        if self._inside >= 0:  # recomputed itself; before its own backward that spares what it saves
            own = int(self._own_dropped[id(region)][index]) if index >= region.marks.get("backward", NEVER) else 0
            ways.append((own, spared[self._inside].alone))
        found = []
        after = kept.resumed.get(index, index)
        for spared_bytes, lowered in ways:
            # Before the recomputation all that it will save counts as there; afterwards it is.
            level: Groups = moved(reached, -spared_bytes) if index < region.marks["again"] else ((0,),)
            if after > region.marks["again"]:
                beside = kept.dropped[after] - kept.trace.marks[after].new_gradient_bytes
                level += moved(lowered.get(after, kept.trace.tops[after]), beside)
            found.append(self._columns.add_highest(level))
        if self._inside >= 0:
            self.lean_again[id(region)].append((len(self.found), found.pop()))
        self.lean[id(region)].append((len(self.found), found))

    def _add_wanted(self, index: int, unwanted: Mapping[str, int], instead: Mapping[int, Groups]) -> None:
        """Results that nobody wants go in forward: what is there where a region that would save them runs again."""
        kept = self._kept
        for key, nbytes in unwanted.items():
            rest = {other: each for other, each in unwanted.items() if other != key}
            left = kept.reached_in(index, {index: tops_kept(kept.trace, index, rest)} if rest else {})
            if rest:
                # The most may be at another moment without all of them: each spares its share of what that leaves.
                highest, lowest = (max(map(max, kept.reached_in(index, found))) for found in (instead, {}))
                relief = int(nbytes / sum(unwanted.values()) * (highest - lowest))
                left = ((max(max(map(max, left)), highest - relief),),)
            self.again[id(kept.trace.by_key[key])].append((len(self.found), self._columns.add_highest(left)))

    def _add_repeated(self, index: int, instead: Mapping[int, Groups]) -> None:
        """What somebody else holds is there twice where a call runs again that makes it."""
        kept = self._kept
        for region in {id(kept.once[i][1].call): kept.once[i][1].call for i in instead if i in kept.once}.values():
            for call in (c for c in kept.family[id(region)] if id(c) in kept.repeated):
                if call is region or call.marks.get("backward", NEVER) <= index:
                    level = kept.reached_in(index, kept.repeated[id(call)])
                    if index in kept.resumed:
                        level += kept.reached_in(kept.resumed[index], kept.repeated[id(call)])
                    self.again[id(call)].append((len(self.found), self._columns.add_highest(level)))
