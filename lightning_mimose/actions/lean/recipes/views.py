"""Views, and copies of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mimose.actions.lean.recipes.table import (
    LIGHT,
    VIEW,
    Made,
    Node,
    recipe,
    signed,
)


@recipe("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", needs_first=True)
def _view(node: Node) -> Made:
    return Made(lambda x, shape=node.shape: x.view(shape), (node.edge(0),), VIEW, gives_away=True)


@recipe("ExpandBackward0", needs_first=True)
def _expand(node: Node) -> Made:
    return Made(lambda x, shape=node.shape: x.expand(shape), (node.edge(0),), VIEW)


@recipe("TransposeBackward0", needs_first=True)
def _transpose(node: Node) -> Made:
    dims = signed(node.field("dim0")), signed(node.field("dim1"))
    return Made(lambda x: x.transpose(*dims), (node.edge(0),), VIEW)


@recipe("TBackward0", needs_first=True)
def _t(node: Node) -> Made:
    return Made(torch.t, (node.edge(0),), VIEW)


@recipe("PermuteBackward0", needs_first=True)
def _permute(node: Node) -> Made:
    dims = [signed(dim) for dim in node.field("dims")]
    return Made(lambda x: x.permute(dims), (node.edge(0),), VIEW)


@recipe("UnsqueezeBackward0", needs_first=True)
def _unsqueeze(node: Node) -> Made:
    dim = signed(node.field("dim"))
    return Made(lambda x: x.unsqueeze(dim), (node.edge(0),), VIEW, gives_away=True)


@recipe("SliceBackward0", needs_first=True)
def _slice(node: Node) -> Made:
    window = slice(signed(node.field("start")), signed(node.field("end")), node.field("step"))
    dim = signed(node.field("dim"))

    def cut(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.slice.Tensor(x, dim, window.start, window.stop, window.step)
        return out

    return Made(cut, (node.edge(0),), VIEW)


@recipe("SelectBackward0", needs_first=True)
def _select(node: Node) -> Made:
    dim, index = signed(node.field("dim")), signed(node.field("index"))
    return Made(lambda x: x.select(dim, index), (node.edge(0),), VIEW)


@recipe("UnbindBackward0", needs_first=True, all_outputs=True)
def _unbind(node: Node) -> Made:
    dim, index = signed(node.field("dim")), node.output
    return Made(lambda x: x.select(dim, index), (node.edge(0),), VIEW)


@recipe("SplitBackward0", needs_first=True, all_outputs=True)
def _split(node: Node) -> Made:
    return _piece(node, node.output * node.field("split_size"))


@recipe("SplitWithSizesBackward0", needs_first=True, all_outputs=True)
def _split_with_sizes(node: Node) -> Made:
    return _piece(node, sum(node.field("split_sizes")[: node.output]))


def _piece(node: Node, start: int) -> Made:
    dim = signed(node.field("dim"))
    size = node.shape[dim]
    return Made(lambda x: x.narrow(dim, start, size), (node.edge(0),), VIEW)


@recipe("RepeatBackward0", needs_first=True)
def _repeat(node: Node) -> Made:
    repeats = node.field("repeats")
    return Made(lambda x: x.repeat(repeats), (node.edge(0),), LIGHT, gives_away=True)


@recipe("CloneBackward0", needs_first=True)
def _clone(node: Node) -> Made:
    # `contiguous()`, for all there is to see, unless it is seen to be in channels last (what is activated in place is
    # saved as a clone); another that kept other strides is found out by the first comparison.
    order = torch.contiguous_format if node.is_contiguous else torch.preserve_format
    return Made(lambda x: x.clone(memory_format=order), (node.edge(0),), LIGHT, gives_away=True)
