"""The collector: what every unit costs, measured in the steps that run anyway.

A sheltered step recomputes its shelter units, so each of them runs a second time in backward with everything
it saves kept alive. Measuring there costs no extra forward. Every unit's call gets marks on the meter's curve
(its forward, its recomputation, the start of its backward), and a counting hook that delegates to the
checkpoint's own sees which storages each nested unit saves.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mimose.measure.casts import CachedCasts
from lightning_mimose.measure.flops import FlopTally
from lightning_mimose.measure.meter import Interval, Meter, make_meter
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.measure.observe import RNG_STATE_BYTES
from lightning_mimose.measure.saved import saved_in_graph
from lightning_mimose.measure.trace import Call, LeanItem, Mark, Piece, StepTrace
from lightning_mimose.sharding import local


class Survey(Protocol):
    """Looks at what a region saves, for actions that keep it in another form."""

    def begin(self, identify: Callable[[torch.UntypedStorage], int], happens: Callable[[str, int], None]) -> None:
        """Told how storages are numbered, and whom to tell what happens to an item."""

    def forward_run(self) -> AbstractContextManager[None]:
        """Entered around the run in forward."""

    def recompute_run(self) -> AbstractContextManager[None]:
        """Entered around the run in backward."""

    def pack(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> Any:
        """Packs what is saved in backward by the region's own hook, and returns what stands for it."""

    def items(self) -> tuple[LeanItem, ...]:
        """What could be kept in a smaller form."""


GradientBytes = Callable[[], tuple[int, int]]
"""Returns the bytes of gradients that exist: (older than this step, made in it)."""


class StepRecorder:
    """Records one step. Units report their calls; the engine reports the step's own marks.

    Args:
        device: Where the step runs. The meter is chosen at `start`, when it is known whether a profiler runs.
        resident: Storages that are not activations (parameters, buffers), left out of what units save.
        gradient_bytes: Tells the gradients alive now.
        count_flops: Whether to count operations in recomputations.
        profile: Whether torch's profiler is free to be used.
    """

    def __init__(
        self,
        device: torch.device,
        resident: Sequence[torch.Tensor],
        gradient_bytes: GradientBytes,
        *,
        count_flops: bool = True,
        profile: bool = True,
    ) -> None:
        self._device = device
        self._meter: Meter | None = None
        self._profile = profile
        self._gradient_bytes = gradient_bytes
        self._resident = {local(t).untyped_storage()._cdata for t in resident if t.layout == torch.strided}
        self._ids: Any = WeakIdKeyDictionary()
        self._next_id = 0
        self._count_flops = count_flops
        self._calls: list[Call] = []
        self._marks: list[Mark] = []
        self._owners: list[int | None] = []
        self._events: dict[int, tuple[str, str, int]] = {}
        self._over = False
        self._stack: list[Call] = []
        self._occurrences: dict[str, int] = {}
        self._replay: Iterator[Call] | None = None
        self._flops_before: dict[str, tuple[int, int]] = {}
        self._outputs: list[tuple[Call, int, weakref.ref[Any]]] = []
        self._saved_between: set[int] = set()
        self._casts = CachedCasts(self)
        self._regions: list[weakref.ref[Region]] = []
        self._thread = 0
        self._missed = False
        self._retained = False

    # --- the step ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the meter; the first interval belongs to the step."""
        self._meter = make_meter(self._device, profile=self._profile)
        self._thread = threading.get_ident()
        self._meter.start()
        old, new = self._gradient_bytes()
        self._marks.append(Mark("step", "start", old, new))
        self._owners.append(0)

    def begin_backward(self, loss: torch.Tensor | None = None) -> None:
        """Mark the start of a backward pass, and note who holds what at this moment.

        Units' outputs that are alive now are held by somebody. What operations outside regions saved is read off
        the graph of `loss`: a storage that only regions hold would be free if they were kept.
        """
        for call, number, storage in self._outputs:
            if storage() is not None:
                call.held.add(number)
        self._outputs.clear()
        if loss is not None and loss.grad_fn is not None:
            for tensor in saved_in_graph(loss.grad_fn):
                if tensor.layout == torch.strided:
                    self._saved_between.add(self._identify(tensor.untyped_storage()))
        self.mark("step", "backward")

    @property
    def interval(self) -> int | None:
        """The one that is open; None after the step, or in a recomputation."""
        return None if self._over or self._replay is not None else len(self._marks) - 1

    def mark(self, owner: str, name: str) -> int:
        """Open an interval; returns its index."""
        assert self._meter is not None
        self._meter.mark()
        # On CPU a meter sees the thread it was started in, and a backward may run in another one.
        self._missed = self._missed or (self._device.type == "cpu" and threading.get_ident() != self._thread)
        self._marks.append(Mark(owner, name, *self._gradient_bytes()))
        self._owners.append(len(self._marks) - 1)
        return len(self._marks) - 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no part of the step; the interval that was open goes on afterwards."""
        assert self._meter is not None
        interrupted = self._owners[-1]
        self._meter.mark()
        self._owners.append(None)
        try:
            yield
        finally:
            self._meter.mark()
            self._owners.append(interrupted)

    def stop(self) -> StepTrace:
        """Stop the meter and return what was recorded."""
        assert self._meter is not None
        self._over = True
        self._casts.finish(len(self._marks))
        pieces = self._meter.stop()
        self._ids.clear()
        self._outputs.clear()
        if self._missed or len(pieces) != len(self._owners):
            # Backward ran in another thread, or a profiler of the user's own began inside the step and took the session
            # over: nothing was measured.
            return StepTrace((), (), ())
        marks = tuple(self._marks)
        owned: dict[int | None, list[Interval]] = {}
        for owner, piece in zip(self._owners, pieces, strict=True):
            owned.setdefault(owner, []).append(piece)
        aside = max((piece.peak_bytes for piece in owned.get(None, ())), default=0)
        intervals = [
            Interval(owned[i][0].level_bytes, max(piece.peak_bytes for piece in owned[i])) for i in range(len(marks))
        ]
        # Every trace counts what was made since the start; old gradients are accounted for at the marks.
        before = marks[0].old_gradient_bytes
        freed = [before - mark.old_gradient_bytes if self._meter.sees_old_frees else 0 for mark in marks]
        intervals = [Interval(i.level_bytes + f, i.peak_bytes + f) for i, f in zip(intervals, freed, strict=True)]
        cut = tuple(
            Piece(owner, piece.level_bytes + freed[owner], piece.peak_bytes + freed[owner], self._events.get(index))
            for index, (owner, piece) in enumerate(zip(self._owners, pieces, strict=True))
            if owner is not None
        )
        return StepTrace(
            tuple(self._calls),
            marks,
            tuple(intervals),
            frozenset(self._saved_between),
            self._meter.reserved_peak_bytes,
            marks[0].old_gradient_bytes + aside,
            self._retained,
            cut,
        )

    @property
    def sees_old_frees(self) -> bool:
        """Whether the meter sees memory go that is older than its start."""
        return self._meter is not None and self._meter.sees_old_frees

    # --- a unit's call in forward -----------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether a recomputation is under way, in which nested calls are those of the forward again."""
        return self._replay is not None

    def run_kept(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is kept, or that is nested in a region."""
        if self._replay is not None:
            return self._run_again(unit, original, args, kwargs)
        call = self.enter(unit, "keep", args, kwargs)
        try:
            out = original(*args, **kwargs)
        finally:
            self._stack.pop()
        self.leave(call, out)
        return out

    def enter(self, unit: str, action: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a call in forward."""
        occurrence = self._occurrences.get(unit, 0)
        self._occurrences[unit] = occurrence + 1
        call = Call(unit, occurrence, self._stack[-1] if self._stack else None, action)
        call.inputs = self._storages((args, kwargs))
        self._calls.append(call)
        self._stack.append(call)
        call.marks["in"] = self.mark(call.key, "in")
        return call

    def leave(self, call: Call, out: Any) -> None:
        """End a call in forward, and mark the moment its backward begins."""
        call.marks["out"] = self.mark(call.key, "out")
        recorder = weakref.ref(self)

        def begins(_: Any) -> None:
            live = recorder()
            if live is not None:
                live._backward_begins(call)

        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout == torch.strided:
                    storage = leaf.untyped_storage()
                    call.returned.append(self._identify(storage))
                    call.returned_bytes += storage.nbytes()
                    self._outputs.append((call, call.returned[-1], weakref.ref(storage)))
                if leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(begins)

    def _backward_begins(self, call: Call) -> None:
        if "backward" not in call.marks:
            call.marks["backward"] = self.mark(call.key, "backward")

    # --- a region's recomputation -----------------------------------------------------------------------------

    def region(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any], survey: Survey | None = None) -> Region:
        """Begin a recomputed call in forward; the region observes its runs."""
        call = self.enter(unit, "recompute", args, kwargs)
        region = Region(self, call, survey)
        assert self._meter is not None
        recorder = weakref.ref(self)

        def drops(_: Any) -> None:
            live = recorder()
            if live is not None and not live._over:
                call.marks["dropped"] = len(live._marks) - 1

        self._regions.append(weakref.ref(region, drops))
        if survey is not None:

            def happens(what: str, item: int) -> None:
                live = recorder()
                if live is not None:
                    live._cut(call.key, what, item)

            survey.begin(self._identify, happens)
        self._meter.hold(region, RNG_STATE_BYTES)  # the region's closure, and so its random state, lives as long
        return region

    def _cut(self, key: str, what: str, item: int) -> None:
        """Cut the interval that is open: something happened to an item."""
        if self._over or self._meter is None:
            return
        self._meter.mark()
        self._owners.append(self._owners[-1])
        self._events[len(self._owners) - 1] = (key, what, item)

    @contextmanager
    def _replayed(self, call: Call, survey: Survey | None) -> Iterator[None]:
        """The recomputation of a region: same nested calls, everything kept alive, saved storages counted."""
        if "again" in call.marks:  # a second backward over the same graph
            self._retained = True
            yield
            return
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        pack_outer, unpack_outer = outer
        flops = FlopTally()
        before = self._flops_before = {call.key: (0, 0)}
        slots: list[weakref.ref[_Slot]] = []

        def pack(tensor: torch.Tensor) -> Any:
            self._count_saved(tensor)
            for inner in self._stack:
                total, besides = before[inner.key]
                inner.flops, inner.besides = flops.total - total, flops.besides - besides
            slot = _Slot(pack_outer(tensor) if survey is None else survey.pack(tensor, pack_outer))
            slots.append(weakref.ref(slot))
            return slot

        def unpack(slot: _Slot) -> Any:
            return unpack_outer(slot.packed)

        inside = [c for c in self._calls if c is not call and c.within(call)]
        self._replay, self._stack = iter(inside), [call]
        around = _Held()
        assert self._meter is not None
        self._meter.hold(around, RNG_STATE_BYTES)  # the checkpoint keeps the present random state aside meanwhile
        call.marks["again"] = self.mark(call.key, "again")
        began = time.perf_counter()
        try:
            with (
                survey.recompute_run() if survey is not None else nullcontext(),
                saved_tensors_hooks(pack, unpack),
                flops if self._count_flops else nullcontext(),
            ):
                yield
            if survey is not None:
                call.items = survey.items()
        finally:
            call.seconds = time.perf_counter() - began
            self._replay, self._stack = None, []
            call.marks["again_out"] = self.mark(call.key, "again_out")
            if any(not isinstance(mode, ThreadedMode) for mode in _get_current_dispatch_mode_stack()):
                for slot in filter(None, (ref() for ref in slots)):
                    slot.packed = None

    def _run_again(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._replay is not None
        call = next(self._replay, None)
        if call is None or call.unit != unit:
            return original(*args, **kwargs)  # another path than in forward: the self-check of the unit's business
        call.inputs = self._storages((args, kwargs))
        self._stack.append(call)
        call.marks["again"] = self.mark(call.key, "again")
        flops = FlopTally.active()
        self._flops_before[call.key] = (flops.total, flops.besides) if flops else (0, 0)
        began = time.perf_counter()
        try:
            out = original(*args, **kwargs)
        finally:
            self._stack.pop()
        call.seconds = time.perf_counter() - began
        call.outputs = self._ordered(out)
        call.marks["again_out"] = self.mark(call.key, "again_out")
        return out

    def _count_saved(self, tensor: torch.Tensor) -> None:
        # A parameter that FSDP2 has gathered is another storage than the model's, and empty until backward.
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return
        if self._stack and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._resident:
                self._stack[-1].saved[self._identify(storage)] = storage.nbytes()

    def _storages(self, tree: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._resident:
                    found[self._identify(storage)] = storage.nbytes()
        return found

    def _ordered(self, tree: Any) -> list[int]:
        return [
            self._identify(leaf.untyped_storage())
            for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        ]

    def _identify(self, storage: torch.UntypedStorage) -> int:
        """A number for a storage that is never used again, unlike its address."""
        number = self._ids.get(storage)
        if number is None:
            self._next_id += 1
            number = self._ids[storage] = self._next_id
        return int(number)


class _Slot:
    """What the graph of a recomputation holds in place of a saved tensor.

    That graph has no backward of its own and goes at once, unless somebody keeps it: `FlopCounterMode` does, by hooks
    on every module's tensors, and then the step would hold what all recomputations saved until its end. So under
    somebody else's dispatch mode slots are emptied when the recomputation is over.
    """

    __slots__ = ("__weakref__", "packed")

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    @property
    def handle(self) -> Any:
        """That of a survey's stand-in, which looks for it in the graph."""
        return getattr(self.packed, "handle", None)


class _Held:
    """Owns bytes that a meter is told of, as long as it lives."""


class Region:
    """Observes the runs of one recomputed call (see `actions.recompute.RegionObserver`)."""

    stops_early = False

    def __init__(self, recorder: StepRecorder, call: Call, survey: Survey | None = None) -> None:
        self._recorder = weakref.ref(recorder)
        self._call, self._survey = call, survey

    @contextmanager
    def forward_run(self) -> Iterator[None]:
        """`StepRecorder.enter` has opened the call; a survey wants to see it, and autocast may."""
        recorder = self._recorder()
        with (
            self._survey.forward_run() if self._survey is not None else nullcontext(),
            recorder._casts.watched(recorder._stack) if recorder is not None else nullcontext(),
        ):
            yield

    @contextmanager
    def recompute_run(self) -> Iterator[None]:
        """Count what the recomputation saves, as long as the step is being recorded."""
        recorder = self._recorder()
        if recorder is None:
            yield
        else:
            with recorder._replayed(self._call, self._survey):
                yield

    def recomputed(self, out: Any) -> None:
        """Remember which storages the recomputation returned."""
        recorder = self._recorder()
        if recorder is not None and recorder.replaying:
            self._call.outputs = recorder._ordered(out)

    def close(self, out: Any) -> None:
        """The forward has returned."""
        recorder = self._recorder()
        if recorder is not None:
            recorder._stack.pop()
            recorder.leave(self._call, out)
