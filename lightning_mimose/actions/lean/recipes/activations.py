"""Activations and other functions of one value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mimose.actions.lean.recipes.table import (
    GELU,
    HEAVY,
    LIGHT,
    Made,
    Node,
    recipe,
    signed,
)


@recipe("GeluBackward0")
def _gelu(node: Node) -> Made:
    approximate = node.field("approximate")
    return Made(partial(functional.gelu, approximate=approximate), (node.saved("self"),), GELU, gives_away=True)


def _of_saved_self(name: str, function: Callable[..., Tensor], *fields: str) -> None:
    def make(node: Node) -> Made:
        arguments = [node.field(field) for field in fields]
        return Made(lambda x: function(x, *arguments), (node.saved("self"),), HEAVY, gives_away=True)

    recipe(name)(make)


_of_saved_self("SiluBackward0", functional.silu)
_of_saved_self("MishBackward0", functional.mish)
_of_saved_self("HardswishBackward0", functional.hardswish)
_of_saved_self("LeakyReluBackward0", functional.leaky_relu, "negative_slope")
_of_saved_self("SoftplusBackward0", functional.softplus, "beta", "threshold")
_of_saved_self("HardtanhBackward0", functional.hardtanh, "min_val", "max_val")
_of_saved_self("PowBackward0", torch.pow, "exponent")
_of_saved_self("SinBackward0", torch.sin)
_of_saved_self("CosBackward0", torch.cos)
_of_saved_self("LogBackward0", torch.log)
_of_saved_self("AbsBackward0", torch.abs)


@recipe("EluBackward0")
def _elu(node: Node) -> Made | None:
    if node.field("scale") != 1 or node.field("input_scale") != 1:
        return None
    return Made(partial(functional.elu, alpha=node.field("alpha")), (node.saved("self"),), HEAVY, gives_away=True)


@recipe("GluBackward0")
def _glu(node: Node) -> Made:
    return Made(partial(functional.glu, dim=signed(node.field("dim"))), (node.saved("self"),), HEAVY, gives_away=True)


def _of_input(name: str, function: Callable[..., Tensor], work: float) -> None:
    """For operations that save their own result."""
    recipe(name, needs_first=True)(lambda node: Made(function, (node.edge(0),), work, takes_out=True))


def _relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.relu(x) if out is None else torch.relu_(out)  # the only value there is


_of_input("ReluBackward0", _relu, LIGHT)
_of_input("TanhBackward0", torch.tanh, HEAVY)
_of_input("SigmoidBackward0", torch.sigmoid, HEAVY)
_of_input("ExpBackward0", torch.exp, HEAVY)
_of_input("SqrtBackward0", torch.sqrt, LIGHT)
_of_input("RsqrtBackward0", torch.rsqrt, LIGHT)
_of_input("NegBackward0", torch.neg, LIGHT)
