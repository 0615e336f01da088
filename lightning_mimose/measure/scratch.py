"""Scratch memory inside CPU kernels, which no tensor shows: convolutions need as much as their result.

An operator is run once more, on the same inputs, in a thread of its own under torch's older profiler. That one
keeps its state per thread, so a profiler that the user is running sees nothing of it and is not disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import forward_ad

from lightning_mimose.parts import storages_in

TRIES = 3
"""A kernel that needed no scratch in so many sizes is not asked again, but for those of which others need some."""

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.linear})

_known: dict[Any, int] = {}
_clean: dict[Any, int] = {}


def scratch_bytes(func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> int:
    """What an operator allocates at once besides its results, measured once per operator and input shapes.

    Args:
        func: The operator.
        args: What it is given.
        kwargs: Likewise.
        leaves: The leaves of both.
    """
    if not _repeatable(func):
        return 0
    # Other kernels run for other types and layouts: a product in bfloat16 needs scratch, one in float32 needs none.
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    threads = torch.get_num_threads()
    kernel = (func, threads, *((leaf.dtype, leaf.layout == torch.strided and leaf.is_contiguous()) for leaf in tensors))
    if _clean.get(kernel, 0) >= TRIES and not _many_kernels(func) and not _is_reduced_product(func, tensors):
        return 0
    if any(type(leaf) is torch.Generator for leaf in leaves):
        return 0
    key = (func, tuple(_describe(leaf) for leaf in leaves), threads)
    if key not in _known:
        if len(_known) > 4096:
            _known.clear()
        _known[key] = _measure(func, args, kwargs)
        if _known[key]:
            _clean[kernel] = -1_000_000
        else:
            _clean[kernel] = _clean.get(kernel, 0) + 1
    return _known[key]


@cache
def _repeatable(func: Any) -> bool:
    """Whether running it twice changes nothing but the random state: it writes to no argument and returns no view."""
    schema = func._schema
    # Schemas outside aten do not always say what they write: DDP's all-reduce does not, and would run twice.
    if func.namespace != "aten" or schema.is_mutable:
        return False
    return not any(value.alias_info is not None for value in schema.returns)


@cache
def _many_kernels(func: Any) -> bool:
    """Whether another kernel runs for other channels, windows and strides, some with scratch and some without."""
    return "convolution" in func._schema.name


def _is_reduced_product(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether it multiplies matrices in reduced precision: oneDNN does, with scratch, but the smallest ones."""
    return func._overloadpacket in _PRODUCTS and any(t.is_floating_point() and t.itemsize < 4 for t in tensors)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0), leaf.numel(), leaf.dtype  # it has no shape in plain ints
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout == torch.strided else None
        return tuple(leaf.shape), strides, leaf.dtype
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else str(leaf)


def _own_statistics(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with copies of running statistics: batch norm writes them, though its schema does not say so."""

    def own(name: str, value: Any) -> Any:
        return value.clone() if name.startswith("running_") and isinstance(value, torch.Tensor) else value

    names = [argument.name for argument in func._schema.arguments]
    return [own(*pair) for pair in zip(names, args, strict=False)], {name: own(name, kwargs[name]) for name in kwargs}


def _measure(func: Any, args: Any, kwargs: Any) -> int:
    def run() -> int:
        torch.get_num_threads()  # without it a kernel of oneDNN's has as many as there are cores, whatever was set
        given, named = _own_statistics(func, args, kwargs)
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        torch._C._autograd._enable_profiler_legacy(config)
        # Nor tangents: what is remembered holds for all that run this kernel.
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            out = func(*given, **named)
        kept = sum({storage._cdata: storage.nbytes() for storage in storages_in(out)}.values())
        level = peak = 0
        for thread in torch._C._autograd._disable_profiler_legacy():
            for event in thread:
                if str(event.kind()) == "memory_alloc":
                    level += event.cpu_memory_usage()
                    peak = max(peak, level)
        return max(0, peak - kept)

    # Attention may draw random numbers, and has most scratch of all.
    state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            return pool.submit(run).result()
        except RuntimeError:
            return 0  # an operator that cannot be run alone is counted by its results
        finally:
            if state is not None:
                torch.set_rng_state(state)
