"""Masks: tensors of zeros and one other number, of which a bit for each element is kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_mimose.actions.lean.handles import Rebuilt
from lightning_mimose.menu import MASKS

PIECE = 1 << 20
"""Elements of a mask that are packed or unpacked at once: all of them would be more memory, for a moment."""


def _table(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The eight elements that every byte stands for."""
    bytes_, places = (torch.arange(count, device=device, dtype=torch.uint8) for count in (256, 8))
    table = (bytes_[:, None] >> places).bitwise_and_(1).to(dtype)
    return table if dtype == torch.bool else table.mul_(number)


_table_on_device = lru_cache(maxsize=64)(_table)


@lru_cache(maxsize=64)
def _table_on_host(number: float, dtype: torch.dtype) -> NDArray[np.void]:
    """The same for a CPU, in memory of NumPy's, so that no step has to count it."""
    return np.array(_eights(_table(number, dtype, torch.device("cpu"))))


def _eights(elements: torch.Tensor) -> NDArray[np.void]:
    """Eight elements in a row as one of NumPy's."""
    return elements.view(torch.uint8).numpy().view(f"V{8 * elements.element_size()}")[:, 0]


def _pieces(elements: torch.Tensor, bits: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Elements in one dimension, or eight in a row, beside the bytes that stand for them."""
    size = PIECE // 8
    if len(bits) <= size:  # to split takes as long as to pack a small one
        return ((elements, bits),)
    return zip(elements.split(size if elements.dim() == 2 else PIECE), bits.split(size), strict=True)


class Mask(Rebuilt):
    """A tensor of zeros and one other number that fills its storage, a bit for each element.

    Args:
        tensor: The mask.
        number: The other number.
        grade: See `Handle`.
        packs: Whether the bits are really made; without them there is no value.
    """

    __slots__ = ("_bits", "_dtype", "_number", "_stride", "held_bytes", "temporary_bytes")

    def __init__(self, tensor: torch.Tensor, number: float, grade: int, *, packs: bool = True) -> None:
        super().__init__(tensor.nbytes, tuple(tensor.shape), grade)
        self.held_bytes = -(-tensor.numel() // 8)
        # The bytes as indices; on a CPU those are NumPy's.
        self.temporary_bytes = 0 if tensor.is_cpu else 4 * min(self.held_bytes, PIECE // 8)
        if not packs:
            return
        self._stride = tensor.stride()  # whichever: the bits are in the order of memory
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._bits = torch.empty(self.held_bytes, dtype=torch.uint8, device=tensor.device)
        for piece, bits in _pieces(flat, self._bits):
            flags = piece.bool()  # several times faster than a comparison with 0, and the same
            if flags.device.type == "cpu":
                bits.numpy()[:] = np.packbits(flags.numpy(), bitorder="little")
                continue
            if missing := -flags.numel() % 8:
                flags = torch.cat([flags, flags.new_zeros(missing)])
            # Eight bools are eight bytes of one integer; the product gathers their lowest bits in its highest byte.
            bits.copy_((flags.view(torch.int64) * 0x0102040810204080).bitwise_right_shift_(56))
        self._number = number
        self._dtype = tensor.dtype

    def _made(self) -> torch.Tensor:
        made = torch.empty(len(self._bits), 8, dtype=self._dtype, device=self._bits.device)
        if made.is_cpu:
            self._unpack_on_host(made)
        else:
            table = _table_on_device(self._number, self._dtype, made.device)
            for out, bits in _pieces(made, self._bits):
                torch.index_select(table, 0, bits.int(), out=out)
        return made.as_strided(self.shape, self._stride)

    def _unpack_on_host(self, made: torch.Tensor) -> None:
        """By NumPy, which takes half as long as torch on one thread, and no longer than on two."""
        table, bits, out = _table_on_host(self._number, self._dtype), self._bits.numpy(), _eights(made)
        size = max(1, PIECE // 64)  # it makes eight bytes of each, as an index
        for start in range(0, len(bits), size):
            np.take(table, bits[start : start + size], out=out[start : start + size], mode="clip")


def mask_of(tensor: torch.Tensor, dropout: float | None, *, packs: bool) -> Mask | None:
    """What stands for a tensor that no operation with a gradient made; None if it is no mask.

    Args:
        tensor: The tensor.
        dropout: The probability of the dropout that runs, if one does.
        packs: See `Mask`.
    """
    if tensor.requires_grad:
        return None
    if tensor.dtype == torch.bool:
        return Mask(tensor, 1.0, MASKS, packs=packs)
    if dropout is None or not tensor.is_floating_point() or tensor._version != 2 or dropout >= 1:
        return None
    return Mask(tensor, _kept_number(float(dropout), tensor.dtype, tensor.device), MASKS, packs=packs)


@lru_cache(maxsize=64)
def _kept_number(dropout: float, dtype: torch.dtype, device: torch.device) -> float:
    """What a dropout's mask has where it is not 0, as torch makes it in the tensor's own precision: drawn, divided."""
    return torch.ones((), dtype=dtype, device=device).div_(1 - dropout).item()
