"""The collector: what every unit costs, measured in the steps that run anyway.

A sheltered step recomputes its shelter units, so each of them runs a second time in backward with everything
it saves kept alive. Measuring there costs no extra forward. Every unit's call gets marks on the meter's curve
(its forward, its recomputation, the start of its backward), and a counting hook that delegates to the
checkpoint's own sees which storages each nested unit saves (see `replay`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from lightning_mimose.measure.call import NOTHING_LEFT, RNG_STATE_BYTES, Call, Left
from lightning_mimose.measure.casts import CachedCasts
from lightning_mimose.measure.clock import Clock
from lightning_mimose.measure.curve import Curve, GradientBytes
from lightning_mimose.measure.cycles import Cycles
from lightning_mimose.measure.region import Region
from lightning_mimose.measure.replay import Replays, Survey
from lightning_mimose.measure.saved import saved_in_graph
from lightning_mimose.measure.standins import StandIns
from lightning_mimose.measure.storages import Storages, Tensors
from lightning_mimose.measure.trace import GOES, IS_GONE, IS_OVER, LET_GO, StepTrace
from lightning_mimose.menu import RECOMPUTE
from lightning_mimose.parts import leaves_in, storages_in
from lightning_mimose.predict.shapes import NEVER


class StepRecorder:
    """Records one step. Units report their calls; the engine reports the step's own marks.

    Args:
        device: Where the step runs. The meter is chosen at `start`, when it is known whether a profiler runs.
        resident: Storages that are not activations (parameters, buffers), left out of what units save.
        gradient_bytes: Tells the gradients alive now.
        count_flops: Whether to count operations in recomputations.
        profile: Whether torch's profiler is free to be used.
        compiles: See `meter.make_meter`.
        gradients_stay: See `Curve`.
        renewed: See `Storages`.

    Attributes:
        replays: The step's recomputations.
        inputs: What regions hold of what they are given.
    """

    def __init__(
        self,
        device: torch.device,
        resident: Sequence[torch.Tensor],
        gradient_bytes: GradientBytes,
        *,
        count_flops: bool = True,
        profile: bool = True,
        compiles: Callable[[], bool] = bool,
        gradients_stay: bool = False,
        renewed: Tensors | None = None,
    ) -> None:
        self._curve = Curve(device, gradient_bytes, profile=profile, compiles=compiles, gradients_stay=gradients_stay)
        self._storages = Storages(resident, self._curve.ask, renewed)
        self._calls: list[Call] = []
        self._cycles = cycles = Cycles()
        self.replays = Replays(
            self._curve,
            self._storages,
            self._calls,
            Clock(device),
            count_flops=count_flops,
            searching=lambda: cycles.searching,
        )
        self._stack: list[Call] = []
        self._occurrences: dict[str, int] = {}
        self._outputs: list[tuple[Call, int, weakref.ref[Any]]] = []
        self._saved_between: set[int] = set()
        self._outlived: frozenset[int] = frozenset()
        self._casts = CachedCasts(self)
        self._regions: list[weakref.ref[Region]] = []
        self._saves_results = False
        recorder = weakref.ref(self)

        def let_go(number: int, now: bool) -> None:
            live = recorder()
            # What is in a cycle goes whenever Python looks for those: others hold it as long as they like.
            if live is not None and not live._curve.over and not live._cycles.searching:
                live._let_go(number, now=now)

        self.inputs = StandIns(self._storages, let_go)
        self._ends: dict[int, int] = {}

    # --- the step ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the meter; the first interval belongs to the step."""
        self._cycles.watch()
        self._curve.start()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Name tensors that are older than the start and are to be seen when they go."""
        self._curve.adopt(storages_in(list(tensors)))

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Name tensors that are resident and may be replaced by others in the step (`parameter.data = ...`)."""
        self._curve.follow(storages_in(list(tensors)))

    def begin_backward(self, loss: torch.Tensor | None = None) -> None:
        """Mark the start of a backward pass, and note who holds what at this moment.

        Units' outputs that are alive now are held by somebody. What operations outside regions saved is read off
        the graph of `loss`: a storage that only regions hold would be free if they were kept.
        """
        self.inputs.look()
        there = [each for each in self._outputs if each[2]() is not None]
        for call, number, _ in there:
            call.held.add(number)
        # What a region would have saved, and others hold: it goes in backward, mostly before the region runs again.
        self._outputs[:] = [each for each in there if each[1] in (each[0].region or each[0]).packed]
        if loss is not None and loss.grad_fn is not None:
            for tensor in saved_in_graph(loss.grad_fn):
                self._saved_between.update(self._storages.in_order(tensor))
        self.mark("step", "backward")
        self.replays.forward_goes_on()
        self.replays.begin_backward()

    def end_backward(self) -> None:
        """A backward pass is over: what its regions held is gone, and what is there others hold.

        But for inputs of regions whose graph somebody keeps.
        """
        kept = [region.call for region in (each() for each in self._regions) if region is not None]
        self._outlived = self._storages.alive().difference(*(call.inputs for call in kept))

    @property
    def interval(self) -> int | None:
        """The one that is open; None after the step, or in a recomputation."""
        return None if self._curve.over or self.replays.running else self._curve.latest

    def mark(self, owner: str, name: str) -> int:
        """Open an interval; returns its index."""
        return self._curve.mark(owner, name)

    def aside(self) -> AbstractContextManager[None]:
        """What happens inside is no part of the step; the interval that was open goes on afterwards."""
        return self._curve.aside()

    @property
    def sees_old_frees(self) -> bool:
        """Whether the meter sees memory go that is older than its start."""
        return self._curve.sees_old_frees

    def stop(self) -> StepTrace:
        """Stop the meter and return what was recorded; nothing, if nothing could be measured."""
        self._curve.over = True
        self._cycles.close()
        self._casts.finish(self._curve.latest + 1)
        for call in self._calls:
            if call.is_unseen:
                call.saved = dict(call.packed)
        for call in self._calls:  # what was lent to a region was lent to what is inside
            outer = call.parent
            while outer is not None:
                call.inputs.update((number, size) for number, size in outer.lent.items() if number in call.saved)
                outer = outer.parent
        measured = self._curve.stop()
        # What a call was given and that is older than the step (a memory that the loop carries on) is in no curve: that
        # it is held, or let go of, changes nothing.
        asked = zip(self._storages.asked, self._curve.older, strict=False)
        older = {number for number, is_older in asked if is_older}
        for call in self._calls if older else ():
            for held in (call.inputs, call.saved, call.packed):
                held.update(dict.fromkeys(held.keys() & older, 0))
        self.replays.tell_times()
        self.replays.close()
        self.inputs.close()
        self._storages.clear()
        self._outputs.clear()
        if measured is None:
            return StepTrace((), (), ())
        return StepTrace(
            tuple(self._calls),
            measured.marks,
            measured.intervals,
            frozenset(self._saved_between),
            measured.allocator,
            measured.aside_peak_bytes,
            self.replays.passes_apart,
            measured.pieces,
            self._outlived,
            {number: self._ends.get(number, NEVER) for number in self.inputs.followed},
            measured.asked,
            self._curve.ended,
        )

    # --- a unit's call in forward -----------------------------------------------------------------------------

    def run_kept(
        self,
        unit: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copied_bytes: Callable[[], int] = int,
        left: Callable[[], Left] = dict,
        stashed_bytes: Callable[[], int] = int,
    ) -> Any:
        """Run a call that is kept, or that is nested in a region.

        Args:
            unit: Name of the unit.
            original: Its own forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            copied_bytes: Tells what would be copied for its forward alone were it recomputed itself.
            left: Tells which activations it has left in attributes.
            stashed_bytes: Tells what would be copied for its recomputation.
        """
        if self.replays.running:
            return self.replays.run_inside(unit, original, args, kwargs, left)
        call = self.enter(unit, "keep", args, kwargs)
        call.copied_bytes, call.stashed_bytes = copied_bytes(), stashed_bytes()
        out: Any = None
        try:
            out = original(*args, **kwargs)
            return out
        finally:  # whoever calls it may catch its error, and go another way
            self._stack.pop()
            self.leave(call, out, left() if self._in_region else NOTHING_LEFT)

    def has_called(self, unit: str) -> bool:
        """Whether a unit was called in this step."""
        return unit in self._occurrences

    def enter(self, unit: str, action: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a call in forward."""
        self.replays.forward_goes_on()
        self.inputs.look()
        occurrence = self._occurrences.get(unit, 0)
        self._occurrences[unit] = occurrence + 1
        call = Call(unit, occurrence, self._stack[-1] if self._stack else None, action)
        call.inputs = self._storages.bytes_in((args, kwargs))
        call.first_pack = self.replays.packs
        self._calls.append(call)
        self._stack.append(call)
        call.marks["in"] = self.mark(call.key, "in")
        return call

    def leave(self, call: Call, out: Any, left: Left = NOTHING_LEFT) -> None:
        """End a call in forward, and mark the moment its backward begins."""
        self.inputs.look()
        if self.replays.packs > call.first_pack:
            call.last_pack = self.replays.packs - 1
        call.marks["out"] = self.mark(call.key, "out")
        recorder = weakref.ref(self)

        def begins(_: Any) -> None:
            live = recorder()
            if live is not None and "backward" not in call.marks:
                live.inputs.look()
                call.marks["backward"] = live.mark(call.key, "backward")

        for leaf in leaves_in(out):
            if isinstance(leaf, torch.Tensor):
                for storage in storages_in(leaf):
                    call.returned.append(self._number_until_backward(call, storage))
                    call.returned_bytes += storage.nbytes()
                if leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(begins)
        for place, tensors in left.items():
            call.left[place] = [self._number_until_backward(call, storage) for storage in storages_in(tensors)]
        results = chain(call.returned, *call.left.values())
        self._saves_results = self._saves_results or not call.packed.keys().isdisjoint(results)
        if self._saves_results and not self._in_region and not self.replays.in_backward:
            self._curve.expect_ends()

    def _let_go(self, number: int, *, now: bool) -> None:
        """Nobody but regions holds something that they were given; since the last look, or just now.

        Then the interval is cut there; not in backward, nor in the forward of a region, which tell nothing of a forward
        that keeps everything.
        """
        self._ends[number] = self._curve.latest
        if now and not self.replays.in_backward and not self._in_region:
            self._curve.cut("", LET_GO, number)

    def _goes(self, call: Call, number: int) -> None:
        """Nobody holds a result of a region, or of a call inside it, any more that the region would have saved.

        Kept, it is there all the same; recomputed, what comes after that is another stretch. What goes in the midst of
        a region tells nothing of a forward that keeps everything, and what is in a cycle goes whenever Python looks for
        those: then the interval that is open is cut.
        """
        in_backward = self.replays.in_backward
        elsewhere = self.replays.running or (torch._C._current_graph_task_id() != -1 and not in_backward)
        if elsewhere or self._in_region or self._cycles.searching:
            self._curve.cut(call.key, IS_GONE, number)
        else:
            self._curve.ends(call.key, number, in_backward=in_backward)

    @property
    def _in_region(self) -> bool:
        return any(call.action == RECOMPUTE for call in self._stack)

    def _number_until_backward(self, call: Call, storage: torch.UntypedStorage) -> int:
        number, recorder, region = self._storages.number(storage), weakref.ref(self), call.region

        def goes(_: Any) -> None:
            live = recorder()
            if live is None or live._curve.over or (live.replays.in_backward and number not in call.held):
                return
            # Once for all views of it, and all calls in a region that have returned it.
            if region is not None and "out" in region.marks and number in region.packed and number not in region.gone:
                live._goes(region, number)
                region.gone[number] = live._curve.latest
            call.gone.setdefault(number, live._curve.latest)

        self._outputs.append((call, number, weakref.ref(storage, goes)))
        return number

    # --- a region ---------------------------------------------------------------------------------------------

    def region(
        self,
        unit: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        survey: Survey | None = None,
        lent: Sequence[torch.Tensor] = (),
        stashed_bytes: int = 0,
    ) -> Region:
        """Begin a recomputed call in forward; the region observes its runs.

        Args:
            unit: Name of the unit.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            survey: Looks at what it saves.
            lent: What its graph holds besides them.
            stashed_bytes: What is copied for its recomputation, of what its forward writes.
        """
        call = self.enter(unit, RECOMPUTE, args, kwargs)
        call.stashed_bytes = stashed_bytes
        call.lent = self._storages.bytes_in(lent)
        call.inputs.update(call.lent)
        region = Region(self, call, survey)
        recorder = weakref.ref(self)

        def drops(_: Any) -> None:
            live = recorder()
            if live is not None and not live._curve.over:
                call.marks["dropped"] = live._curve.latest
                # What goes with its last reference does so at the same point of every step, and what comes after that
                # is another stretch; what is in a cycle goes whenever Python looks for those.
                if not live._cycles.searching:
                    if live.replays.in_backward:
                        live._curve.cut(call.key, IS_OVER, 0)
                    else:
                        live.mark("step", f"{call.key} dropped")

        self._regions.append(weakref.ref(region, drops))
        if survey is not None:

            def happens(what: str, item: int) -> None:
                live = recorder()
                if live is not None and not (what == GOES and live._cycles.searching):
                    live._curve.cut(call.key, what, item)

            survey.begin(self._storages.number, happens)
        self._curve.hold(region, RNG_STATE_BYTES)  # the region's closure, and so its random state, lives as long
        return region

    @contextmanager
    def region_forward(self, survey: Survey | None) -> Iterator[None]:
        """Around a region's run in forward: a survey wants to see it, and what it would save is noted."""
        looked, call = survey.forward_run() if survey is not None else nullcontext(), self._stack[-1]
        with looked, self._casts.watched(self._stack), self.replays.packing(call), self.replays.timed(call):
            yield

    def region_again(self, call: Call, out: Any, left: Left) -> None:
        """A region's recomputation has returned: remember which storages."""
        if self.replays.running:
            self.replays.finds_again(call, out, left)

    def region_left(self, call: Call, out: Any, left: Left) -> None:
        """A region's forward has returned."""
        self._stack.pop()
        self.leave(call, out, left)
