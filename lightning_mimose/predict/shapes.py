"""The parts of a step: calls of units, positions, storages that only some calls hold, and what is resident besides.

Times are ranks of marks in the measured step: a call lives from its `in` to its `out` in forward, and its saved tensors
from `out` to `backward`. Columns are indices into the numbers that the estimator fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import is_
from typing import NamedTuple

NEVER = 1 << 60
"""The time of an event that does not happen."""
END_OF = "end of"
"""Name of a position from which on something is gone that a call had returned, and the region around it would have
saved, see `result_at`."""


def result_at(label: str) -> str:
    """Whose that position is.

    Args:
        label: Of the last position before it that is of a call or of the step itself.

    Example:
        >>> f"{END_OF} {result_at('out block#1')}"
        'end of a result after out block#1'
    """
    return f"a result after {label}"


class Resident(NamedTuple):
    """What is alive in a step besides activations; a tuple, because every step makes some and looks plans up by them.

    Attributes:
        lasting_bytes: Parameters, buffers, optimizer state and the batch.
        old_gradient_bytes: Gradients alive at the step's start.
        zeroes_gradients: Whether they are set to None between forward and backward.
        update_bytes: Peak of an optimizer's update, everything included.
        again_bytes: What an update that evaluates the loss again (SAM's) holds besides, all through that.
        updates: Whether the step ends with an update; one that only adds to gradients does not.
        counts_held: Whether `lasting_bytes` has what modules keep from one step to the next: a device that counts its
            memory tells so.
    """

    lasting_bytes: int
    old_gradient_bytes: int
    zeroes_gradients: bool
    update_bytes: int
    again_bytes: int = 0
    counts_held: bool = False
    updates: bool = True

    @property
    def end_bytes(self) -> int:
        """What the step's end reaches: its update, if it makes one."""
        return self.update_bytes if self.updates else 0

    @property
    def beside_bytes(self) -> int:
        """What is there all through it: what lasts, and what an update holds that evaluates the loss again."""
        return self.lasting_bytes + (self.again_bytes if self.updates else 0)

    @property
    def total_bytes(self) -> int:
        """All that is resident at the step's start."""
        return self.lasting_bytes + self.old_gradient_bytes

    def without(self, nbytes: int) -> Resident:
        """The same, less some bytes that last."""
        return self._replace(lasting_bytes=self.lasting_bytes - nbytes, update_bytes=self.update_bytes - nbytes)


@dataclass(frozen=True)
class LateShape:
    """What a call saves and goes in forward with a result that nobody wants, at one moment.

    When that is, is no part of what makes two steps alike.

    Attributes:
        size: Column of its bytes.
        since_time: From when on nobody else holds it, if that is after the call.
        until_time: When it goes.
    """

    size: int
    since_time: int = field(compare=False)
    until_time: int = field(compare=False)

    def within(self, other: LateShape) -> LateShape:
        """Itself, or what of its time is in that of another one."""
        since, until = max(self.since_time, other.since_time), min(self.until_time, other.until_time)
        return self if (since, until) == (self.since_time, self.until_time) else LateShape(self.size, since, until)


@dataclass(frozen=True)
class CallShape:
    """One call of a unit.

    Attributes:
        key: Unit name and occurrence.
        unit: Name of the unit.
        region: Whether the call was itself recomputed while it was measured (not nested in one that was).
        in_time: When its forward begins.
        out_time: When its forward ends.
        backward_time: When its backward begins, or `NEVER`.
        saved: Column of the bytes that recomputing it frees between forward and backward; negative where it holds more
            (a random state) than it frees.
        working: Column of the peak of its forward while everything it saves is kept, above its start, up to the last
            tensor that it saves: there a recomputation stops, but for those of steps that learn.
        before_backward: Column of the live bytes when its backward begins, without what it saved.
        flops: Column of the operations its recomputation runs.
        besides: Column of what its recomputation does besides them, in operations that take as long.
        tensors: Column of how many tensors it saves, without parameters; 0 where nothing was recomputed.
        given: Column of the bytes of what it is given.
        returned: Column of the bytes of what it returns.
        entry: Column of the live bytes at its start when everything before it is kept, -1 if not recomputed.
        lean: Column of the peak of its forward while nothing is kept, above its start, -1 if not recomputed.
        lent: Column of the bytes of what it saves that others hold too for a while, see `measure.lent`; -1 if there are
            none.
        late: What it saves and goes in forward with results that nobody wants.
        rebuilding: Column of the most that making one of its saved tensors or results again takes, with all that is
            made on the way to it; -1 if that was not looked at.
        places: Column of how often it saves a tensor, parameters included; -1 likewise.
        comparing: Column of the most that comparing one of its saved tensors with what is rebuilt takes; -1 likewise.
        count: Column of how many calls it stands for, see `folding`; -1 if it is one.
        again: (index of a position in its backward, column of the live bytes there), where these are others if it runs
            again: it makes anew what somebody else holds, or its graph would hold something for longer. Or in forward,
            where something goes that it would have saved.
        lent_until: When it is the call's alone; no part of what makes two steps alike.
        held_until: Until when it holds what it is given, if it is recomputed; no part of what makes two steps alike.
        kept_until: When what it saves is gone, if there is no backward of it (its result was dropped); or 0. No
            part of what makes two steps alike: a graph in a cycle goes whenever Python looks for those.
    """

    key: str
    unit: str
    region: bool
    in_time: int
    out_time: int
    backward_time: int
    saved: int
    working: int
    before_backward: int
    flops: int
    besides: int
    tensors: int
    given: int
    returned: int
    entry: int = -1
    lean: int = -1
    lent: int = -1
    late: tuple[LateShape, ...] = ()
    rebuilding: int = -1
    places: int = -1
    comparing: int = -1
    count: int = -1
    again: tuple[tuple[int, int], ...] = ()
    lent_until: int = field(default=0, compare=False)
    held_until: int = field(default=-1, compare=False)
    kept_until: int = field(default=0, compare=False)

    def with_late_of(self, other: CallShape) -> CallShape:
        """Itself, or if what nobody wants was there for less in an equal step: with that."""
        late = tuple(mine.within(its) for mine, its in zip(self.late, other.late, strict=True))
        return self if all(map(is_, late, self.late)) else replace(self, late=late)

    @property
    def end_time(self) -> int:
        """When what it saves is gone or due."""
        return self.kept_until or self.backward_time


@dataclass(frozen=True)
class Position:
    """One place on the timeline.

    Attributes:
        label: Readable name.
        time: When it is.
        backward: Whether it lies after the start of the backward pass.
        column: Column of the live bytes there, above resident ones and gradients, when everything is kept.
        entry: Column to add to it (positions inside a region are measured from the region's start), or -1.
        gradient_bytes: Bytes of the gradients made before it in this step.
        old_gradient_bytes: Bytes of older gradients alive there, in a loop that frees them when it likes.
        reached_gradient_bytes: Bytes of older gradients that were added to before it: a step that finds none, or frees
            them first, makes new ones there.
    """

    label: str
    time: int
    backward: bool
    column: int
    entry: int
    gradient_bytes: int
    old_gradient_bytes: int = 0
    reached_gradient_bytes: int = 0


@dataclass(frozen=True)
class LooseShape:
    """A storage that nothing holds in backward unless one of the calls it is an input of is recomputed.

    Attributes:
        size: Column of its bytes.
        holders: Indices of the calls that hold it when recomputed, the longest-holding first.
        until_time: Until when it was held in the measured step, -1 if it was not.
        ending: Column of the bytes by which the interval before `since_time` would be lower if no call held it.
        since_time: From when on nobody else held it there, `NEVER` if others did so longer, None if that was not seen;
            no part of what makes two steps alike.
        ends_there: Whether that is so in every step, so that `ending` is of that interval; nor is this.
        outlives: Whether it was still there when backward was over; nor is this.
        lasts_until: Until when what was measured has it in it for sure: a region holds what it was given until nothing
            of its graph is left; nor is this.
        given: Indices of all calls that were given it; nor is this.
        rank: Which of the storages that were given to just these it is, saved ones included; nor is this.
        alike: How many of those there are, 0 where that is another number in other steps; nor is this.
    """

    size: int
    holders: tuple[int, ...]
    until_time: int
    ending: int
    since_time: int | None = field(default=None, compare=False)
    ends_there: bool = field(default=True, compare=False)
    outlives: bool = field(default=False, compare=False)
    lasts_until: int = field(default=-1, compare=False)
    given: tuple[int, ...] = field(default=(), compare=False)
    rank: int = field(default=0, compare=False)
    alike: int = field(default=0, compare=False)

    @property
    def was_held(self) -> bool:
        """Whether calls held it in the measured step; if not (an input inside one), what was measured is without it."""
        return self.until_time >= 0

    @property
    def lasts(self) -> bool:
        """Whether somebody else holds it all the time."""
        return self.since_time == NEVER or (self.since_time is None and self.outlives)

    def with_holds_of(self, other: LooseShape) -> LooseShape:
        """Itself, or what is to be expected if others hold it for as long as in another step, too."""
        times = (self.since_time, other.since_time)
        outlives = self.outlives or other.outlives
        since = NEVER if NEVER in times else None if None in times else max(time for time in times if time is not None)
        ends_there = self.ends_there and other.ends_there and times[0] == times[1]
        lasts = min(self.lasts_until, other.lasts_until)
        same = (self.given, self.rank, self.alike) == (other.given, other.rank, other.alike)
        merged = replace(
            self,
            since_time=since,
            ends_there=ends_there,
            outlives=outlives,
            lasts_until=lasts,
            alike=self.alike if same else 0,
        )
        return self if vars(merged) == vars(self) else merged


@dataclass(frozen=True)
class LeanShape:
    """What one grade of lean saves changes about one call.

    Attributes:
        call: Index of the call.
        action: Name of the grade.
        saved: Column of the bytes it spares between forward and backward.
        work: Column of the operations that rebuilding takes.
        positions: (index of a position inside the call's forward or backward, column of the live bytes there).
        lent: Column of the bytes of what it spares that others hold too for a while, -1 if there are none.
        working: Column of the peak of its forward with such saves, above its start, up to the last tensor that it
            saves: there a recomputation stops; -1 for grades that are not used in one.
        again: As `positions`, where something else is alive if the call is recomputed itself: from its backward on
            nothing of it is until then, what it returned is not, and no other one's backward has made some of it.
        borrowed: Indices of the loose storages that it keeps alive; no part of what makes two steps alike.
    """

    call: int
    action: str
    saved: int
    work: int
    positions: tuple[tuple[int, int], ...]
    lent: int = -1
    working: int = -1
    again: tuple[tuple[int, int], ...] = ()
    borrowed: tuple[int, ...] = field(default=(), compare=False)

    def with_loans_of(self, other: LeanShape) -> LeanShape:
        """Itself, or if it borrowed more in another step: with that."""
        more = set(other.borrowed).difference(self.borrowed)
        return replace(self, borrowed=tuple(sorted({*self.borrowed, *more}))) if more else self
