"""Sums of gradients under a dispatch mode, made as they are without one.

Where a tensor was used twice, autograd adds the second gradient to the first one in place, if nobody else holds that.
Under any dispatch mode it makes a new tensor. That is one more while both are there, which is the peak of some steps;
and its strides follow both: with gradients of different layouts (one came out of a transpose) kernels that follow see
another layout, choose another way, and round otherwise.
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


_ADDS_NOTHING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Mm", "Bmm", "Convolution", "Embedding"),
        *("Add", "Sub", "Neg", "Mul", "Div", "Exp", "Pow", "Rsqrt", "Sqrt", "Sum", "Mean"),
        *(
            "Gelu",
            "Silu",
            "Relu",
            "Tanh",
            "Sigmoid",
            "Softmax",
            "NativeLayerNorm",
            "NativeBatchNorm",
            "NativeGroupNorm",
        ),
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze"),
        *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "Gather", "Index", "IndexSelect"),
        *("Clone", "ToCopy", "MaskedFill", "Where", "NativeDropout", "Repeat", "ConstantPadNd"),
    )
)
"""Nodes in whose formulas nothing is added to a tensor, so that a sum in their time is autograd's own."""


def summed_gradients(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The sum that autograd would have made in place; None for nearly everything else that is called.

    To be called by a mode with what it was given; under another mode nothing is imitated, for the user's own run is
    under that one, too. A sum inside a backward formula looks the same, and what it adds to may be used again: after
    nodes whose formula may have one, only the layout is imitated. A formula's values are the same then, its layout may
    not be.
    """
    if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
        return None
    node = torch._C._current_autograd_node()
    in_place = node is not None and node.name() in _ADDS_NOTHING
    if not all(map(_has_strides, args)) or (not in_place and args[0].stride() == args[1].stride()):
        return None
    if args[0].shape != args[1].shape or args[0].dtype != args[1].dtype or torch._C._len_torch_dispatch_stack():
        return None
    if _holders(args) != _with_one_owner():
        return None
    # It has its strides where no elements overlap and none is left out, which autograd asks for, too.
    if torch.empty_like(args[0], device="meta").stride() != args[0].stride():
        return None
    total: torch.Tensor = args[0].add_(args[1]) if in_place else torch.add(*args, out=torch.empty_like(args[0]))
    return total


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
