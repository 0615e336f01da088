"""The process's switches that decide how operations compute: what runs again finds them as the forward did.

A context manager around the forward (`sdpa_kernel`, `torch.backends.mkldnn.flags`) is left before backward begins.
Autocast is not among them: `torch.utils.checkpoint` sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Positions = tuple[Any, ...]
"""Of several switches."""
_AS_THEY_ARE: AbstractContextManager[None] = nullcontext()


class Switches:
    """Some switches of the process.

    Args:
        switches: What tells how each is set, and what sets it.

    Example:
        >>> switches = Switches((torch.get_default_dtype, torch.set_default_dtype))
        >>> found = switches.positions()
        >>> torch.set_default_dtype(torch.float64)
        >>> with switches.lent(found):
        ...     torch.ones(1).dtype
        torch.float32
        >>> torch.ones(1).dtype
        torch.float64
        >>> torch.set_default_dtype(torch.float32)
    """

    def __init__(self, *switches: tuple[Callable[[], Any], Callable[[Any], Any]]) -> None:
        self._switches = switches
        self._getters = [get for get, _ in switches]

    def positions(self) -> Positions:
        """How they are set now."""
        return tuple([get() for get in self._getters])

    def lent(self, wanted: Positions) -> AbstractContextManager[None]:
        """Around what is to find them as they were; afterwards they are as it found them."""
        return _AS_THEY_ARE if self.positions() == wanted else self._lent(wanted)

    @contextmanager
    def _lent(self, wanted: Positions) -> Iterator[None]:
        before = self.positions()
        try:
            self._put(wanted)
            yield
        finally:
            self._put(before)

    def _put(self, wanted: Positions) -> None:
        for (get, put), position in zip(self._switches, wanted, strict=True):
            if get() != position:
                put(position)


_cuda = torch.backends.cuda
_PRODUCTS = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
ARITHMETIC = Switches(
    (torch.get_num_threads, torch.set_num_threads),  # some kernels give other last bits with another number
    *_PRODUCTS,
)
"""What single operations on plain tensors go by; to read them takes a third of a microsecond."""
EVERYTHING = Switches(
    *_PRODUCTS,
    (torch.get_default_dtype, torch.set_default_dtype),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),  # on a CPU as well
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)
"""What a block goes by."""
