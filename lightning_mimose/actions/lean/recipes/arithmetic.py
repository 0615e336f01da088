"""Sums, products element by element, and casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mimose.actions.lean.handles import Handle, Number
from lightning_mimose.actions.lean.recipes.table import (
    LIGHT,
    Made,
    Node,
    recipe,
    signed,
)


@recipe("MulBackward0")
def _mul(node: Node) -> Made:
    return Made(torch.mul, (node.operand("self", 0), node.operand("other", 1)), LIGHT, takes_out=True)


@recipe("DivBackward0")
def _div(node: Node) -> Made:
    return Made(torch.div, (node.operand("self", 0), node.operand("other", 1)), LIGHT, takes_out=True)


def _of_both(name: str, function: Callable[..., Tensor]) -> None:
    """For operations that save both of their values in any case."""
    recipe(name)(lambda node: Made(function, (node.saved("self"), node.saved("other")), LIGHT, takes_out=True))


_of_both("MaximumBackward0", torch.maximum)
_of_both("MinimumBackward0", torch.minimum)


@recipe("WhereBackward0")
def _where(node: Node) -> Made:
    return Made(torch.where, (node.saved("condition"), node.edge(0), node.edge(1)), LIGHT, gives_away=True)


@recipe("AddBackward0")
def _add(node: Node) -> Made | None:
    alpha, number, swapped = node.field("alpha"), node.constant("operand"), node.constant("swapped")
    if number is None:
        return _sum(torch.add, alpha, node.edge(0), node.mask() or node.edge(1))
    if isinstance(number, Tensor):  # added to what has gradients: an attention mask
        values = (node.given(number), node.edge(1)) if swapped else (node.edge(0), node.given(number))
        return _sum(torch.add, alpha, *values)
    if swapped:  # `1 + x` is x.__radd__(1), which torch computes as x + 1
        number, alpha = number, 1
    return _sum(torch.add, alpha, node.edge(0), Number(number))


@recipe("SubBackward0")
def _sub(node: Node) -> Made | None:
    number = node.constant("operand")
    return _sum(torch.sub, node.field("alpha"), node.edge(0), node.edge(1) if number is None else Number(number))


def _sum(function: Callable[..., Tensor], alpha: Any, one: Handle | None, other: Handle | None) -> Made:
    return Made(partial(function, alpha=alpha), (one, other), LIGHT, takes_out=True)


@recipe("RsubBackward0")
def _rsub(node: Node) -> Made:
    return Made(partial(torch.rsub, alpha=node.field("alpha")), (node.edge(0), node.edge(1)), LIGHT)


@recipe("RsubBackward1", needs_first=True)
def _rsub_from_number(node: Node) -> Made | None:
    alpha, number = node.field("alpha"), node.constant("operand")
    if number is None:
        return None
    return Made(lambda x: torch.rsub(x, number, alpha=alpha), (node.edge(0),), LIGHT)


@recipe("ToCopyBackward0", needs_first=True)
def _to(node: Node) -> Made:
    return Made(lambda x, dtype=node.dtype: x.to(dtype, copy=True), (node.edge(0),), LIGHT, gives_away=True)


@recipe("MeanBackward1", needs_first=True)
def _mean(node: Node) -> Made:
    given = node.field("dim")
    dims = None if given is None else [signed(dim) for dim in given]  # None for all of them
    x, keepdim = node.edge(0), node.field("keepdim")
    return Made(lambda x: x.mean(dims, keepdim=keepdim), (x,), 0.0, LIGHT * prod(x.shape), gives_away=True)
