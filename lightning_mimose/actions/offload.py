"""Offload: what a unit saved goes to host memory when its forward is over, and is back before its backward begins.

Copies are made of whole storages, when the forward returns: what happens to a tensor until then is what autograd would
have kept, and tensors that share memory share a copy. On CUDA they run on a stream of their own, beside the forward of
the next unit; they are fetched when the backward of the unit that ran next begins, beside that. Elsewhere the same
code runs without streams. Arguments, parameters and buffers stay: somebody else holds them anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_mimose.actions.lean.handles import Handle, Kept, Rebuilt, Use, unpack

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
        self.used_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for a copy; None if there is none left."""
        with self._lock:
            if self.used_bytes + nbytes > self.budget_bytes:
                return None
            self.used_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def give_back(self, nbytes: int) -> None:
        """A copy is gone."""
        with self._lock:
            self.used_bytes -= nbytes


class Moved(Rebuilt):
    """The bytes of a storage: where they were until they are moved, in host memory afterwards."""

    __slots__ = ("_arrived", "_device", "_host", "_memory", "_storage", "_stream")

    def __init__(self, storage: torch.UntypedStorage, memory: HostMemory) -> None:
        super().__init__(storage.nbytes(), (storage.nbytes(),), 0)
        self._storage: torch.UntypedStorage | None = storage
        self._device, self._memory = storage.device, memory
        self._host: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._arrived: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def __del__(self) -> None:
        if self._host is not None:
            self._memory.give_back(self.nbytes)

    def move(self, stream: torch.cuda.Stream | None) -> bool:
        """Copy to the host, and let go of the storage; False if there is no room for it."""
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
            here.record_stream(stream)  # its memory is not given to others before the copy is done
        self._host, self._stream, self._storage = host, stream, None
        return True

    def fetch(self) -> None:
        """Begin to copy back."""
        if self._host is None or self._arrived is not None or self._memo is not None:
            return
        if self._stream is None:
            self._arrived = self._host.to(self._device, copy=True), None
            return
        with torch.cuda.stream(self._stream):
            back = self._host.to(self._device, non_blocking=True)
            self._arrived = back, self._stream.record_event()

    def _made(self) -> torch.Tensor:
        if self._storage is not None:
            return _bytes_of(self._storage)
        self.fetch()
        assert self._arrived is not None
        (back, event), self._arrived = self._arrived, None
        if event is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(event)
            back.record_stream(now)
        return back

    def forget(self) -> None:
        """Let go of what came back."""
        super().forget()
        self._arrived = None


class Window(Handle):
    """A saved tensor: where it lies in a storage that may be moved."""

    __slots__ = ("_dtype", "_geometry", "_kept", "moved")

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


class Offloader:
    """Moves what units saved; a unit's copies are fetched when the backward of the one that ran after it begins.

    Args:
        memory: Where copies go.
        device: Where the step runs.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moved: list[weakref.ref[Moved]] = []
        self._waiting: list[weakref.ref[Moved]] = []

    def begin(self) -> None:
        """A step begins."""
        self._moved, self._waiting = [], []

    @contextmanager
    def around(self, held: Iterable[Any]) -> Iterator[None]:
        """Around a unit's forward; what it saved is moved afterwards.

        Args:
            held: Tensors that somebody else keeps alive: arguments, parameters, buffers.
        """
        kept = {t.untyped_storage()._cdata for t in held if isinstance(t, torch.Tensor) and _is_plain(t)}
        storages: dict[int, Moved] = {}
        windows: list[Window] = []

        def pack(tensor: torch.Tensor) -> Handle | Use:
            if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
                return Kept(tensor)
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALL_BYTES or storage._cdata in kept:
                return Kept(tensor)
            moved = storages.get(storage._cdata)
            if moved is None:  # by its address: it lives until it is moved
                moved = storages[storage._cdata] = Moved(storage, self._memory)
            window = Window(moved, tensor)
            windows.append(window)
            return Use(window, moved)

        with saved_tensors_hooks(pack, unpack):
            yield
        # A tensor that was changed since is kept, to be refused in backward as autograd does it.
        changed = {id(window.moved) for window in windows if not window.is_intact}
        gone = [moved for moved in storages.values() if id(moved) not in changed and moved.move(self._stream)]
        moved_away = {id(moved) for moved in gone}
        for window in windows:
            if id(window.moved) in moved_away:
                window.leave()
        self._moved = [weakref.ref(moved) for moved in gone]

    def ran(self, out: Any) -> None:
        """A unit has run: when backward reaches what it returned, fetch what the unit before it had saved."""
        waiting, self._waiting, self._moved = self._waiting, self._moved, []
        if not waiting:
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(partial(_fetch, waiting))


def _fetch(waiting: list[weakref.ref[Moved]], _: Any) -> None:
    fetched = [moved for ref in waiting if (moved := ref()) is not None]
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


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
