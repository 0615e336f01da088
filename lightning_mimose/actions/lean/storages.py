"""Which storages are known, as long as they live: whoever goes by an address alone takes another one for them later."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from lightning_mimose.actions.lean.handles import is_plain


class Storages:
    """Those of plain tensors. A unit may replace a buffer, or let go of an argument, while it runs.

    Args:
        tensors: The tensors; what is none is left out.

    Example:
        >>> kept, gone = torch.ones(2), torch.ones(2)
        >>> storages = Storages([kept, gone, None])
        >>> kept.untyped_storage() in storages, torch.ones(2).untyped_storage() in storages
        (True, False)
    """

    __slots__ = ("_refs",)

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Any]) -> None:
        """Those of more tensors."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                storage = tensor.untyped_storage()
                self._refs[storage._cdata] = weakref.ref(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is one of them."""
        ref = self._refs.get(storage._cdata)
        return ref is not None and ref() is storage

    def has_that_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a plain one in one of them."""
        return is_plain(tensor) and tensor.untyped_storage() in self

    def clear(self) -> None:
        """Forget them all."""
        self._refs.clear()
