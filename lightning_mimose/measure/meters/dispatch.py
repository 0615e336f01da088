"""The meter of a CPU whose profiler is not free: a mode that sees what operators return."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from lightning_mimose.measure.accumulation import in_place_gradients
from lightning_mimose.measure.interval import Allocator, Climb, Interval
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.measure.scratch import scratch_bytes
from lightning_mimose.parts import leaves_in, storages_in, storages_of


class DispatchMeter(ThreadedMode):
    """Counts the storages that operators return, and learns what their kernels use besides (see `scratch`).

    The parameters that FSDP2 gathers have storages that last, and that it fills and empties; what it copies into is
    filled. It sees memory go in whichever thread that happens, which the profiler does not: gloo's own threads are
    often the last to let go of what a collective was given.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._climb = Climb()
        self._known: dict[int, tuple[int, weakref.ref[Any] | None]] = {}
        """What is alive, by its address: its bytes, and what tells when it goes."""
        self._gathered: dict[int, torch.UntypedStorage] = {}
        self._followed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._intervals: list[Interval] = []
        self.sees_old_frees = False
        self.allocator: Allocator | None = None
        self.older: list[bool] = []

    def start(self) -> None:
        """Enter the mode."""
        self.__enter__()

    def mark(self) -> None:
        """Close the current interval."""
        self._notice_emptied()
        self._intervals.append(self._climb.closed())

    def hold(self, owner: object, nbytes: int) -> None:
        """Count what no operator returned."""
        self._climb.changes(nbytes)
        self._know(id(owner), nbytes, owner)

    def ask(self, storage: torch.UntypedStorage) -> None:
        """No operator has returned it since the start."""
        self.older.append(storage._cdata not in self._known)

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Follow them as if an operator had returned them."""
        for storage in storages:
            if storage._cdata not in self._known:
                self._know(storage._cdata, storage.nbytes(), storage)
        self.sees_old_frees = True

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Lower the curve when one of them goes."""
        for storage in storages:
            key = storage._cdata
            if key not in self._followed and storage.device.type == "cpu" and storage.nbytes():
                self._followed[key] = weakref.ref(storage, partial(self._lower, storage.nbytes()))

    def expect_free(self) -> None:
        """The next operator will see it."""

    def stop(self) -> list[Interval]:
        """Leave the mode."""
        self._followed.clear()
        self.__exit__(None, None, None)
        self.mark()
        self._known.clear()
        self._gathered.clear()
        return self._intervals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the storages of the results that were not seen before."""
        kwargs = kwargs or {}
        if self._gathered:
            self._notice_emptied()
        if func.namespace == "fsdp" and "split_with_sizes_copy" in str(func):
            self._notice_filled(kwargs.get("out"))
        out = in_place_gradients(func, args, kwargs)  # before anything here holds what it looks at the holders of
        leaves = leaves_in((args, kwargs))
        given = {storage._cdata for storage in storages_of(leaves)}
        scratch = scratch_bytes(func, args, kwargs, leaves)
        out = func(*args, **kwargs) if out is None else out
        for storage in storages_in(out):
            key = storage._cdata
            if key not in given and key not in self._known:
                self._climb.changes(storage.nbytes())
                self._know(key, storage.nbytes(), storage)
        self._climb.takes_for_a_moment(scratch)
        return out

    def _know(self, key: int, nbytes: int, owner: object) -> None:
        # A finalizer does the same, and takes several times as long.
        self._known[key] = nbytes, weakref.ref(owner, partial(self._freed, key))

    def _freed(self, key: int, _: object = None) -> None:
        if key in self._known:
            self._lower(self._known.pop(key)[0])

    def _lower(self, nbytes: int, _: object = None) -> None:
        self._climb.changes(-nbytes)

    def _notice_filled(self, tree: Any) -> None:
        for storage in storages_in(tree):
            key = storage._cdata
            if key not in self._known:
                self._climb.changes(storage.nbytes())
                self._known[key] = storage.nbytes(), None
            self._gathered[key] = storage

    def _notice_emptied(self) -> None:
        for key in [key for key, storage in self._gathered.items() if not storage.nbytes()]:
            del self._gathered[key]
            self._freed(key)


class BlindMeter(DispatchMeter):
    """Enters no mode and sees nothing, so that whoever stops it has measured nothing.

    Under a mode torch.compile runs what it would have compiled operator by operator, with other last bits.
    """

    def start(self) -> None:
        """Nothing begins."""

    def stop(self) -> list[Interval]:
        """No interval, however many were opened."""
        self._followed.clear()
        self._known.clear()
        return []
