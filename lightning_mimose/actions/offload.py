"""Offload: what a unit saved goes to host memory when its forward is over, and is back before its backward begins.

Copies are made of whole storages, when the forward returns: what happens to a tensor until then is what autograd would
have kept, and tensors that share memory share a copy. On CUDA they run on a stream of their own, beside the forward of
the next unit; when that is over the copies are waited for and the originals let go of. They are fetched when the
backward of the unit that ran next begins, beside that. Elsewhere the same code runs without streams. Arguments,
parameters and buffers stay: somebody else holds them anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.actions.lean.handles import Handle, Kept, Rebuilt, Use, base_of, is_plain, unpack
from lightning_mimose.actions.lean.storages import Storages
from lightning_mimose.parts import leaves_in

SMALL_BYTES = 4096
"""A smaller storage is not worth a copy."""


class HostMemory:
    """Host memory that copies may take: page-locked for an accelerator, and bounded.

    Torch keeps freed page-locked memory for the next copy of its size, so nothing is kept here.

    Args:
        budget_bytes: How much there may be at once.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        """What finalisers gave back: they may run anywhere, also where the lock is held."""

    @property
    def used_bytes(self) -> int:
        """What copies take now."""
        with self._lock:
            self._drain()
            return self._used_bytes

    def _drain(self) -> None:
        while self._freed:
            self._used_bytes -= self._freed.popleft()

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for a copy; None if there is none left."""
        with self._lock:
            self._drain()
            if self._used_bytes + _taken(nbytes, device) > self.budget_bytes:
                return None
            self._used_bytes += _taken(nbytes, device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def give_back(self, nbytes: int, device: torch.device) -> None:
        """A copy is gone."""
        self._freed.append(_taken(nbytes, device))


def _taken(nbytes: int, device: torch.device) -> int:
    """Torch rounds page-locked memory up to powers of two."""
    return 1 << (nbytes - 1).bit_length() if device.type == "cuda" else nbytes


class Moved(Rebuilt):
    """The bytes of a storage: where they were until they are let go of, in host memory afterwards."""

    __slots__ = ("_arrived", "_copied", "_device", "_host", "_memory", "_storage", "_stream")

    def __init__(self, storage: torch.UntypedStorage, memory: HostMemory) -> None:
        super().__init__(storage.nbytes(), (storage.nbytes(),), 0)
        self._storage: torch.UntypedStorage | None = storage
        self._device, self._memory = storage.device, memory
        self._host: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._arrived: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def __del__(self) -> None:
        if self._host is not None:
            self._memory.give_back(self.nbytes, self._device)

    def move(self, stream: torch.cuda.Stream | None) -> bool:
        """Begin to copy to the host; False if there is no room for it."""
        assert self._storage is not None
        host = self._memory.take(self.nbytes, self._device)
        if host is None:
            return False
        here = _bytes_of(self._storage)
        if stream is None:
            host.copy_(here)
        else:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                host.copy_(here, non_blocking=True)
                self._copied = stream.record_event()
        self._host, self._stream = host, stream
        return True

    def leave(self) -> None:
        """Let go of the original: what comes after, on the stream that wrote it, waits for the copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._storage = None

    def fetch(self) -> None:
        """Begin to copy back."""
        if self._storage is not None or self._arrived is not None or self._memo is not None:
            return
        assert self._host is not None
        if self._stream is None:
            self._arrived = self._host.to(self._device, copy=True), None
            return
        now = torch.cuda.current_stream(self._device)
        back = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            back.copy_(self._host, non_blocking=True)
            self._arrived = back, self._stream.record_event()

    def _made(self) -> torch.Tensor:
        if self._storage is not None:
            return _bytes_of(self._storage)
        self.fetch()
        back = self._arrive()
        assert back is not None
        return back

    def _arrive(self) -> torch.Tensor | None:
        """What is on its way, once it is there: its memory must not go to others before."""
        if self._arrived is None:
            return None
        (back, event), self._arrived = self._arrived, None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return back

    def forget(self) -> None:
        """Let go of what came back."""
        super().forget()
        self._arrive()


class Window(Handle):
    """A saved tensor: where it lies in a storage that may be moved."""

    __slots__ = ("__weakref__", "_dtype", "_geometry", "_kept", "moved")

    def __init__(self, moved: Moved, tensor: torch.Tensor) -> None:
        super().__init__(tensor.nbytes, tuple(tensor.shape), 0)
        self.moved = moved
        self._dtype, self._geometry = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        self._kept: Kept | None = Kept(tensor)

    @property
    def rebuilt(self) -> Rebuilt:
        """The storage."""
        return self.moved

    @property
    def is_intact(self) -> bool:
        """Whether the tensor was not changed since it was saved."""
        return self._kept is None or self._kept.is_intact

    def leave(self) -> None:
        """Read it from the copy from now on."""
        self._kept = None

    def value(self) -> torch.Tensor:
        """The tensor."""
        if self._kept is not None:
            return self._kept.value()
        flat = self.moved.value()
        whole = flat.numel() // self._dtype.itemsize * self._dtype.itemsize
        return flat[:whole].view(self._dtype).as_strided(*self._geometry)


@dataclass
class _Group:
    """What one unit saved."""

    moved: list[weakref.ref[Moved]] = field(default_factory=list)
    windows: list[weakref.ref[Window]] = field(default_factory=list)

    def leave(self) -> None:
        """Let go of the originals, but for those that were changed since: autograd refuses them in backward."""
        windows = [window for ref in self.windows if (window := ref()) is not None]
        changed = {id(window.moved) for window in windows if not window.is_intact}
        for window in windows:
            if id(window.moved) not in changed:
                window.leave()
        for ref in self.moved:
            moved = ref()
            if moved is not None and id(moved) not in changed:
                moved.leave()


class Offloader:
    """Moves what units saved; a unit's copies are fetched when the backward of the one that ran after it begins.

    Args:
        memory: Where copies go.
        device: Where the step runs; tensors elsewhere stay where they are.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._latest, self._waiting = _Group(), _Group()

    def begin(self) -> None:
        """A step begins."""
        self._latest, self._waiting = _Group(), _Group()

    def _is_here(self, device: torch.device) -> bool:
        mine = self._device
        return device.type == mine.type and (mine.index is None or device.index == mine.index)

    @contextmanager
    def around(self, held: Iterable[Any]) -> Iterator[None]:
        """Around a unit's forward; what it saved is copied afterwards.

        Args:
            held: Tensors that somebody else keeps alive: arguments, parameters, buffers.
        """
        kept = Storages(held)
        storages: dict[int, Moved] = {}
        windows: list[Window] = []

        def pack(tensor: torch.Tensor) -> Handle | Use:
            if not _is_movable(tensor) or not self._is_here(tensor.device):
                return Kept(tensor)
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALL_BYTES or storage in kept:
                return Kept(tensor)
            moved = storages.get(storage._cdata)
            if moved is None:  # by its address: it lives until the unit is done
                moved = storages[storage._cdata] = Moved(storage, self._memory)
            window = Window(moved, tensor)
            windows.append(window)
            return Use(window, moved)

        with saved_tensors_hooks(pack, unpack):
            yield
        # A tensor that was changed in the unit is kept, to be refused in backward as autograd does it.
        changed = {id(window.moved) for window in windows if not window.is_intact}
        gone = [moved for moved in storages.values() if id(moved) not in changed and moved.move(self._stream)]
        numbers = set(map(id, gone))
        self._latest = _Group(
            [weakref.ref(moved) for moved in gone],
            [weakref.ref(window) for window in windows if id(window.moved) in numbers],
        )

    def ran(self, out: Any) -> None:
        """A unit has run: what the one before it saved is on the host now, and fetched when backward reaches this."""
        waiting, self._waiting, self._latest = self._waiting, self._latest, _Group()
        if not waiting.moved:
            return
        waiting.leave()
        for leaf in leaves_in(out):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(partial(_fetch, waiting.moved))


def _fetch(waiting: list[weakref.ref[Moved]], _: Any) -> None:
    fetched = [moved for ref in waiting if (moved := ref()) is not None and not moved.is_over]
    for moved in fetched:
        moved.fetch()
    if fetched:
        # A pass over a part of the graph may never ask for them.
        done = partial(_let_go, waiting)
        torch.autograd.Variable._execution_engine.queue_callback(done)


def _let_go(waiting: list[weakref.ref[Moved]]) -> None:
    for ref in waiting:
        moved = ref()
        if moved is not None:
            moved.forget()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _is_movable(tensor: torch.Tensor) -> bool:
    """Whether its storage says all there is to know, and nobody holds it as a parameter (or a view of one)."""
    if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    base = base_of(tensor)
    return not base.requires_grad or base.grad_fn is not None
