"""Masks: tensors of zeros and one other number, of which a bit for each element is kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from lightning_mimose.actions.lean.handles import Rebuilt

PIECE = 1 << 20
"""Elements of a mask that are packed or unpacked at once: all of them would be more memory, for a moment."""


@lru_cache(maxsize=64)
def _numbers(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The eight elements that every byte stands for; on a CPU in memory of NumPy's, so that no step has to count it."""
    bytes_, places = (torch.arange(count, device=device, dtype=torch.uint8) for count in (256, 8))
    table = (bytes_[:, None] >> places).bitwise_and_(1).to(dtype)
    if dtype != torch.bool:
        table.mul_(number)
    return torch.from_numpy(table.view(torch.uint8).numpy().copy()).view(dtype) if device.type == "cpu" else table


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
        self.temporary_bytes = 4 * min(self.held_bytes, PIECE // 8)  # the bytes as indices
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
        device = self._bits.device
        table = _numbers(self._number, self._dtype, device)
        made = torch.empty(len(self._bits), 8, dtype=self._dtype, device=device)
        for out, bits in _pieces(made, self._bits):
            torch.index_select(table, 0, bits.int(), out=out)
        return made.as_strided(self.shape, self._stride)
