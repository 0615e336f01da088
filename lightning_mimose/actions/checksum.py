"""One number for the bits of a tensor, read without the memory of another copy."""

from __future__ import annotations

import ctypes
import math
import zlib

import torch
from torch.utils._python_dispatch import _disable_current_modes

_PIECE = 1 << 16
"""Elements that are read at once where they must be copied or weighted for it."""
_RUNS = 1 << 12
"""Pieces that a tensor on the host may lie in if all of it is read."""
_WINDOWS, _WINDOW = 1 << 5, 1 << 11
"""How many windows of how many bytes a sample is there."""
_SOME = 1 << 12
"""How many elements it is elsewhere."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes of an element. In halves of what has eight, no bit is lost where a sum of products is cut to 64."""


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


def sample(tensor: torch.Tensor, *, whole: bool = False) -> int:
    """The same at next to no cost, for what differs in many places if it differs.

    Args:
        tensor: Strided, on any device. On the host nothing is allocated for it.
        whole: Whether to read all of it, if it is on the host and does not lie in too many pieces.

    Example:
        >>> sample(torch.ones(3, 2).T) == sample(torch.ones(3, 2).T), sample(torch.ones(3)) == sample(torch.zeros(3))
        (True, False)
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return 0
    if tensor.device.type == "cpu":
        return _of_host(tensor, whole)
    with _disable_current_modes(), torch.no_grad():  # one that counts operations has nothing to do with it
        return _of_some(tensor.detach())


def _of_host(tensor: torch.Tensor, whole: bool) -> int:
    dims: list[tuple[int, int]] = []  # stride and size, those that lie side by side together
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0], dims[-1][1] * size
        elif size > 1 and stride > 0:
            dims.append((stride, size))
    width, begin = tensor.element_size(), tensor.data_ptr()
    last = sum(stride * (size - 1) for stride, size in dims)
    if (tensor.storage_offset() + last + 1) * width > tensor.untyped_storage().nbytes():
        return 0  # sharded, and not here
    run = dims.pop(0)[1] * width if dims and dims[0][0] == 1 else width
    runs = math.prod(size for _, size in dims)
    whole |= runs == 1 and run <= _WINDOWS * _WINDOW
    pieces = 1 if whole else -(-run // _WINDOW)
    most = _RUNS if whole else _WINDOWS
    found = 0
    for index in range(0, runs * pieces, runs * pieces // most | 1):
        rest, piece = divmod(index, pieces)
        offset = 0
        for stride, size in dims:
            rest, at = divmod(rest, size)
            offset += at * stride
        address = begin + offset * width + piece * _WINDOW
        if whole:
            found = zlib.crc32((ctypes.c_ubyte * run).from_address(address), found)
        else:
            found = zlib.crc32(ctypes.string_at(address, min(_WINDOW, run - piece * _WINDOW)), found)
    return found


def _of_some(tensor: torch.Tensor) -> int:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    size = tensor.numel()
    step = size // _SOME | 1
    if _is_dense(tensor):
        return _of_flat(torch.as_strided(tensor, (-(-size // step),), (step,)).contiguous())
    some = torch.arange(0, size, step, device=tensor.device)
    return _of_flat(tensor[torch.unravel_index(some, tensor.shape)])


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
    return _weighted(flat)


def _weighted(flat: torch.Tensor) -> int:
    """Made where the elements are: on the way to the host they would take longer."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(flat.view(_INTEGERS[flat.element_size()]).split(_PIECE), start=1):
        weights = torch.arange(1, 2 * piece.numel(), 2, device=flat.device)  # odd: even ones would lose a sign
        total += number * (piece * weights).sum()
    return int(total)
