"""Lean saves inside a recomputed region: what its recomputation saves for the backward that follows at once.

A recomputation keeps what its forward would have kept, all of the region at the same time. Here the checkpoint is
given stand-ins of the same shape for tensors that a recipe rebuilds, and what it hands out is replaced on the way to
the operation that asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.actions.lean.handles import Use, unpack
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import References, Sites

Uses = dict[int, dict[int, Use]]


class LeanRegion:
    """See `recompute.RegionObserver`.

    Args:
        sites: What is known about the unit's places.
        grade: What may be rebuilt.
        parameters: Gives the parameters that values may be rebuilt from.
        held: What somebody else keeps alive, see `LeanSaves`.
        told: Shown what every recomputation found out.
    """

    stops_early = True

    def __init__(
        self,
        sites: Sites,
        grade: int,
        parameters: Callable[[], Iterable[torch.Tensor]],
        held: Iterable[Any],
        told: Callable[[LeanSaves], None],
    ) -> None:
        self._sites, self._grade, self._parameters, self._told = sites, grade, parameters, told
        self._held = References(held)
        self._saved: list[weakref.ref[_Numbered]] = []
        self._uses: Uses = {}
        """Backward pass -> number of a saved tensor -> what it is rebuilt by."""

    @contextmanager
    def forward_run(self) -> Iterator[None]:
        """Number what is saved."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        pack_outer, saved = outer[0], self._saved

        def pack(tensor: torch.Tensor) -> _Numbered:
            numbered = _Numbered(len(saved), pack_outer(tensor))
            saved.append(weakref.ref(numbered))
            return numbered

        with saved_tensors_hooks(pack, partial(_unpack, outer[1], self._uses)):
            yield

    @contextmanager
    def recompute_run(self, given: Sequence[Any], results: list[Any]) -> Iterator[None]:
        """Give the checkpoint a stand-in for whatever has a recipe.

        Args:
            given: See `LeanSaves`. Where another unit has handed it on, it is not in the memory that it was in before.
            results: Of no interest.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        task = torch._C._current_graph_task_id()
        if outer is None or task == -1:  # somebody looks at what a node saved
            del given
            yield
            return
        give, numbered = outer[0], iter(range(1 << 62))
        uses = self._uses[task] = {}
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end_pass, self._uses, task))
        saves = LeanSaves(
            self._sites,
            self._grade,
            leaves=self._parameters(),
            held=self._held.live(),
            given=given,
        )
        del given

        def pack(tensor: torch.Tensor) -> Any:
            number, packed = next(numbered), saves.pack(tensor)
            # Who has gone with its part of the graph, which nothing needs, never asks: the choice that a router makes.
            is_lost = number < len(self._saved) and self._saved[number]() is None
            if isinstance(packed, Use) and not is_lost:
                uses[number] = packed
                give(_stand_in(tensor.dtype, tensor.device).expand(tensor.shape))
            else:
                give(tensor)
            return packed

        try:
            with saves.constants(), saved_tensors_hooks(pack, unpack):
                yield
        finally:
            saves.close()
            self._told(saves)

    def recomputed(self, out: Any, left: Any) -> None:
        """Nothing to see."""


@lru_cache(maxsize=64)
def _stand_in(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element for all that a checkpoint asks nothing but the shape of; on a CPU in memory that no step counts."""
    if device.type != "cpu":
        return torch.empty((), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(dtype.itemsize, np.uint8)).view(dtype).squeeze()


class _Numbered:
    """What the graph holds in place of a saved tensor: the checkpoint's, and how many came before it."""

    __slots__ = ("__weakref__", "inner", "number")

    def __init__(self, number: int, inner: Any) -> None:
        self.number, self.inner = number, inner


def _unpack(unpack_outer: Callable[[Any], torch.Tensor], uses: Uses, packed: _Numbered) -> torch.Tensor:
    tensor = unpack_outer(packed.inner)
    # Asked for once in a pass, as the checkpoint sees to; then it is the operation's.
    use = uses.get(torch._C._current_graph_task_id(), {}).pop(packed.number, None)
    return tensor if use is None else unpack(use)


def _end_pass(uses: Uses, task: int) -> None:
    """Let go of what was not asked for."""
    uses.pop(task, None)
