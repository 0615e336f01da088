"""Counts what a step computes, so that a test can say exactly what was recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def flops(function: Callable[[], Any]) -> int:
    """Floating point operations of one call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


class OpCounter(TorchDispatchMode):
    """Counts the calls of every operator inside its `with` block.

    Example:
        >>> with OpCounter() as counted:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> counted["aten.mm.default"]
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __getitem__(self, operator: str) -> int:
        return self.calls[operator]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class ForwardCounter:
    """Counts how often the forward of every module ran, recomputations included.

    A forward hook runs only when the module is *called*; a recomputation calls `module.forward` of a planned unit,
    whose children are then called. So ask for the children of units.

    Args:
        model: The model to watch; `remove` ends it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self._handles = [
            # a pre-hook, since an early-stopped recomputation never reaches the end of its last module
            module.register_forward_pre_hook(lambda *_, name=name: self.calls.update([name]))
            for name, module in model.named_modules()
        ]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
