"""Weights that autocast has cast: its cache holds them until the region ends, whatever units do.

A recomputed unit keeps nothing, and yet the casts of its weights are there through the rest of the forward. To a kept
one they are no more memory: it saves the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.measure.trace import Call


def may_be_cached(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is what autocast makes of a weight, and keeps; a cast of one's own looks the same."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or not torch.is_autocast_cache_enabled():
        return False
    leaf = node.next_functions[0][0]
    return leaf is not None and leaf.name() == "torch::autograd::AccumulateGrad"


class CachedCasts:
    """Watches the casts that regions save in forward: those that outlive their region are in the cache.

    Args:
        ended: Called when all of them are gone: an autocast region has ended, and with it its cache.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._saved: dict[int, tuple[list[Call], weakref.ref[Any], int]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

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

    def _look(self) -> None:
        """The region's forward is over."""
        me = weakref.ref(self)
        for address, (calls, ref, nbytes) in self._saved.items():
            storage = ref()
            if storage is None:
                continue
            for call in calls:
                call.cached_bytes += nbytes
            if address not in self._alive:

                def dies(_: Any, address: int = address) -> None:
                    live = me()
                    if live is not None:
                        live._died(address)

                self._alive[address] = weakref.ref(storage, dies)
        self._saved.clear()

    def _died(self, address: int) -> None:
        self._alive.pop(address, None)
        if not self._alive:
            self._ended()
