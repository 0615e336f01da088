"""Recomputations while a step is measured: there a unit and all inside it run with everything they save kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_mimose.measure.call import RNG_STATE_BYTES, Call, LeanItem, Left, ResultItem
from lightning_mimose.measure.clock import Clock
from lightning_mimose.measure.curve import Curve
from lightning_mimose.measure.flops import FlopTally
from lightning_mimose.measure.longer import Longer, asked_by_hand
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.measure.storages import Storages
from lightning_mimose.measure.trace import IS_ASKED, IS_GONE, IS_LAST, IS_LATE
from lightning_mimose.parts import storages_in


class Survey(Protocol):
    """Looks at what a region saves, for actions that keep it in another form."""

    def begin(self, identify: Callable[[torch.UntypedStorage], int], happens: Callable[[str, int], None]) -> None:
        """Told how storages are numbered, and whom to tell what happens to an item."""

    def forward_run(self) -> AbstractContextManager[None]:
        """Entered around the run in forward."""

    def recompute_run(self) -> AbstractContextManager[None]:
        """Entered around the run in backward."""

    def pack(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], *, is_lost: bool = False) -> Any:
        """Packs what is saved in backward by the region's own hook, and returns what stands for it; see `Call.lost`."""

    def returned(self, out: Any) -> None:
        """Shown what the run in backward returns, before it is over."""

    def items(self) -> tuple[LeanItem, ...]:
        """What could be kept in a smaller form."""

    def results(self) -> tuple[ResultItem, ...]:
        """What of the result can be rebuilt from what is saved."""

    def versions(self) -> dict[int, int]:
        """Number of what the region was given -> how often it had been written in place before the run in backward."""


class Replays:
    """Measures the recomputations of one step.

    Args:
        curve: Where they are marked.
        storages: Their numbers.
        calls: The step's calls so far.
        clock: Takes their times.
        count_flops: Whether to count operations.
        searching: Whether Python looks for cycles: what goes then goes at another moment in every step.

    Attributes:
        packs: How many tensors regions have saved in the step's forward so far.
        in_backward: Whether the step's backward has begun.
        passes_apart: Whether a region was recomputed for another pass than the step's own: a second one over the same
            graph, or one in the midst of the forward.
    """

    def __init__(
        self,
        curve: Curve,
        storages: Storages,
        calls: Sequence[Call],
        clock: Clock,
        *,
        count_flops: bool,
        searching: Callable[[], bool],
    ) -> None:
        self._searching = searching
        self._curve, self._storages, self._calls, self._count_flops = curve, storages, calls, count_flops
        self._clock, self._times = clock, list[tuple[Call, Any, Any]]()
        self._expected: Iterator[Call] | None = None
        """The calls inside the region that runs again, which come in the same order. One region at a time: a region has
        none inside it."""
        self._stack: list[Call] = []
        self._flops_before: dict[str, tuple[int, int]] = {}
        self._seconds: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """What recomputations have returned or left that their forward has, too, and somebody holds."""
        self.packs = 0
        self.in_backward = self.passes_apart = self._early = False
        self._slots: list[list[weakref.ref[_Slot]]] = []
        """What regions would have saved: until backward begins, it may still go with a result that nobody wants."""

    @property
    def running(self) -> bool:
        """Whether a recomputation is under way."""
        return self._expected is not None

    def begin_backward(self) -> None:
        """The step's backward begins: what has not gone by now is needed."""
        self.in_backward = True
        for slots in self._slots:
            slots.clear()
        self._slots.clear()

    def forward_goes_on(self) -> None:
        """There is more of it: what ran again before belonged to a pass in its midst.

        Otherwise that pass may be the step's own, which nobody announced.
        """
        self.passes_apart |= self._early

    @contextmanager
    def packing(self, call: Call) -> Iterator[None]:
        """Around a region's forward: what it would save is noted, and what of it goes before backward.

        The first in case that it never runs again.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        pack_outer, unpack_outer = outer

        watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        slots: list[weakref.ref[_Slot]] = []
        lost: dict[int, int] = {}
        self._slots.append(slots)

        def goes(_: Any, number: int) -> None:
            if number in watches:  # else it is over
                self._curve.cut(call.key, IS_GONE, number)

        def is_lost(_: Any, index: int) -> None:
            late = call.lost is lost
            # In a backward that nobody has announced it is used; in a cycle it goes at another moment in every step.
            if late and (torch._C._current_graph_task_id() != -1 or self._searching()):
                return
            lost[index] = self._curve.latest
            if late:
                self._curve.cut(call.key, IS_LATE, index)

        def pack(tensor: torch.Tensor) -> Any:
            for storage in self._storages.kept_by(tensor):
                number = self._storages.number(storage)
                if number not in call.packed:
                    call.packed[number] = storage.nbytes()
                    watches[number] = weakref.ref(storage, partial(goes, number=number))
            slot = _Slot(pack_outer(tensor), self.packs)
            self.packs += 1
            slots.append(weakref.ref(slot, partial(is_lost, index=len(slots))))
            return slot

        waiting: dict[int, list[str]] = {}
        """Number of a saved tensor -> calls inside that have saved it, among others."""
        asked: set[str] = set()
        ref = weakref.ref(self._curve)  # the graph may be there for longer
        longer = Longer(call, self._curve, self._storages, self._searching)

        def unpack(slot: _Slot) -> Any:
            if waiting and torch._C._current_graph_task_id() != -1:  # else somebody looks at what a node saved
                for key in waiting.pop(slot.number, ()):
                    if key not in asked and (curve := ref()) is not None:
                        asked.add(key)
                        curve.cut(key, IS_ASKED, 0)
            value = unpack_outer(slot.packed)
            if asked_by_hand():
                longer.asked(slot, value)
            return value

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
            for each in self._calls:
                if each is not call and each.last_pack >= 0 and each.within(call):
                    for number in range(each.first_pack, each.last_pack + 1):
                        waiting.setdefault(number, []).append(each.key)
        finally:
            watches.clear()
            call.lost = lost

    @contextmanager
    def of(self, call: Call, survey: Survey | None, results: list[Any]) -> Iterator[None]:
        """The recomputation of a region: same nested calls, everything kept alive, saved storages counted.

        Args:
            call: The region's.
            survey: Looks at what is saved.
            results: Where what it returns will be. Emptied before its end is marked: others stop before they return.
        """
        if "again" in call.marks:  # a second backward over the same graph
            self.passes_apart = True
            yield
            return
        self._early |= not self.in_backward
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        pack_outer, unpack_outer = outer
        flops = FlopTally()
        before = self._flops_before = {call.key: (0, 0)}
        slots: list[weakref.ref[_Slot]] = []

        def pack(tensor: torch.Tensor) -> Any:
            if len(slots) in lasts:  # where a recomputation of that call alone would stop
                self._curve.cut(call.key, IS_LAST, len(slots))
            is_lost = len(slots) in call.lost
            if self._stack:
                found = {self._storages.number(each): each.nbytes() for each in self._storages.kept_by(tensor)}
                for inner in self._stack:
                    inner.tensors += bool(found)
                if not is_lost:
                    self._stack[-1].saved.update(found)
                elif call.lost[len(slots)] >= call.marks["out"]:  # with a result that nobody wants
                    self._stack[-1].late.extend((call.lost[len(slots)], *each) for each in found.items())
                elif survey is not None:  # it looks at the graph, and so keeps all of it
                    call.idle.extend((call.lost[len(slots)], *each) for each in found.items())
            for inner in self._stack:
                total, besides = before[inner.key]
                inner.flops, inner.besides = flops.total - total, flops.besides - besides
            packed = pack_outer(tensor) if survey is None else survey.pack(tensor, pack_outer, is_lost=is_lost)
            slot = _Slot(packed)
            slots.append(weakref.ref(slot))
            return slot

        def unpack(slot: _Slot) -> Any:
            return unpack_outer(slot.packed)

        inside = [c for c in self._calls if c.within(call)]
        lasts = {c.last_pack - call.first_pack for c in inside}
        self._expected = iter([c for c in inside if c is not call])
        self._stack = [call]
        around = _Held()
        self._curve.hold(around, RNG_STATE_BYTES)  # the checkpoint keeps the present random state aside meanwhile
        call.marks["again"] = self._curve.mark(call.key, "again")
        began = self._clock.now()
        try:
            with (
                survey.recompute_run() if survey is not None else nullcontext(),
                saved_tensors_hooks(pack, unpack),
                flops if self._count_flops else nullcontext(),
            ):
                yield
            if survey is not None:
                call.items, call.results, call.versions = survey.items(), survey.results(), survey.versions()
        finally:
            self._times.append((call, began, self._clock.now()))
            call.dynamic = flops.dynamic
            self._expected, self._stack = None, []
            results.clear()
            call.marks["again_out"] = self._curve.mark(call.key, "again_out")
            if any(not isinstance(mode, ThreadedMode) for mode in _get_current_dispatch_mode_stack()):
                for slot in filter(None, (ref() for ref in slots)):
                    slot.packed = None

    def run_inside(
        self,
        unit: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        left: Callable[[], Left],
    ) -> Any:
        """Run a call nested in the region that runs again; see `StepRecorder.run_kept`."""
        assert self._expected is not None
        call = next(self._expected, None)
        if call is None or call.unit != unit:
            return original(*args, **kwargs)  # another path than in forward: the self-check of the unit's business
        call.inputs = self._storages.bytes_in((args, kwargs))
        self._stack.append(call)
        call.marks["again"] = self._curve.mark(call.key, "again")
        flops = FlopTally.active()
        self._flops_before[call.key] = (flops.total, flops.besides) if flops else (0, 0)
        try:
            out = original(*args, **kwargs)
        finally:
            self._stack.pop()
        self.finds_again(call, out, left())
        call.marks["again_out"] = self._curve.mark(call.key, "again_out")
        return out

    def finds_again(self, call: Call, out: Any, left: Left) -> None:
        """What a call has returned and left in attributes in forward, it has returned and left again.

        Where the first is still there, the interval that is open is cut when the second goes.
        """
        call.outputs = self._storages.in_order(out)
        found = list(zip(call.returned, storages_in(out), strict=False))
        for place in call.left.keys() & left.keys():
            again = list(zip(call.left[place], storages_in(left[place]), strict=False))
            call.twins += [(given, self._storages.number(storage)) for given, storage in again]
            found += again
        key = call.key if call.region is None else call.region.key
        for given, storage in found:
            number = self._storages.number(storage)
            if given != number and given in call.held and given not in call.gone and number not in self._seconds:
                self._seconds[number] = weakref.ref(storage, partial(self._goes, key, number))

    def _goes(self, key: str, number: int, _: object) -> None:
        if not self.running:
            self._curve.cut(key, IS_GONE, number)

    @contextmanager
    def timed(self, call: Call) -> Iterator[None]:
        """Around a region's forward, in which nobody counts operations; Python takes its time for that."""
        began = self._clock.now()
        yield
        self._times.append((call, began, self._clock.now()))

    def tell_times(self) -> None:
        """Tell the calls what they took, in forward or when they ran again: the step is over."""
        for call, began, ended in self._times:
            seconds = self._clock.seconds_between(began, ended)
            call.seconds = min(seconds, call.seconds or seconds)
        self._times.clear()

    def close(self) -> None:
        """Look at nothing any more: what is looked at holds this."""
        self._seconds.clear()


class _Slot:
    """What the graph of a region holds in place of a saved tensor.

    That of a recomputation has no backward of its own and goes at once, unless somebody keeps it: `FlopCounterMode`
    does, by hooks on every module's tensors, and then the step would hold what all recomputations saved until its end.
    So under somebody else's dispatch mode slots are emptied when the recomputation is over.
    """

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, packed: Any, number: int = -1) -> None:
        self.packed, self.number = packed, number

    @property
    def handle(self) -> Any:
        """That of a survey's stand-in, which looks for it in the graph."""
        return getattr(self.packed, "handle", None)


class _Held:
    """Owns bytes that a meter is told of, as long as it lives."""
