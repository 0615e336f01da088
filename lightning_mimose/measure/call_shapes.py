"""The calls of a measured step as shapes: what each saves, works with, and is given."""

from __future__ import annotations

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.columns import Columns
from lightning_mimose.measure.kept import KeptStep
from lightning_mimose.measure.savings import rebuilding_bytes
from lightning_mimose.predict.maxima import Groups, joined, moved
from lightning_mimose.predict.shapes import NEVER, CallShape, LateShape


def call_shape(kept: KeptStep, call: Call, columns: Columns) -> CallShape:
    """The shape of a call; its numbers are added to the columns.

    Args:
        kept: The step.
        call: One of its calls.
        columns: The step's.
    """
    saved_by, lends = kept.saved_by[id(call)], kept.lends[id(call)]
    working = _working(kept, call)
    is_region = call is kept.region_of[id(call)] and "again" in call.marks
    entry = lean = -1
    if "again" in call.marks or call.is_unseen:
        lean, entry = _lean(kept, call, columns), columns.add(_entry_bytes(kept, call))
    start = _before_backward_bytes(kept, call, is_region=is_region)
    looked_at = is_region and call.items is not None
    items = call.items or ()
    rebuilding = columns.add(rebuilding_bytes(items, call.results)) if looked_at else -1
    return CallShape(
        key=call.key,
        unit=call.unit,
        region=is_region,
        in_time=call.marks["in"],
        out_time=call.marks["out"],
        backward_time=call.marks.get("backward", NEVER),
        saved=columns.add_signed(saved_by.nbytes),
        working=columns.add_highest(working),
        before_backward=columns.add(start),
        flops=columns.add(call.flops),
        besides=columns.add(call.besides),
        tensors=columns.add(call.tensors),
        given=columns.add(sum(call.inputs.values())),
        returned=columns.add(call.returned_bytes),
        entry=entry,
        lean=lean,
        lent=columns.add(lends.nbytes) if lends.may_be else -1,
        rebuilding=rebuilding,
        places=columns.add(max(0, call.last_pack + 1 - call.first_pack)) if looked_at else -1,
        comparing=columns.add(max((item.comparing_bytes for item in items), default=0)) if looked_at else -1,
        late=tuple(LateShape(columns.add(each.nbytes), each.since, each.until) for each in saved_by.late),
        lent_until=lends.until,
        held_until=kept.holding[id(call)],
        kept_until=call.marks.get("dropped", NEVER) + 1 if call.is_unseen else 0,
    )


def _working(kept: KeptStep, call: Call) -> Groups:
    """The peaks of a call's recomputation, above its start."""
    again = call.marks.get("again")
    if again is None or "backward" not in call.marks:
        return ((0,),)
    region = kept.region_of[id(call)]
    # Recomputed itself, it would keep the present random state aside meanwhile, as its region does.
    beside = 0 if call is region else kept.trace.random_state_bytes
    needed = _until_last(kept, call, region) or joined(kept.tops[again : call.marks.get("again_out", again + 1)])
    return moved(needed, beside - kept.levels[again])


def _until_last(kept: KeptStep, call: Call, region: Call) -> Groups:
    """What is there in a recomputation until the last tensor that a call saves; nothing where that is not known."""
    trace, tops = kept.trace, kept.tops
    at = trace.stop_of(call, region)
    if at is None:
        return ()
    last = trace.pieces[at].mark
    begun = tops[last][: trace.pieces_of[last].index(at)]
    return joined([*tops[call.marks["again"] : last], begun])


def _lean(kept: KeptStep, call: Call, columns: Columns) -> int:
    """Column of the peak of its forward while nothing is kept, above its start: in a region nothing is."""
    inside = joined(kept.tops[call.marks["in"] : call.marks["out"]])
    stashed = 0
    if call is not kept.region_of[id(call)]:
        # It would keep the random state of its forward from the start, and copies of what that may write.
        stashed = kept.trace.random_state_bytes + call.copied_bytes + call.stashed_bytes
    return columns.add_highest(inside, kept.levels[call.marks["in"]] - stashed)


def _entry_bytes(kept: KeptStep, call: Call) -> float:
    """What is there at its start when everything before it is kept."""
    region, levels = kept.region_of[id(call)], kept.levels
    first, again = region.marks["in"], call.marks.get("again")
    since = 0 if again is None else levels[again] - levels[region.marks["again"]]
    return float(levels[first] + kept.dropped[first] + since)


def _before_backward_bytes(kept: KeptStep, call: Call, *, is_region: bool) -> float:
    """What is there when its backward begins, without what it saved."""
    region, at = kept.region_of[id(call)], call.marks.get("backward")
    if is_region:
        return float(kept.levels[region.marks["again"]] + kept.dropped[region.marks["again"]])
    if at is None:
        return 0.0
    # Recomputed itself, it would run again when it is first asked for what it saved: what its last operations make of
    # the gradient is there by then.
    trace, saved_by = kept.trace, kept.saved_by[id(call)]
    since, there_bytes = trace.asked.get(call.key, (at, trace.intervals[at].level_bytes))
    start = there_bytes - trace.marks[at].new_gradient_bytes + kept.dropped[since] - saved_by.nbytes
    if id(region) in kept.twice:
        start -= kept.twice[id(region)].bytes_at(trace, since, saved_by.storages)
    return float(start)
