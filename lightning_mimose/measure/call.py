"""One call of one unit in a recorded step, and what of it could be kept in a smaller form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lightning_mimose.menu import RECOMPUTE

RNG_STATE_BYTES = torch.get_rng_state().nbytes
"""A region keeps the state of the host's generator besides its inputs."""
Left = Mapping[tuple[int, str], Sequence[torch.Tensor]]
"""Activations that a call has left in attributes, by identity of the module and name."""
NOTHING_LEFT: Left = {}


def call_key(unit: str, occurrence: int) -> str:
    """Identifies a call of a unit across steps.

    Example:
        >>> call_key("block", 0), call_key("block", 1)
        ('block', 'block#1')
    """
    return unit if occurrence == 0 else f"{unit}#{occurrence}"


@dataclass(eq=False)
class Call:
    """One call of one unit in a measured step. Numbers only, and weak references while the step runs.

    Attributes:
        unit: Name of the unit.
        occurrence: How many times the unit was called before in this step.
        parent: The enclosing call.
        action: What the unit did.
        inputs: Storage id -> bytes of the tensors it was given.
        lent: Those of them that were not among its arguments: weights that were made in the step.
        saved: Storage id -> bytes that this call itself (no nested call) saved for backward.
        packed: Storage id -> bytes of what the forward of a region would have saved.
        first_pack: How many tensors regions had saved in the step's forward before it.
        last_pack: Which of them, counted from 0, was the last that it saved itself; -1 where it saved none.
        lost: Which of what a region's forward saved, counted from 0, had gone with its part of the graph when backward
            began, for nothing leads to it from the loss (the choice that a router makes, a result that nobody wants) ->
            the interval in which it went.
        idle: (that interval, storage id, bytes) of one that had gone when the region returned, which nevertheless stays
            to the recomputation's end.
        late: (that interval, storage id in the recomputation, bytes) of what the call saves itself, and had gone after
            the region had returned.
        longer: Storage id -> bytes of what a region has saved again and its graph holds for longer where it is kept.
        copied_bytes: Of the state that would be copied for its forward alone were it recomputed itself, if it was not.
        stashed_bytes: Of what its forward writes, copied for its recomputation, or would be.
        cached_bytes: Of what it saved in forward, nested calls included: casts of weights in autocast's cache.
        cached_until: The interval from which on it holds them no more.
        outputs: Storage ids of what it returned while everything was kept, in order.
        returned: Storage ids of what it returned in forward, in order.
        returned_bytes: Bytes of these.
        left: Storage ids of activations that it left in attributes in forward, by identity of the module and name.
        twins: The same, each with what its recomputation left there.
        held: Those of `returned` and `left` that somebody else holds when the backward pass begins.
        gone: Storage id of `returned` and `left` -> the interval of the forward in which it went, or that begins with
            that, see `StepTrace.ended`; or of backward, where the region would have saved it. Of a region also of
            those that only calls inside it have returned.
        marks: Name of a mark ("in", "out", "again", "again_out", "backward") -> index of its interval; "dropped" is the
            interval in which the graph of a region went, with or without a backward.
        flops: Floating-point operations of its recomputation, up to the last tensor saved.
        besides: What it does besides them, in operations that take as long, see `flops`.
        seconds: Duration of its forward, or of its recomputation if that took less; of a region.
        tensors: How many tensors its recomputation saved, without parameters.
        dynamic: Whether sizes in it depend on what tensors hold, see `FlopTally`; of a region.
        items: What of it could be kept in a smaller form, if that was looked at.
        results: What of its result can be rebuilt from what it saves, likewise.
        versions: Storage id of what it was given -> how often that had been written in place after the forward.
    """

    unit: str
    occurrence: int
    parent: Call | None
    action: str
    inputs: dict[int, int] = field(default_factory=dict)
    lent: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    first_pack: int = 0
    last_pack: int = -1
    lost: Mapping[int, int] = field(default_factory=dict)
    idle: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[tuple[int, int, int]] = field(default_factory=list)
    longer: dict[int, int] = field(default_factory=dict)
    copied_bytes: int = 0
    stashed_bytes: int = 0
    cached_bytes: int = 0
    cached_until: int = 0
    outputs: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    returned_bytes: int = 0
    left: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    twins: list[tuple[int, int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    gone: dict[int, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    besides: int = 0
    seconds: float = 0.0
    tensors: int = 0
    dynamic: bool = False
    items: tuple[LeanItem, ...] | None = None
    results: tuple[ResultItem, ...] = ()
    versions: dict[int, int] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Identifies the call across steps."""
        return call_key(self.unit, self.occurrence)

    @property
    def region(self) -> Call | None:
        """The call that it is in, or is itself, and that was recomputed."""
        call: Call | None = self
        while call is not None and call.action != RECOMPUTE:
            call = call.parent
        return call

    @property
    def is_unseen(self) -> bool:
        """Whether it is a region that never ran again, for its result was dropped."""
        return self.action == RECOMPUTE and "out" in self.marks and "again" not in self.marks

    @property
    def held_until(self) -> int:
        """The last interval of a step in all of which a region that is recomputed has what it was given; -1 if none.

        Its graph holds that until nothing of it is left. Where that is, is known of regions that were; of a part of one
        it may be as late as the last backward in it.
        """
        return max(self.marks.get("backward", -1), self.marks.get("dropped", 0) - 1)

    def idle_bytes(self, interval: int, held: Set[int]) -> int:
        """What is idle in a region's recomputation at the point that an interval of its forward is at.

        Args:
            interval: That one.
            held: Storages that are there for another reason.
        """
        later = {number for went, number, _ in self.idle if went >= interval}
        idle = {number: size for went, number, size in self.idle if went < interval}
        return sum(size for number, size in idle.items() if number not in later and number not in held)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Storage ids of what it returned or left in forward, each with its twin while everything was kept."""
        return [*zip(self.returned, self.outputs, strict=False), *self.twins]

    def within(self, other: Call) -> bool:
        """Whether this call is `other` or nested in it."""
        call: Call | None = self
        while call is not None:
            if call is other:
                return True
            call = call.parent
        return False


@dataclass(frozen=True)
class LeanItem:
    """A storage that a call's region saved, and that could be kept in a smaller form.

    Attributes:
        storage: Its id.
        gain_bytes: By how much the other form is smaller.
        grade: The least grade of lean saves that has it.
        work: What rebuilding it costs, in floating-point operations.
        temporary_bytes: What lives besides while it is rebuilt.
        also: Items that are rebuilt on the way, and stay until they are used themselves.
        is_cached: Whether autocast's cache holds it too, while that lasts.
        held_bytes: What the other form takes; it is made while the storage is still there.
        arguments: Storage ids of what the call was given, and has to keep for it.
        since: The least grade that lets go of it when it dies, and each time that it is said to die again, for what
            it is made from has been saved in between; `grade` where that is not told.
        comparing_bytes: What it takes to make it, and all that it is made from, to compare it with what is saved.
        sources: Items that it is made from and that were saved after it, so that their operation may be done before it
            is needed, and the bytes of each: it holds those that are kept until it is made.
    """

    storage: int
    gain_bytes: int
    grade: int
    work: float
    temporary_bytes: int = 0
    also: tuple[int, ...] = ()
    is_cached: bool = False
    held_bytes: int = 0
    arguments: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    comparing_bytes: int = 0
    sources: tuple[tuple[int, int], ...] = ()

    @property
    def made_bytes(self) -> int:
        """What is there besides once it has been made again: the other form goes with its use."""
        return self.gain_bytes + self.held_bytes


@dataclass(frozen=True)
class ResultItem:
    """A storage that a call's region returned, and that can be rebuilt from what the region saved.

    Attributes:
        storage: Its id, in the recomputation.
        nbytes: Its size.
        grade: The least grade of lean saves that has it.
        work: What rebuilding it costs, in floating-point operations.
        temporary_bytes: What lives besides while it is rebuilt.
        also: Items that are rebuilt on the way, and stay until they are used themselves; itself not among them.
        item: Its own index among the items, where the region saved it as well; -1 where it did not.
        arguments: (storage id of what the call was given, grade from which on that is needed for it).
        version: How often it was written in place when it was returned.
    """

    storage: int
    nbytes: int
    grade: int
    work: float
    temporary_bytes: int
    also: tuple[int, ...]
    item: int
    arguments: tuple[tuple[int, int], ...]
    version: int = 0
