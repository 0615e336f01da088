"""Meters: the live bytes of one step as a curve, cut by marks.

A meter is started, marked at points of interest, and stopped; it returns one `Interval` per mark. On an
accelerator the allocator's counters are read on the host, so measuring costs no synchronisation. On CPU torch
has no such counter: the profiler's memory events are exact and cost about a tenth of the step, more where
kernels have little to do. While a profiler of the user's own is running, which a nested one would silently
empty, a dispatch mode counts instead.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as _profiler
from torch.autograd.profiler import profile, record_function

from lightning_mimose.measure import counters
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.measure.scratch import scratch_bytes
from lightning_mimose.parts import storages_in

_MARK = "lightning_mimose/"
_session = threading.Lock()
"""Held while a `ProfilerMeter` runs."""


@dataclass(frozen=True)
class Interval:
    """Live bytes between one mark and the next, relative to the meter's start.

    Attributes:
        level_bytes: Live bytes at the mark that opens the interval.
        peak_bytes: Largest live bytes until the next mark (or the stop).
        rest_bytes: Largest of them after the first memory went; None where none did, or a meter cannot tell.
    """

    level_bytes: int
    peak_bytes: int
    rest_bytes: int | None = None


class Allocator(NamedTuple):
    """What the allocator of an accelerator had at most while a meter ran.

    Attributes:
        held_bytes: What it could not do without, see `counters.Counters`.
        reserved_bytes: What it had from the device.
    """

    held_bytes: int
    reserved_bytes: int


class Meter(Protocol):
    """What a meter can do; `start` opens the first interval, every `mark` another, `stop` returns them all.

    Attributes:
        sees_old_frees: Whether freeing memory that is older than the start lowers the curve.
        allocator: What the device's allocator had at most, None where none counts.
    """

    sees_old_frees: bool
    allocator: Allocator | None

    def start(self) -> None:
        """Begin, and open the first interval."""

    def mark(self) -> None:
        """Close the current interval and open the next."""

    def hold(self, owner: object, nbytes: int) -> None:
        """Told of bytes that no operator returns and that live as long as their owner: a generator's state."""

    def stop(self) -> list[Interval]:
        """End, and return every interval in order."""


def make_meter(device: torch.device, *, profile: bool = True) -> Meter:
    """The best meter for a device at this moment.

    Args:
        device: What is measured.
        profile: False where somebody else's profiler may start at any time; torch allows one.
    """
    if counters.exist(device):
        return AcceleratorMeter(device)
    # There is one session in a process, and a second one that another thread opens ends it with a crash. The first
    # question is answered per thread, the second for sessions that were opened from Python.
    taken = torch._C._autograd._profiler_enabled() or getattr(_profiler, "_is_profiler_enabled", False)
    if taken or not profile:
        return DispatchMeter()
    return DispatchMeter() if _session.locked() else ProfilerMeter()


def has_memory_counters(device: torch.device) -> bool:
    """Whether peaks can be measured on this device at all."""
    return not counters.exist(device) or counters.can_be_read(device)


class AcceleratorMeter:
    """Reads the caching allocator's own counters: what tensors ask for. Resets its peaks at every mark.

    Limitations:
        What is older than the step and goes in its midst (but for gradients) lowers the curve from there on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0
        self._level_bytes = 0
        self._intervals: list[Interval] = []
        self.sees_old_frees = True
        self.allocator: Allocator | None = None

    def start(self) -> None:
        """Reset the allocator's peaks and remember what there is."""
        counters.reset_peaks(self._device)
        self._start_bytes = self._level_bytes = counters.read(self._device).requested_bytes

    def mark(self) -> None:
        """Close the interval with the allocator's peak since the last mark."""
        now = counters.read(self._device)
        peak = now.requested_peak_bytes
        self._intervals.append(Interval(self._level_bytes - self._start_bytes, peak - self._start_bytes))
        held, reserved = self.allocator or (0, 0)
        self.allocator = Allocator(max(held, now.held_bytes), max(reserved, now.reserved_peak_bytes))
        counters.reset_peaks(self._device)
        self._level_bytes = now.requested_bytes

    def hold(self, owner: object, nbytes: int) -> None:
        """The host's memory is not the accelerator's."""

    def stop(self) -> list[Interval]:
        """Close the last interval."""
        self.mark()
        return self._intervals


class _MemoryProfile(profile):
    """A session that records memory and marks, and no operators: of these there are four times as many."""

    def _start_trace(self) -> None:
        # The scopes are an argument of the binding that `profile` does not hand on.
        self.entered = True
        _profiler._run_on_profiler_start()
        enable: Any = torch._C._autograd._enable_profiler
        enable(profile.config(self), self.kineto_activities, {RecordScope.USER_SCOPE})
        self.profiling_start_time_ns = time.perf_counter_ns()


class ProfilerMeter:
    """Replays the memory events of torch's profiler: exact on CPU, kernel scratch included.

    Frees of blocks that were allocated before the start are left out (the profiler knows some of them and not
    others), so the curve is that of the memory allocated since.
    """

    def __init__(self) -> None:
        self._profile: profile = _MemoryProfile(use_kineto=True, profile_memory=True)
        self._running = False
        self.sees_old_frees = False
        self.allocator: Allocator | None = None

    def start(self) -> None:
        """Start the profiler; waits for another thread's session to end, if one began since `make_meter` looked."""
        _session.acquire()
        self._running = True
        with _quiet_kineto():
            self._profile.__enter__()
        _set_cpp_log_level(2)
        self.mark()

    def mark(self) -> None:
        """Put an event into the trace."""
        with record_function(_MARK):
            pass

    def hold(self, owner: object, nbytes: int) -> None:
        """The profiler has seen it."""

    def stop(self) -> list[Interval]:
        """Stop the profiler and replay its trace."""
        if self._running:
            self._running = False
            try:
                with _quiet_kineto():
                    self._profile.__exit__(None, None, None)
                _set_cpp_log_level(None)
            finally:
                _session.release()
        results = self._profile.kineto_results
        if results is None:
            return []
        intervals: list[Interval] = []
        alive: dict[int, int] = {}
        level = opened = peak = 0
        rest: int | None = None
        for event in sorted(_memory_and_marks(results.experimental_event_tree()), key=lambda e: e.start_time_ns):
            if event.name == _MARK:
                intervals.append(Interval(opened, peak, rest))
                opened = peak = level
                rest = None
                continue
            fields = event.extra_fields
            if fields.alloc_size > 0:
                alive[fields.ptr] = fields.alloc_size
                level += fields.alloc_size
                peak = max(peak, level)
                rest = None if rest is None else max(rest, level)
            elif fields.ptr in alive:
                level -= alive.pop(fields.ptr)
                rest = level if rest is None else rest
        intervals.append(Interval(opened, peak, rest))
        return intervals[1:]


def _memory_and_marks(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        if event.name in ("[memory]", _MARK):
            yield event
        stack.extend(event.children)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto writes a line to stderr at every start and stop unless told not to before its first use."""
    name = "KINETO_LOG_LEVEL"
    given = os.environ.get(name)
    if given is None:
        os.environ[name] = "99"
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(name, None)


def _set_cpp_log_level(level: int | None) -> None:
    """Silence (or, with None, restore) c10's warning that a block from before the profiling was freed.

    Freeing last step's gradients is no news to anybody, and there is no Python switch for it:
    https://github.com/pytorch/pytorch/blob/v2.8.0/c10/core/CPUAllocator.cpp#L245
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return
    if level is None:
        flag.value = _log_levels.pop() if _log_levels else flag.value
    else:
        _log_levels.append(flag.value)
        flag.value = max(level, flag.value)


_log_levels: list[int] = []


class DispatchMeter(ThreadedMode):
    """Counts the storages that operators return, and learns what their kernels use besides (see `scratch`).

    The parameters that FSDP2 gathers have storages that last, and that it fills and empties; what it copies into is
    filled. It sees memory go in whichever thread that happens, which the profiler does not: gloo's own threads are
    often the last to let go of what a collective was given.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._level = self._opened = self._peak = 0
        self._rest: int | None = None
        self._known: dict[int, int] = {}
        self._gathered: dict[int, torch.UntypedStorage] = {}
        self._intervals: list[Interval] = []
        self.sees_old_frees = False
        self.allocator: Allocator | None = None

    def start(self) -> None:
        """Enter the mode."""
        self.__enter__()

    def mark(self) -> None:
        """Close the current interval."""
        self._notice_emptied()
        self._intervals.append(Interval(self._opened, self._peak, self._rest))
        self._opened = self._peak = self._level
        self._rest = None

    def hold(self, owner: object, nbytes: int) -> None:
        """Count what no operator returned."""
        self._known[id(owner)] = nbytes
        self._level += nbytes
        self._reached(self._level)
        weakref.finalize(owner, self._freed, id(owner))

    def stop(self) -> list[Interval]:
        """Leave the mode."""
        self.__exit__(None, None, None)
        self.mark()
        self._gathered.clear()
        return self._intervals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the storages of the results that were not seen before."""
        kwargs = kwargs or {}
        self._notice_emptied()
        if func.namespace == "fsdp" and "split_with_sizes_copy" in str(func):
            self._notice_filled(kwargs.get("out"))
        inputs = {storage._cdata for storage in storages_in((args, kwargs))}
        scratch = scratch_bytes(func, args, kwargs)
        out = func(*args, **kwargs)
        for storage in storages_in(out):
            key = storage._cdata
            if key not in inputs and key not in self._known:
                self._known[key] = storage.nbytes()
                self._level += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        self._reached(self._level + scratch)
        return out

    def _reached(self, nbytes: int) -> None:
        self._peak = max(self._peak, nbytes)
        self._rest = None if self._rest is None else max(self._rest, nbytes)

    def _freed(self, key: int) -> None:
        if key in self._known:
            self._level -= self._known.pop(key)
            self._rest = self._level if self._rest is None else self._rest

    def _notice_filled(self, tree: Any) -> None:
        for storage in storages_in(tree):
            key = storage._cdata
            if key not in self._known:
                self._level += storage.nbytes()
                self._known[key] = storage.nbytes()
            self._gathered[key] = storage

    def _notice_emptied(self) -> None:
        for key in [key for key, storage in self._gathered.items() if not storage.nbytes()]:
            del self._gathered[key]
            self._freed(key)
