"""Numbers that operations are called with, for recipes: autograd's nodes do not keep all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Constants(TorchFunctionMode):
    """Sees numbers that operations are called with and that their nodes do not keep.

    Attributes:
        seen: Node -> the numbers, by name.
        dropout: While a dropout runs, the probability that it was called with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, dict[str, Any]] = {}
        self.dropout: float | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            name, position, default = _DROPOUTS[func]
            before, self.dropout = self.dropout, _argument(args, kwargs, position, name, default)
            try:
                return func(*args, **kwargs)
            finally:
                self.dropout = before
        out = func(*args, **kwargs)
        if func in _SUMS:
            if len(args) > 1 and isinstance(args[1], (int, float)):
                self._note(out, operand=args[1], swapped=_SUMS[func])
        elif func in _NORMS:
            self._note(out, eps=_argument(args, kwargs, 4, "eps", 1e-5))
        return out

    def _note(self, out: Any, **constants: Any) -> None:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            self.seen[out.grad_fn] = constants


_DROPOUTS: dict[Any, tuple[str, int, float]] = {
    functional.dropout: ("p", 1, 0.5),
    torch.dropout: ("p", 1, 0.5),
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    functional.multi_head_attention_forward: ("dropout_p", 10, 0.0),
}
_NORMS = {functional.layer_norm, torch.layer_norm}
_SUMS = {
    torch.add: False,
    torch.Tensor.add: False,
    torch.Tensor.__add__: False,
    torch.Tensor.__radd__: True,
    torch.sub: False,
    torch.Tensor.sub: False,
    torch.Tensor.__sub__: False,
    torch.rsub: False,
    torch.Tensor.__rsub__: False,
}


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
