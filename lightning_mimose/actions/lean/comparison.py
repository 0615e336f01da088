"""Whether what a handle gives is the tensor that was saved, bit for bit."""

from __future__ import annotations

import torch

from lightning_mimose.actions.lean.handles import Handle, rebuilt_now
from lightning_mimose.errors import is_out_of_memory


def rebuilds(handle: Handle, tensor: torch.Tensor) -> bool:
    """Whether a handle's value is a tensor."""
    try:
        return _same(rebuilt_now(handle), tensor)
    except Exception as error:  # a recipe that cannot be followed here is no reason to end a training
        if is_out_of_memory(error):
            raise
        return False


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, zeros with their signs and what is not a number included."""
    if (one.shape, one.dtype, one.device, one.stride()) != (other.shape, other.dtype, other.device, other.stride()):
        return False
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    if integers is None:
        return torch.equal(one, other)
    return torch.equal(one.detach().view(integers), other.detach().view(integers))
