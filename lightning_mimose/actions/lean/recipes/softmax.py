"""Softmax, and the one of torch's attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_mimose.actions.lean.recipes.table import (
    SOFTMAX,
    Made,
    Node,
    recipe,
    signed,
)
from lightning_mimose.menu import ATTENTION


@recipe("SoftmaxBackward0", grade=ATTENTION)
def _softmax(node: Node) -> Made:
    dim = signed(node.field("dim"))
    return Made(partial(_soft, dim), (node.scores(),), SOFTMAX, takes_out=_by_rows(node, dim), gives_away=True)


@recipe("SafeSoftmaxBackward0", grade=ATTENTION)
def _safe_softmax(node: Node) -> Made:
    dim = signed(node.field("dim"))
    return Made(partial(_safe, dim), (node.scores(),), SOFTMAX, takes_out=_by_rows(node, dim), gives_away=True)


def _by_rows(node: Node, dim: int) -> bool:
    """Whether softmax may be written over its scores: so the CPU makes it, row by row; of others nobody says it."""
    return node.device.type == "cpu" and dim in (-1, len(node.shape) - 1)


def _soft(dim: int, scores: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.softmax(scores, dim, out=out if scores.is_contiguous() else None)


def _safe(dim: int, scores: Tensor, out: Tensor | None = None) -> Tensor:
    """As torch does it, zeros for rows that are masked altogether, but without tensors as large as the scores."""
    if scores.device.type != "cpu" or scores.size(dim) == 0:  # elsewhere to look at a value would wait for it
        return torch._safe_softmax(scores, dim)
    hidden = None
    if (scores.select(dim, 0) == -torch.inf).any():  # where it is not so, no row is
        hidden = scores.amax(dim, keepdim=True) == -torch.inf
    made = _soft(dim, scores, out)
    return made if hidden is None else made.masked_fill_(hidden, 0.0)
