"""Sums of gradients under a dispatch mode, laid out as they are without one.

Where a tensor was used twice, autograd adds the second gradient to the first one in place, if nobody else holds that.
Under any dispatch mode it makes a new tensor, whose strides follow both: with gradients of different layouts (one came
out of a transpose) kernels that follow see another layout, choose another way, and round otherwise.
https://github.com/pytorch/pytorch/blob/v2.10.0/torch/csrc/autograd/input_buffer.cpp#L120
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor


def summed_gradients(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The sum that autograd would have made in place; None for nearly everything else that is called.

    To be called by a mode with what it was given; under another mode nothing is imitated, for the user's own run is
    under that one, too. A sum inside a backward formula looks the same: its values are, its layout may not be.
    """
    if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
        return None
    if not all(map(_has_strides, args)) or args[0].stride() == args[1].stride():
        return None
    if args[0].shape != args[1].shape or args[0].dtype != args[1].dtype or torch._C._len_torch_dispatch_stack():
        return None
    if _holders(args) != _with_one_owner():
        return None
    out = torch.empty_like(args[0])
    # It has those strides where no elements overlap and none is left out, which autograd asks for, too.
    return torch.add(*args, out=out) if out.stride() == args[0].stride() else None


def _has_strides(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested


def _holders(args: Any) -> tuple[int, int, int]:
    """How many hold a call's first tensor, in Python and besides, and its storage; the call itself included."""
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return sys.getrefcount(args[0]), args[0]._use_count(), storage


class _Probe(TorchDispatchMode):
    """Counts the holders of a gradient that is added to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            self.found = _holders(args)
        return func(*args, **(kwargs or {}))


@cache
def _with_one_owner() -> tuple[int, int, int] | None:
    """What `_holders` says of a gradient that only autograd holds, which differs from one torch to the next."""

    def run() -> tuple[int, int, int] | None:
        with torch.enable_grad():
            twice = torch.ones(2, 2, requires_grad=True) * 2
            loss = (twice * 2).sum() + (twice * 3).sum()
        with _Probe() as probe:
            loss.backward()
        found: tuple[int, int, int] | None = probe.found
        return found

    with ThreadPoolExecutor(max_workers=1) as pool:  # out of the sight of a profiler that somebody runs, and of modes
        return pool.submit(run).result()
