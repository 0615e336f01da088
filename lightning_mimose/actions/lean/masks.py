"""Masks: tensors of zeros and one other number, of which a bit for each element is kept."""

from __future__ import annotations

import numpy as np
import torch

from lightning_mimose.actions.lean.handles import Rebuilt

PIECE = 1 << 20
"""Elements of a mask that are packed at once."""
UNPACKED = 1 << 16
"""Bytes of bits that the CPU unpacks at once: NumPy makes an integer of 64 bits of each."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""Of every byte."""


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
        # The table, and the bits as indices.
        indices = 8 * min(self.held_bytes, UNPACKED) if tensor.device.type == "cpu" else 4 * self.held_bytes
        self.temporary_bytes = indices + 2048 * (tensor.element_size() + 1)
        if not packs:
            return
        self._stride = tensor.stride()  # whichever: the bits are in the order of memory
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._bits = torch.empty(self.held_bytes, dtype=torch.uint8, device=tensor.device)
        # In pieces: all at once would be more memory, for a moment, than the mask itself.
        for piece, bits in zip(flat.split(PIECE), self._bits.split(PIECE // 8), strict=True):
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
        # The numbers of every byte, made each time: kept, they would be memory that no step accounts for.
        device = self._bits.device
        if device.type == "cpu":
            table = torch.from_numpy(_BITS).to(self._dtype, copy=True)
        else:
            bytes_, places = (torch.arange(n, device=device, dtype=torch.uint8) for n in (256, 8))
            table = (bytes_[:, None] >> places).bitwise_and_(1).to(self._dtype)
        if self._dtype != torch.bool:
            table.mul_(self._number)
        if device.type == "cpu":  # faster than `index_select`, and with no indices as large as a part of the mask
            made = torch.empty(len(self._bits), 8, dtype=self._dtype, device=device)
            rows, bits, out = (each.view(torch.uint8).numpy() for each in (table, self._bits, made))
            for start in range(0, len(bits), UNPACKED):
                piece = slice(start, start + UNPACKED)
                rows.take(bits[piece], axis=0, out=out[piece], mode="clip")
        else:
            made = table.index_select(0, self._bits.int())
        return made.as_strided(self.shape, self._stride)
