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
_of_saved_self("HardsigmoidBackward0", functional.hardsigmoid)
_of_saved_self("LogSigmoidBackward0", functional.logsigmoid)
_of_saved_self("SoftshrinkBackward0", functional.softshrink, "lambd")
_of_saved_self("HardshrinkBackward0", functional.hardshrink, "lambd")
_of_saved_self("CeluBackward0", functional.celu, "alpha")
_of_saved_self("EluBackward0", torch.ops.aten.elu.default, "alpha", "scale", "input_scale")  # SELU, too
_of_saved_self("LeakyReluBackward0", functional.leaky_relu, "negative_slope")
_of_saved_self("SoftplusBackward0", functional.softplus, "beta", "threshold")
_of_saved_self("HardtanhBackward0", functional.hardtanh, "min_val", "max_val")
_of_saved_self("ClampBackward1", torch.clamp, "min", "max")
_of_saved_self("ClampMinBackward0", torch.clamp_min, "min")
_of_saved_self("ClampMaxBackward0", torch.clamp_max, "max")
_of_saved_self("PowBackward0", torch.pow, "exponent")
_of_saved_self("SinBackward0", torch.sin)
_of_saved_self("CosBackward0", torch.cos)
_of_saved_self("LogBackward0", torch.log)
_of_saved_self("ErfBackward0", torch.erf)
_of_saved_self("AbsBackward0", torch.abs)


@recipe("ThresholdBackward0")
def _threshold(node: Node) -> Made | None:
    threshold, value = node.field("threshold"), node.constant("value")
    if value is None:
        return None
    return Made(lambda x: torch.threshold(x, threshold, value), (node.saved("self"),), LIGHT, gives_away=True)


@recipe("PreluKernelBackward0")
def _prelu(node: Node) -> Made:
    return Made(torch._prelu_kernel, (node.saved("self"), node.saved("weight")), HEAVY, gives_away=True)


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
