"""The meter of a CPU: the memory events of torch's profiler."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as _profiler
from torch.autograd.profiler import profile, record_function

from lightning_mimose.measure.interval import Allocator, Climb, Interval

_MARK, _ASK, _GONE = "lightning_mimose/", "lightning_mimose/asked", "lightning_mimose/gone "
_session = threading.Lock()
"""Held while a `ProfilerMeter` runs."""


def is_free() -> bool:
    """Whether a session may be opened now: there is one in a process, and a second one ends it with a crash.

    One that another thread has opened counts; torch's first answer is for this thread, the second for sessions that
    were opened from Python.
    """
    taken = torch._C._autograd._profiler_enabled() or getattr(_profiler, "_is_profiler_enabled", False)
    return not taken and not _session.locked()


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
    others), so the curve is that of the memory allocated since, less what was followed and has gone.
    """

    def __init__(self) -> None:
        self._profile: profile = _MemoryProfile(use_kineto=True, profile_memory=True)
        self._running = False
        self.sees_old_frees = False
        self.allocator: Allocator | None = None
        self.older: list[bool] = []
        self._asked: list[int] = []
        self._adopted: dict[int, int] = {}
        self._followed: list[weakref.ref[torch.UntypedStorage]] = []

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

    def ask(self, storage: torch.UntypedStorage) -> None:
        """Put an event into the trace, where it will be known what there was."""
        self._asked.append(storage.data_ptr())
        with record_function(_ASK):
            pass

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """The profiler knows what was made while another session of it ran, as a step's own gradients were."""
        self._adopted = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.sees_old_frees = True

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Have an event put into the trace when one of them goes, whoever allocated it."""
        for storage in {storage._cdata: storage for storage in storages if _is_here(storage)}.values():
            self._followed.append(weakref.ref(storage, partial(_goes, storage.nbytes())))

    def expect_free(self) -> None:
        """The profiler will see it."""

    def stop(self) -> list[Interval]:
        """Stop the profiler and replay its trace."""
        self._followed.clear()
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
        alive: dict[int, int] = dict(self._adopted)
        climb = Climb()
        for event in sorted(_memory_and_marks(results.experimental_event_tree()), key=lambda e: e.start_time_ns):
            if event.name == _MARK:
                intervals.append(climb.closed())
                continue
            if event.name == _ASK:
                self.older.append(self._asked[len(self.older)] not in alive)
                continue
            if event.name.startswith(_GONE):
                climb.changes(-int(event.name.removeprefix(_GONE)))
                continue
            fields = event.extra_fields
            if fields.alloc_size > 0:
                alive[fields.ptr] = fields.alloc_size
                climb.changes(fields.alloc_size)
            elif fields.ptr in alive:
                climb.changes(-alive.pop(fields.ptr))
        intervals.append(climb.closed())
        if len(self.older) < len(self._asked):  # asked in a thread that the profiler does not see
            self.older = [False] * len(self._asked)
        return intervals[1:]


def _is_here(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.nbytes() > 0


def _goes(nbytes: int, _: object) -> None:
    # Its size is in the name: what goes in a thread that the profiler does not see leaves no event.
    with record_function(f"{_GONE}{nbytes}"):
        pass


def _memory_and_marks(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        if event.name in ("[memory]", _MARK, _ASK) or event.name.startswith(_GONE):
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
