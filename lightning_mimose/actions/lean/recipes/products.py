"""Matrix products and convolutions."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lightning_mimose.actions.lean.handles import Handle
from lightning_mimose.actions.lean.recipe import Rebuild
from lightning_mimose.actions.lean.recipes.table import (
    PRODUCT,
    Made,
    Node,
    recipe,
)
from lightning_mimose.menu import EXPANSIONS, PRODUCTS


@recipe("BmmBackward0", grade=PRODUCTS)
def _bmm(node: Node) -> Made | None:
    return _product(torch.bmm, node, node.saved("self"), node.saved("mat2"))


@recipe("MmBackward0", grade=EXPANSIONS)
def _mm(node: Node) -> Made | None:
    return _product(torch.mm, node, node.saved("self"), node.saved("mat2"))


@recipe("AddmmBackward0", grade=EXPANSIONS)
def _addmm(node: Node) -> Made | None:
    bias, alpha, beta = node.edge(0), node.field("alpha"), node.field("beta")

    def addmm(one: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, one, other, beta=beta, alpha=alpha)

    return _product(addmm, node, node.saved("mat1"), node.saved("mat2"), bias)


def _product(rebuild: Rebuild, node: Node, one: Handle | None, other: Handle | None, *more: Handle) -> Made | None:
    if one is None or other is None:
        return None
    return _summed(rebuild, node, one.shape[-1], node.shape[-1], one, other, *more)


@recipe("ConvolutionBackward0", grade=EXPANSIONS)
def _convolution(node: Node) -> Made | None:
    x, weight = node.saved("input"), node.saved("weight")
    if x is None or weight is None or not weight.shape or node.field("transposed"):
        return None
    biases = [node.edge(2)] if any(node.field("bias_sym_sizes_opt") or ()) else []
    stride, padding, dilation = (list(node.field(n)) for n in ("stride", "padding", "dilation"))
    rest = (stride, padding, dilation, False, list(node.field("output_padding")), node.field("groups"))

    def convolution(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return torch.convolution(x, weight, bias[0] if bias else None, *rest)

    inner, width = prod(weight.shape[1:]), weight.shape[0]
    return _summed(convolution, node, inner, width, x, weight, *biases)


def _summed(rebuild: Rebuild, node: Node, inner: int, width: int, *inputs: Handle | None) -> Made:
    """Of a result each of whose elements is a sum over `inner` products, and of which `width` are made from those."""
    work = PRODUCT * 2.0 * prod(node.shape) * inner
    return Made(rebuild, inputs, 0.0, work, gives_away=True, grade=EXPANSIONS if width > inner else PRODUCTS)
