"""Norms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_mimose.actions.lean.recipe import is_ordered
from lightning_mimose.actions.lean.recipes.table import (
    HEAVY,
    NORM,
    Made,
    Node,
    recipe,
)


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Node) -> Made | None:
    eps = node.constant("eps")
    if eps is None:
        return None
    shape = tuple(node.field("normalized_shape"))
    weight, bias = node.saved("weight"), node.saved("bias")
    given = tuple(each for each in (weight, bias) if each is not None)
    if bias is not None and weight is None:
        return None

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return torch.native_layer_norm(x, shape, weight, bias, eps)[0]

    return Made(norm, (node.saved("input"), *given), NORM, gives_away=True)


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Node) -> Made | None:
    eps = node.constant("eps")
    if eps is None:
        eps = node.field("eps")  # which nodes have no more from torch 2.14 on
    sizes = (node.field("N"), node.field("C"), node.field("HxW"), node.field("group"), eps)
    weight = node.saved("weight")
    if weight is None:
        return Made(
            lambda x: torch.native_group_norm(x, None, None, *sizes)[0], (node.saved("input"),), NORM, gives_away=True
        )
    bias = node.edge(2)
    return Made(
        lambda x, w, b: torch.native_group_norm(x, w, b, *sizes)[0],
        (node.saved("input"), weight, bias),
        NORM,
        gives_away=True,
    )


@recipe("NativeBatchNormBackward0")
def _batch_norm(node: Node) -> Made | None:
    eps, weight = node.field("eps"), node.saved("weight")
    # Its node does not tell a frozen bias from none.
    if not node.field("training") or (weight is None and node.constant("affine") is not False):
        return None
    affine = () if weight is None else (weight, node.edge(2))
    values = node.saved("input"), node.saved("result1"), node.saved("result2"), *affine
    return Made(partial(_normalized, eps), values, HEAVY, gives_away=True)


def _normalized(
    eps: float, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    # Kernels of the CPU multiply by `invstd * weight`, however they came by it, if the elements are in some order of
    # theirs. With a variance of 1 they are spared the statistics, which take several times as long as the rest.
    dtype = x.dtype if weight is None else weight.dtype
    if x.device.type == "cpu" and dtype in (torch.float32, torch.float64) and is_ordered(x):
        scale = invstd if weight is None else invstd * weight
        return torch.native_batch_norm(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    # Batch statistics again, and no running ones: those have moved with the forward.
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
