"""Weights that autocast has cast: its cache holds them until the region ends, whatever units do.

A recomputed unit keeps nothing, and yet the casts of its weights are there through the rest of the forward. To a kept
one they are no more memory: it saves the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.measure.call import Call


def may_be_cached(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is what autocast makes of a weight, and keeps; a cast of one's own looks the same."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or not torch.is_autocast_cache_enabled():
        return False
    leaf = node.next_functions[0][0]
    return leaf is not None and leaf.name() == "torch::autograd::AccumulateGrad"


class Marks(Protocol):
    """Who keeps the time, see `collector.StepRecorder`."""

    @property
    def interval(self) -> int | None:
        """The one that is open; None after the step, or in a recomputation."""

    def mark(self, owner: str, name: str) -> int:
        """Open an interval."""


class CachedCasts:
    """Watches the casts that regions save in forward: those that outlive their region are in the cache.

    When the cache ends all of them go at once, and a mark is made. Where they do not (an operation outside of units
    saved one of them too) it ended when the first of them went.

    Args:
        marks: Keeps the time. Not kept alive.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = weakref.ref(marks)
        self._saved: dict[int, tuple[list[Call], weakref.ref[Any], int]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._calls: list[Call] = []
        self._first: int | None = None
        """The interval in which the first of those that are watched went."""

    @contextmanager
    def watched(self, stack: list[Call]) -> Iterator[None]:
        """Around a region's forward.

        Args:
            stack: The calls that are under way, innermost last.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None or not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            yield
            return
        pack_outer, unpack_outer = outer

        def pack(tensor: torch.Tensor) -> Any:
            if may_be_cached(tensor):
                storage = tensor.untyped_storage()
                self._saved.setdefault(storage._cdata, (list(stack), weakref.ref(storage), storage.nbytes()))
            return pack_outer(tensor)

        try:
            with saved_tensors_hooks(pack, unpack_outer):
                yield
        finally:
            self._look()

    def finish(self, end: int) -> None:
        """The step is over: if none went, the cache lasts to its end."""
        self._end(end if self._first is None else self._first)

    def _end(self, interval: int) -> None:
        for call in self._calls:
            call.cached_until = interval
        self._calls.clear()
        self._first = None

    def _look(self) -> None:
        """The region's forward is over."""
        me = weakref.ref(self)
        for address, (calls, ref, nbytes) in self._saved.items():
            storage = ref()
            if storage is None:
                continue
            for call in calls:
                call.cached_bytes += nbytes
            self._calls += calls
            if address not in self._alive:

                def dies(_: Any, address: int = address) -> None:
                    live = me()
                    if live is not None:
                        live._died(address)

                self._alive[address] = weakref.ref(storage, dies)
        self._saved.clear()

    def _died(self, address: int) -> None:
        self._alive.pop(address, None)
        marks = self._marks()
        now = None if marks is None else marks.interval
        if marks is None or now is None:
            return
        self._first = now if self._first is None else self._first
        if not self._alive:
            self._end(marks.mark("step", "uncached") if self._first == now else self._first)
