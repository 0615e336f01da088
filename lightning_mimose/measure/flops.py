"""Counts what runs while it is entered: floating-point operations by torch's own registry of formulas, and the rest."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_mimose.measure.mode import ThreadedMode

LIGHT_OPERATIONS, ELEMENT_OPERATIONS, DRAW_OPERATIONS = 30, 100, 1200
"""Operations of a matrix product that take as long as one element of a sum or a product, of anything else, and of what
draws: a chain of the first finds its memory in caches, bandwidth decides for most others, and on a CPU one thread draws
all random numbers. Measured on two CPU cores, as the costs in `actions.lean.recipes`."""
WINDOW_OPERATIONS = 300
"""The same for what a CPU looks at in a window to pool it, one after another but where channels come last."""


_aten = torch.ops.aten
_LIGHT = {_aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.neg, _aten.relu}
_LIGHT |= {_aten.add_, _aten.sub_, _aten.mul_, _aten.div_, _aten.neg_, _aten.relu_}
_POOLS = {_aten.max_pool2d_with_indices: 2, _aten.max_pool3d_with_indices: 3, _aten.avg_pool2d: 2, _aten.avg_pool3d: 3}
"""Pools, and over how many dimensions."""
_UNFILLED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class FlopTally(ThreadedMode):
    """Adds up the operations of everything that is dispatched.

    Attributes:
        total: Operations so far.
        besides: Everything else so far, in operations that take as long.
        dynamic: Whether any of it had results whose sizes depend on what its arguments hold (routing, `nonzero`).
    """

    _local = threading.local()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.besides = 0
        self.dynamic = False

    @classmethod
    def active(cls) -> FlopTally | None:
        """The tally that this thread has entered now, if any."""
        tally: FlopTally | None = getattr(cls._local, "current", None)
        return tally

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled: otherwise they run eagerly here, and save other tensors than in forward."""
        return True

    def __enter__(self) -> Any:
        FlopTally._local.current = self
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        FlopTally._local.current = None
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # torch before 2.13 looks in here
            return out
        is_dynamic, is_counted = _traits(func)
        if is_dynamic and not _is_plain_indexing(func, args):
            self.dynamic = True
        formula = flop_registry.get(func._overloadpacket)  # now: more may be registered at any time
        if formula is not None:
            # A formula that cannot read these arguments must not end a training.
            with suppress(Exception):
                self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        elif is_counted:
            made = out[0] if isinstance(out, tuple) and out else out  # of a norm, beside its statistics
            if isinstance(made, torch.Tensor):
                self.besides += made.numel() * _of_one(func, made, args)
        return out


@cache
def _traits(func: Any) -> tuple[bool, bool]:
    """Whether sizes of its results may depend on what it is given, and whether elements count."""
    return torch.Tag.dynamic_output_shape in func.tags, not func.is_view and func._overloadpacket not in _UNFILLED


def _is_plain_indexing(func: Any, args: Any) -> bool:
    """By numbers, not by a mask: as many results as there are numbers."""
    if func._overloadpacket is not _aten.index:
        return False
    return not any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)


def _of_one(func: Any, made: torch.Tensor, args: Any) -> int:
    """What an element of a result takes."""
    packet = func._overloadpacket
    if packet in _LIGHT:
        return LIGHT_OPERATIONS
    if made.device.type == "cpu":
        if torch.Tag.nondeterministic_seeded in func.tags:
            return DRAW_OPERATIONS
        if packet in _POOLS and made.is_contiguous():
            kernel: list[int] = list(args[1])
            return WINDOW_OPERATIONS * math.prod(kernel * (_POOLS[packet] // len(kernel)))
    return ELEMENT_OPERATIONS
