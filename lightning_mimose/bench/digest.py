"""A digest of a model's gradients, bit for bit, made where they are: on the way to a host they take longer than a step.

The elements' bits, as integers, are mixed, multiplied by odd numbers that look random and added up, modulo 2^64: no
order of the sum changes it, one element that differs always does, and several that do cancel out by chance alone.
"""

from __future__ import annotations

import torch
from torch import nn

CHUNK = 1 << 20
"""Elements at once: what is made on the way, some tens of megabytes, fits beside small budgets."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(model: nn.Module) -> str:
    """The digest of all gradients, those that are missing included.

    Args:
        model: Its parameters' gradients are read.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> without = digest(model)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> digest(model) == without
        False
    """
    sums = []
    for parameter in model.parameters():
        if parameter.grad is None:
            sums.append("none")
            continue
        gradient = parameter.grad.detach().to_dense().contiguous().view(-1)
        bits = gradient.view(_INTEGERS[gradient.itemsize])
        pieces = bits.split(CHUNK)
        sums.append(" ".join(f"{int(_mixed(piece)):x}" for piece in pieces))
    return ";".join(sums)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    factors = _stirred(torch.arange(1, len(bits) + 1, device=bits.device)) | 1
    return (_stirred(bits.to(torch.int64)) * factors).sum()


def _stirred(numbers: torch.Tensor) -> torch.Tensor:
    """Other numbers for others, in which every bit of the old ones counts."""
    numbers = numbers * -7046029254386353131
    numbers = (numbers ^ (numbers >> 29 & (1 << 35) - 1)) * -4658895280553007687  # `>>` repeats the sign
    return numbers ^ (numbers >> 32 & (1 << 32) - 1)
