"""From which sizes on the kernels of an operation are others, and so is their scratch memory."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

SEVERAL, MANY = 2, 16
"""Rows from which on a convolution is oneDNN's on a CPU. Of fewer than two, ATen takes its own where there is little to
do, but for groups and large filters; of fewer than 16 where the filter is one point in its last two dimensions, neither
strided nor dilated, and there is one thread; transposed or not (`ConvParams::use_mkldnn`,
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Convolution.cpp)."""
_Convolution: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


def kernels_turn_at(model: nn.Module, device: torch.device) -> dict[str, tuple[int, ...]]:
    """Dimension of a batch -> the values from which on kernels are others, in ascending order.

    Args:
        model: The model.
        device: Where it runs.

    Limitations:
        Only convolutions that are modules are known, as many threads as there are now, and rows of the batch: frames
        that a model folds into them are not.

    Example:
        >>> cpu = torch.device("cpu")
        >>> kernels_turn_at(nn.Conv2d(3, 8, 3), cpu), kernels_turn_at(nn.Linear(2, 2), cpu)
        ({'batch': (2,)}, {})
    """
    if device.type != "cpu":
        return {}
    found = {_turn(module) for module in model.modules() if isinstance(module, _Convolution)}
    turns = sorted(turn for turn in found if turn is not None)
    return {"batch": tuple(turns)} if turns else {}


def _turn(module: _Convolution) -> int | None:
    """From how many rows on a convolution is oneDNN's; None where it always is."""
    kernel = module.kernel_size
    if torch.get_num_threads() == 1 and {*kernel[-2:], *module.stride, *module.dilation} == {1}:
        return MANY
    return None if module.groups > 1 or (len(kernel) > 1 and min(kernel[-2:]) > 3) else SEVERAL
