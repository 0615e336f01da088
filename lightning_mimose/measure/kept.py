"""A sheltered step as it would be if every region of it had been kept: what is alive at each of its marks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.lent import lent, peaks_beside, pieces_beside
from lightning_mimose.measure.loose import held_to_ends, loose_inputs
from lightning_mimose.measure.regions import dropped_per_interval, held_until, region_around, saved_by
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.measure.twice import Twice
from lightning_mimose.measure.unseen import peaks_kept
from lightning_mimose.measure.unwanted import cut_by
from lightning_mimose.predict.maxima import Groups, moved

AS_MEASURED: Mapping[int, Groups] = MappingProxyType({})


class KeptStep:
    """What was recorded, and what of it is otherwise where a region is kept. Calls are told by their identity.

    Args:
        trace: What was recorded.

    Attributes:
        trace: The same, with what regions hold to their ends.
        inputs: See `loose_inputs`.
        until: See `held_to_ends`.
        levels: Bytes at each mark, without the step's own gradients.
        tops: Local maxima of the interval after each mark, likewise.
        region_of: Call -> its region.
        regions: Those that ran again.
        family: Region -> it, and the calls inside.
        holding: See `held_until`.
        saved_by: Call -> what recomputing it would free.
        lends: Call -> what of that others hold for a while.
        twice: Region -> what is there twice in its backward.
        dropped: Bytes that are not there at each mark, and would be.
        once: Mark of a region's backward -> local maxima without what is there twice, and whose that is.
        repeated: Call that would make some of that anew -> the same with that.
        unwanted: Mark -> region -> bytes of results that nobody wants, of which some are gone by its end.
        unseen: Mark in a region that never ran again -> the peak, had it been kept.
        pieces: Bytes beside each of the trace's pieces.
        resumed: Mark before a recomputation -> the one after it.
        began: The mark at which backward begins.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.levels = [i.level_bytes - m.new_gradient_bytes for i, m in zip(trace.intervals, trace.marks, strict=True)]
        self.region_of = {id(call): region_around(call) for call in trace.calls}
        self.inputs = loose_inputs(trace)
        trace, self.until = held_to_ends(trace, self.inputs, self.region_of)
        self.trace = trace
        self.holding = held_until(trace, self.region_of)
        self.saved_by = saved_by(trace, self.region_of, self.holding, trace.random_state_bytes)
        self.lends = {id(c): lent(trace, c, self.saved_by[id(c)]) for c in trace.calls}
        outermost = [call for call in trace.calls if call is self.region_of[id(call)]]
        self.regions = [call for call in outermost if "again" in call.marks]
        without = [call for call in outermost if call.is_unseen]
        self.dropped = dropped_per_interval([*self.regions, *without], self.saved_by, self.lends, len(trace.marks))
        self.family = defaultdict[int, list[Call]](list)
        for call in trace.calls:
            self.family[id(self.region_of[id(call)])].append(call)
        self.twice = {
            id(c): Twice.of(trace, c, self.family[id(c)], self.saved_by[id(c)].storages) for c in self.regions
        }
        self.unseen = {i: peak - call.stashed_bytes for call in without for i, peak in peaks_kept(trace, call).items()}
        ending = [self.lends[id(call)] for call in self.regions]
        self.pieces = pieces_beside(trace, ending)
        self.tops = [moved(tops, -mark.new_gradient_bytes) for tops, mark in zip(trace.tops, trace.marks, strict=True)]
        for index, peak in peaks_beside(trace, ending, self.pieces).items():
            self.tops[index] = ((peak - trace.marks[index].new_gradient_bytes,),)
        self.unwanted = cut_by({call.key: self.saved_by[id(call)].late for call in self.regions})
        self.once = {mark: (groups, each) for each in self.twice.values() for mark, groups in each.once(trace).items()}
        self.repeated = {
            id(call): each.once(trace, self.saved_by[id(call)].storages)
            for call in trace.calls
            if (each := self.twice.get(id(self.region_of[id(call)]))) is not None
            and each.concerns(self.saved_by[id(call)].storages)
        }
        self.resumed = {call.marks["again"] - 1: call.marks["again_out"] for call in self.regions}
        starts = (i for i, m in enumerate(trace.marks) if (m.owner, m.name) == ("step", "backward"))
        self.began = next(starts, len(trace.marks))

    def reached_in(self, mark: int, instead: Mapping[int, Groups] = AS_MEASURED) -> Groups:
        """Local maxima of the interval after a mark.

        Args:
            mark: The mark.
            instead: Those of some intervals, where they are others than were measured; with gradients.
        """
        beside = int(self.dropped[mark])
        if mark not in instead:
            return moved(self.tops[mark], beside)
        return moved(instead[mark], beside - self.trace.marks[mark].new_gradient_bytes)

    def dropped_of(self, call: Call) -> NDArray[np.int64]:
        """As `dropped`, of one region alone."""
        return dropped_per_interval([call], self.saved_by, self.lends, len(self.trace.marks))
