"""From a recorded step to numbers: the structure of the step and one value per column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.handing import handing_shapes, handings
from lightning_mimose.measure.lent import Lent, SavedBy, lent, peaks_beside, pieces_beside
from lightning_mimose.measure.loose import held_to_ends, loose_inputs, loose_shapes
from lightning_mimose.measure.savings import rebuilding_bytes, savings
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.measure.twice import Twice
from lightning_mimose.measure.unseen import peaks_kept
from lightning_mimose.measure.unwanted import cut_by, late_of, tops_kept
from lightning_mimose.menu import GRADE_INSIDE, RECOMPUTE
from lightning_mimose.predict.maxima import NOT_KNOWN, Groups, Maxima, joined, moved
from lightning_mimose.predict.shapes import NEVER, CallShape, LateShape, LeanShape, Position
from lightning_mimose.predict.structure import Structure


@dataclass(frozen=True, eq=False)
class Observation:
    """A measured sheltered step.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,), float64.
        peak_bytes: Measured peak above what is resident besides gradients.
        maxima: What columns are the largest of.
        seconds: What the forward of all regions took.
    """

    structure: Structure
    values: NDArray[np.float64]
    peak_bytes: int
    maxima: Maxima = NOT_KNOWN
    seconds: float = 0.0


@dataclass
class _Columns:
    values: list[float] = field(default_factory=list)
    maxima: dict[int, Groups] = field(default_factory=dict)

    def add(self, value: float) -> int:
        return self.add_signed(max(0.0, float(value)))

    def add_signed(self, value: float) -> int:
        self.values.append(float(value))
        return len(self.values) - 1

    def add_highest(self, groups: Groups, above: int = 0) -> int:
        """Of some local maxima, the largest; all of them less what they are measured from."""
        column = self.add(max(map(max, groups)) - above)
        if len(groups) > 1 or len(groups[0]) > 1:
            self.maxima[column] = moved(groups, -above)
        return column


def observe(
    trace: StepTrace, batch_bytes: int, old_gradient_bytes: int | None = None, grades: Sequence[str] = ()
) -> Observation:
    """Read a sheltered step: what was not recomputed in it cannot be, or saved nothing.

    Args:
        trace: What was recorded.
        batch_bytes: Bytes of the step's batch.
        old_gradient_bytes: Bytes of gradients at its start, in a loop that frees them when it likes; None in one that
            sets them to None between forward and backward.
        grades: Names of the grades of lean saves, if regions were surveyed for them.
    """
    columns = _Columns()
    levels = [i.level_bytes - m.new_gradient_bytes for i, m in zip(trace.intervals, trace.marks, strict=True)]
    state_bytes = trace.random_state_bytes
    region_of = {id(call): _region(call) for call in trace.calls}
    inputs, peak_bytes = loose_inputs(trace), trace.peak_bytes
    trace, until = held_to_ends(trace, inputs, region_of)
    holding = _held_until(trace, region_of)
    by_call = _saved_by(trace, region_of, holding, state_bytes)
    saved = {key: each.nbytes for key, each in by_call.items()}
    lends = {id(c): lent(trace, c, by_call[id(c)]) for c in trace.calls}
    outermost = [call for call in trace.calls if call is region_of[id(call)]]
    regions = [call for call in outermost if "again" in call.marks]
    without = [call for call in outermost if call.is_unseen]
    dropped = _dropped_per_interval([*regions, *without], by_call, lends, len(trace.marks))
    family = defaultdict[int, list[Call]](list)
    for call in trace.calls:
        family[id(region_of[id(call)])].append(call)
    twice = {id(c): Twice.of(trace, c, family[id(c)], by_call[id(c)].storages) for c in regions}
    kept = {i: peak - call.stashed_bytes for call in without for i, peak in peaks_kept(trace, call).items()}
    ending = [lends[id(call)] for call in regions]
    pieces = pieces_beside(trace, ending)
    tops = [moved(groups, -mark.new_gradient_bytes) for groups, mark in zip(trace.tops, trace.marks, strict=True)]
    for index, peak in peaks_beside(trace, ending, pieces).items():
        tops[index] = ((peak - trace.marks[index].new_gradient_bytes,),)
    unwanted = cut_by({call.key: by_call[id(call)].late for call in regions})
    once = {mark: (groups, each) for each in twice.values() for mark, groups in each.once(trace).items()}
    repeated = {  # of calls that would make some of it anew
        id(call): each.once(trace, by_call[id(call)].storages)
        for call in trace.calls
        if (each := twice.get(id(region_of[id(call)]))) is not None and each.concerns(by_call[id(call)].storages)
    }

    def reached_in(mark: int, found: Mapping[int, Groups]) -> Groups:
        beside = int(dropped[mark])
        if mark not in found:
            return moved(tops[mark], beside)
        return moved(found[mark], beside - trace.marks[mark].new_gradient_bytes)

    began = next((i for i, m in enumerate(trace.marks) if (m.owner, m.name) == ("step", "backward")), len(trace.marks))

    shapes: dict[int, CallShape] = {}
    positions: list[Position] = []
    for call in trace.calls:
        region = region_of[id(call)]
        again = call.marks.get("again")
        if again is None or "backward" not in call.marks:
            working: Groups = ((0,),)
        else:
            end = call.marks.get("again_out", again + 1)
            # Recomputed itself, it would keep the present random state aside meanwhile, as its region does.
            beside = 0 if call is region else state_bytes
            needed = _until_last(trace, tops, call, region) or joined(tops[again:end])
            working = moved(needed, beside - levels[again])
        is_region = call is region and again is not None
        at = call.marks.get("backward")
        entry = lean = -1
        if again is not None or call.is_unseen:
            # The forward of a region keeps nothing; its recomputation keeps everything.
            inside = joined(tops[call.marks["in"] : call.marks["out"]])
            # Likewise, it would keep the random state of its forward from the start, and copies of what that may write.
            stashed = 0 if call is region else state_bytes + call.copied_bytes + call.stashed_bytes
            lean = columns.add_highest(inside, levels[call.marks["in"]] - stashed)
            first = region.marks["in"]
            since = 0 if again is None else levels[again] - levels[region.marks["again"]]
            entry = columns.add(levels[first] + dropped[first] + since)
        if is_region:
            start = levels[region.marks["again"]] + dropped[region.marks["again"]]
        elif at is not None:
            # Recomputed itself, it would run again when it is first asked for what it saved: what its last operations
            # make of the gradient is there by then.
            since, there_bytes = trace.asked.get(call.key, (at, trace.intervals[at].level_bytes))
            start = there_bytes - trace.marks[at].new_gradient_bytes + dropped[since] - saved[id(call)]
            if id(region) in twice:
                start -= twice[id(region)].bytes_at(trace, since, by_call[id(call)].storages)
        else:
            start = 0
        looked_at = is_region and call.items is not None
        items = call.items or ()
        rebuilding = columns.add(rebuilding_bytes(items, call.results)) if looked_at else -1
        shapes[id(call)] = CallShape(
            key=call.key,
            unit=call.unit,
            region=is_region,
            in_time=call.marks["in"],
            out_time=call.marks["out"],
            backward_time=call.marks.get("backward", NEVER),
            saved=columns.add_signed(saved[id(call)]),
            working=columns.add_highest(working),
            before_backward=columns.add(start),
            flops=columns.add(call.flops),
            besides=columns.add(call.besides),
            tensors=columns.add(call.tensors),
            given=columns.add(sum(call.inputs.values())),
            returned=columns.add(call.returned_bytes),
            entry=entry,
            lean=lean,
            lent=columns.add(lends[id(call)].nbytes) if lends[id(call)].may_be else -1,
            rebuilding=rebuilding,
            places=columns.add(max(0, call.last_pack + 1 - call.first_pack)) if looked_at else -1,
            comparing=columns.add(max((item.comparing_bytes for item in items), default=0)) if looked_at else -1,
            late=tuple(LateShape(columns.add(each.nbytes), each.since, each.until) for each in by_call[id(call)].late),
            lent_until=lends[id(call)].until,
            held_until=holding[id(call)],
            kept_until=call.marks.get("dropped", NEVER) + 1 if call.is_unseen else 0,
        )
    surveyed = [call for call in regions if call.items is not None and trace.pieces]
    handed = handings(trace, region_of) if trace.pieces else []
    handing_of = {id(each.call): each for each in handed}
    count = len(grades)
    spared = {
        id(c): savings(trace, c, by_call[id(c)].held, lends[id(c)].storages, count, handing_of.get(id(c)), twice[id(c)])
        for c in surveyed
    }
    where: dict[int, list[tuple[int, list[int]]]] = {id(call): [] for call in regions}
    leanly = grades.index(GRADE_INSIDE) if GRADE_INSIDE in grades else -1
    again_at = defaultdict[int, list[tuple[int, int]]](list)
    again_of = defaultdict[int, list[tuple[int, int]]](list)
    own_dropped = {id(call): _dropped_per_interval([call], by_call, lends, len(trace.marks)) for call in surveyed}
    resumed = {call.marks["again"] - 1: call.marks["again_out"] for call in regions}
    for index, mark in enumerate(trace.marks):
        owner = trace.by_key.get(mark.owner) if mark.owner != "step" else None
        if mark.name in ("again", "again_out"):
            continue
        kept_groups = {i: once[i][0] for i in (index, resumed.get(index, -1)) if i in once}
        here = unwanted.get(index, {})
        if here:
            kept_groups[index] = tops_kept(trace, index, here)
        reached = reached_in(index, kept_groups)
        entry = -1
        if index in kept:  # in the forward of a region that never ran again
            reached = ((kept[index] - mark.new_gradient_bytes + dropped[index] - state_bytes,),)
        elif owner is not None and mark.name in ("in", "out"):
            region = region_of[id(owner)]
            if region is not None and "again" in region.marks and not (owner is region and mark.name == "out"):
                # Inside a region the forward that keeps everything is the recomputation.
                twin = owner.marks.get("again" if mark.name == "in" else "again_out")
                if twin is None:
                    continue
                start = levels[region.marks["again"]]
                others = by_call[id(region)]
                idle = region.idle_bytes(index, others.storages.keys() | others.held)
                reached = moved(tops[twin], -start - idle)
                entry = shapes[id(region)].entry
                if id(region) in spared:
                    made = trace.marks[twin].new_gradient_bytes
                    where[id(region)].append(
                        (len(positions), [columns.add_highest(s.tops[twin], made + start) for s in spared[id(region)]])
                    )
        elif owner is not None and id(region_of[id(owner)]) in spared:
            region = region_of[id(owner)]
            ways = [(each.gain_bytes, each.tops) for each in spared[id(region)]]
            if leanly >= 0:  # recomputed itself; before its own backward that spares what it saves
                own = int(own_dropped[id(region)][index]) if index >= region.marks.get("backward", NEVER) else 0
                ways.append((own, spared[id(region)][leanly].alone))
            found = []
            for spared_bytes, lowered in ways:
                # Before the recomputation all that it will save counts as there; afterwards it is.
                level = moved(reached, -spared_bytes) if index < region.marks["again"] else ((0,),)
                after = resumed.get(index, index)
                if after > region.marks["again"]:
                    beside = dropped[after] - trace.marks[after].new_gradient_bytes
                    level += moved(lowered.get(after, trace.tops[after]), beside)
                found.append(columns.add_highest(level))
            if leanly >= 0:
                again_of[id(region)].append((len(positions), found.pop()))
            where[id(region)].append((len(positions), found))
        if index in resumed:
            # A region's backward goes on after its recomputation.
            after = resumed[index]
            reached += reached_in(after, kept_groups)
        for key, nbytes in here.items():
            rest = {other: each for other, each in here.items() if other != key}
            left = reached_in(index, {index: tops_kept(trace, index, rest)} if rest else {})
            if rest:
                # The most may be at another moment without all of them: each spares its share of what that leaves.
                highest, lowest = (max(map(max, reached_in(index, found))) for found in (kept_groups, {}))
                relief = int(nbytes / sum(here.values()) * (highest - lowest))
                left = ((max(max(map(max, left)), highest - relief),),)
            again_at[id(trace.by_key[key])].append((len(positions), columns.add_highest(left)))
        for region in {id(once[i][1].call): once[i][1].call for i in kept_groups if i in once}.values():
            for call in (c for c in family[id(region)] if id(c) in repeated):
                if call is region or call.marks.get("backward", NEVER) <= index:
                    level = reached_in(index, repeated[id(call)])
                    if index in resumed:
                        level += reached_in(resumed[index], repeated[id(call)])
                    again_at[id(call)].append((len(positions), columns.add_highest(level)))
        positions.append(
            Position(
                label=f"{mark.name} {mark.owner}",
                time=index,
                backward=index >= began,
                column=columns.add_highest(reached),
                entry=entry,
                gradient_bytes=mark.new_gradient_bytes,
                old_gradient_bytes=0 if old_gradient_bytes is None else mark.old_gradient_bytes,
                reached_gradient_bytes=mark.reached_gradient_bytes,
            )
        )
    until_last = {
        id(c): columns.add_highest(spared[id(c)][leanly].until_last, trace.intervals[c.marks["again"]].level_bytes)
        for c in (surveyed if leanly >= 0 else ())
    }
    units = tuple(dict.fromkeys(call.unit for call in trace.calls))
    loose = loose_shapes(trace, inputs, region_of, list(shapes), pieces, until, columns.add)
    place = {number: i for i, number in enumerate(inputs)}
    structure = Structure(
        units=units,
        parents=_parents(units, trace.calls),
        calls=tuple(replace(shape, again=tuple(again_at[key])) for key, shape in shapes.items()),
        positions=tuple(positions),
        loose=loose,
        batch=columns.add(batch_bytes),
        columns=len(columns.values),
        old_gradient_bytes=old_gradient_bytes,
        lean=tuple(
            LeanShape(
                call=list(shapes).index(id(call)),
                action=action,
                saved=columns.add(spared[id(call)][grade].gain_bytes),
                work=columns.add(spared[id(call)][grade].work),
                positions=tuple((position, peaks[grade]) for position, peaks in where[id(call)]),
                lent=columns.add(spared[id(call)][grade].lent_bytes) if lends[id(call)].may_be else -1,
                working=until_last[id(call)] if grade == leanly else -1,
                again=tuple(again_of[id(call)]) if grade == leanly else (),
                borrowed=tuple(sorted(place[n] for n in spared[id(call)][grade].arguments if n in place)),
            )
            for call in surveyed
            for grade, action in enumerate(grades)
        ),
        dynamic=tuple(dict.fromkeys(call.unit for call in trace.calls if call.dynamic)),
        handing=handing_shapes(handed, list(shapes), len(grades), columns.add),
    )
    structure = replace(structure, columns=len(columns.values))
    return Observation(
        structure,
        np.array(columns.values),
        peak_bytes,
        Maxima.of(columns.maxima),
        sum(call.seconds for call in regions),
    )


def _until_last(trace: StepTrace, tops: Sequence[Groups], call: Call, region: Call) -> Groups:
    """What is there in a recomputation until the last tensor that a call saves; nothing where that is not known."""
    at = trace.stop_of(call, region)
    if at is None:
        return ()
    last = trace.pieces[at].mark
    begun = tops[last][: trace.pieces_of[last].index(at)]
    return joined([*tops[call.marks["again"] : last], begun])


def _region(call: Call) -> Call:
    """The outermost call around it that was recomputed; the outermost of all if none was."""
    around = [call]
    while around[-1].parent is not None:
        around.append(around[-1].parent)
    return next((outer for outer in reversed(around) if outer.action == RECOMPUTE), around[-1])


def _held_until(trace: StepTrace, region_of: dict[int, Call]) -> dict[int, int]:
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


def _parents(units: tuple[str, ...], calls: tuple[Call, ...]) -> tuple[int, ...]:
    index = {unit: i for i, unit in enumerate(units)}
    parents: dict[str, int] = {}
    for call in calls:
        # Of its first call: that begins after its parent's first, so parents form a tree whoever else calls the unit.
        parents.setdefault(call.unit, index[call.parent.unit] if call.parent is not None else -1)
    return tuple(parents[unit] for unit in units)


def _saved_by(
    trace: StepTrace, region_of: dict[int, Call], holding: dict[int, int], state_bytes: int
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


def _dropped_per_interval(
    regions: list[Call], by_call: dict[int, SavedBy], lends: dict[int, Lent], count: int
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
