"""One number for the bits of a tensor, read without the memory of another copy."""

from __future__ import annotations

import ctypes
import zlib

import torch

_PIECE = 1 << 16
"""Elements that are read at once where they must be copied or weighted for it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """A number that differs, but for rare accidents, when the bits do.

    Args:
        tensor: Strided, on any device; expanded dimensions are read once.

    Example:
        >>> import torch
        >>> checksum(torch.tensor([0.0, 1.0])) == checksum(torch.tensor([-0.0, 1.0]))
        False
        >>> checksum(torch.ones(3, 2).T) == checksum(torch.ones(3, 2).T)
        True
    """
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if tensor.numel() == 0:
        return 0
    if _is_dense(tensor):
        return _of_flat(torch.as_strided(tensor, (tensor.numel(),), (1,)))
    if tensor[0].numel() > _PIECE:
        return hash(tuple(checksum(part) for part in tensor))
    pieces = tensor.split(max(1, _PIECE // tensor[0].numel()))
    return hash(tuple(_of_flat(piece.contiguous().view(-1)) for piece in pieces))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whichever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _of_flat(flat: torch.Tensor) -> int:
    if flat.device.type == "cpu":
        # Not by `numpy()`: from then on the storage could not be resized, as FSDP2 does with gathered parameters.
        return zlib.crc32((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(flat.view(_INTEGERS[flat.element_size()]).split(_PIECE), start=1):
        weights = torch.arange(1, piece.numel() + 1, device=flat.device)
        total += number * (piece * weights).sum()
    return int(total)
