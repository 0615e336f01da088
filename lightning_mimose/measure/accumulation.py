"""Sums of gradients under a dispatch mode, made as they are without one.

Where a tensor was used twice, autograd adds the second gradient to the first one in place, if nobody else holds that;
and what a tensor was gathered from gets its gradient by writing on zeros. Under any dispatch mode both make a new
tensor. That is one more while both are there, which is the peak of some steps; and a sum's strides follow both: with
gradients of different layouts (one came out of a transpose) kernels that follow see another layout, choose another way,
and round otherwise.
https://github.com/pytorch/pytorch/blob/v2.10.0/torch/csrc/autograd/input_buffer.cpp#L120
https://github.com/pytorch/pytorch/blob/v2.10.0/aten/src/ATen/TensorSubclassLikeUtils.h
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_ADD = _ATEN.add.Tensor
_ON_ZEROS = {
    _ATEN.scatter_add.default: (_ATEN.scatter_add_.default, frozenset({"GatherBackward0"})),
    _ATEN.index_add.default: (_ATEN.index_add_.default, frozenset({"IndexSelectBackward0"})),
    _ATEN.scatter.src: (
        _ATEN.scatter_.src,
        frozenset(f"{name}Backward0" for name in ("Max", "Min", "Topk", "Sort", "Kthvalue", "Mode")),
    ),
}
"""How formulas write on zeros of their own under a mode -> how else, and the nodes that do nothing more with them."""

# fmt: off
_PLAIN_NODES = (
    "Add", "Sub", "Neg", "Mul", "Div", "Exp", "Pow", "Rsqrt", "Sqrt", "Sum", "Mean", "Gelu", "Silu", "Relu",
    "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "MaskedFill", "Where", "NativeDropout", "Addmm", "Mm", "Bmm",
    "Convolution", "Embedding", "NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "CudnnBatchNorm",
    "MaxPool2DWithIndices", "AvgPool2D", "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention", "View", "UnsafeView",
    "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze", "Select", "Slice", "Split",
    "SplitWithSizes", "Unbind", "Cat", "Stack", "Gather", "Index", "IndexSelect", "Clone", "ToCopy", "Repeat",
    "ConstantPadNd",
)
# fmt: on
_ADDS_NOTHING = frozenset(f"{name}Backward{overload}" for name in _PLAIN_NODES for overload in (0, 1))
"""Nodes in whose formulas nothing is added to a tensor that is used again: a sum in their time is autograd's own."""


def in_place_gradients(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """What autograd would have made in place; None for nearly everything that is called.

    To be called by a mode with what it was given; under another mode nothing is imitated, for the user's own run is
    under that one, too.
    """
    if func is not _ADD and func not in _ON_ZEROS:
        return None
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0 or torch._C._len_torch_dispatch_stack():
        return None
    node = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if func is _ADD:
        return None if kwargs or len(args) != 2 else _summed(args, in_place=name in _ADDS_NOTHING)
    func, nodes = _ON_ZEROS[func]
    # Hooks, and what runs again to get back what a node saved, run in its time: what is theirs is not written on.
    if name not in nodes or not args or not _has_strides(args[0]) or _holders(args) != _with_one_owner():
        return None
    written: torch.Tensor = func(*args, **kwargs)
    return written


def _summed(args: Any, *, in_place: bool) -> torch.Tensor | None:
    """A sum of gradients.

    One inside a backward formula looks the same, and what it adds to may be used again: after nodes whose formula may
    have one, only the layout is imitated. A formula's values are the same then, its layout may not be.
    """
    if not all(map(_has_strides, args)) or (not in_place and args[0].stride() == args[1].stride()):
        return None
    if args[0].shape != args[1].shape or args[0].dtype != args[1].dtype or _holders(args) != _with_one_owner():
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
