"""What a graph holds, and what is resident anyway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_mimose.measure.resident import batch_tensors

_raw_fields: dict[str, tuple[str, ...]] = {}


def saved_in_graph(root: Any) -> Iterator[torch.Tensor]:
    """The tensors that a graph's nodes saved, as they are; what a checkpoint holds is not touched.

    `node._raw_saved_x.data` is what was packed: a tensor where no hook took it. Reading `_saved_x` instead would
    unpack, and so recompute.
    """
    seen = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        kind = node.name()
        if kind not in _raw_fields:
            _raw_fields[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
        for name in _raw_fields[kind]:
            value = getattr(node, name, None)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                data = getattr(saved, "data", None)
                if isinstance(data, torch.Tensor):
                    yield data
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def resident_tensors(model: nn.Module, batch: Any = None) -> list[torch.Tensor]:
    """Parameters, buffers and the batch: what units may be given or save without it being an activation."""
    return [*model.parameters(), *model.buffers(), *batch_tensors(batch)]
