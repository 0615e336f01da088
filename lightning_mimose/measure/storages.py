"""Storages by number: what a step's calls are given, return and save, told apart for good."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mimose.parts import plain_parts, storages_in

Tensors = Callable[[], Iterable[torch.Tensor]]
"""Tells tensors as they are now."""


class Storages:
    """Numbers the storages of one step. A number is never used again, unlike an address.

    Args:
        resident: Tensors that are not activations (parameters, buffers, the batch), whose storages calls do not hold.
        ask: Told each storage that is first seen where a call is given it: it may be older than the step.
        renewed: Tells those that may be replaced by others, and is asked when one has gone. Not the batch: where a
            step puts others into it (blocks that hand on a dictionary), these are activations.

    Attributes:
        asked: The numbers of those, in order.

    Example:
        >>> import torch
        >>> weight, x = torch.zeros(2), torch.zeros(3)
        >>> storages = Storages([weight])
        >>> storages.in_order([x, weight, x.view(3, 1)]), storages.bytes_in([x, weight])
        ([1, 2, 1], {1: 12})
    """

    def __init__(
        self,
        resident: Iterable[torch.Tensor],
        ask: Callable[[torch.UntypedStorage], None] | None = None,
        renewed: Tensors | None = None,
    ) -> None:
        self._renewed = renewed
        self._resident: set[int] = set()
        self._gone: list[int] = []
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []
        self._take(resident)
        self._numbers: Any = WeakIdKeyDictionary()
        self._last = 0
        self._ask = ask
        self.asked: list[int] = []

    def _take(self, resident: Iterable[torch.Tensor]) -> None:
        """Know the storages of what is resident, each until it goes: its address may be an activation's then."""
        for tensor in resident:
            for part in plain_parts(tensor):
                storage = part.untyped_storage()
                key = storage._cdata
                if key not in self._resident:
                    self._resident.add(key)
                    self._ends.append(weakref.ref(storage, partial(_goes, self._resident, self._gone, key)))

    def number(self, storage: torch.UntypedStorage) -> int:
        """The storage's number."""
        number = self._numbers.get(storage)
        if number is None:
            self._last += 1
            number = self._numbers[storage] = self._last
        return int(number)

    def is_resident(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is that of a parameter or a buffer."""
        if self._gone:
            self._gone.clear()
            if self._renewed is not None:
                self._take(self._renewed())
        return storage._cdata in self._resident

    def kept_by(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        """The storages that keeping a tensor keeps; none of what is resident."""
        # A parameter that FSDP2 has gathered is another storage than the model's, and empty until backward.
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return []
        return [storage for part in plain_parts(tensor) if not self.is_resident(storage := part.untyped_storage())]

    def bytes_in(self, tree: Any) -> dict[int, int]:
        """Number -> bytes of the storages in a structure of tensors, those that are resident left out."""
        found = [storage for storage in storages_in(tree) if not self.is_resident(storage)]
        return {self.given(storage): storage.nbytes() for storage in found}

    def given(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage that a call is given."""
        if self._ask is not None and storage not in self._numbers:
            self._ask(storage)
            self.asked.append(self.number(storage))
        return self.number(storage)

    def in_order(self, tree: Any) -> list[int]:
        """The number of every tensor's storage in a structure."""
        return [self.number(storage) for storage in storages_in(tree)]

    def alive(self) -> frozenset[int]:
        """The numbers of those that are there."""
        return frozenset(self._numbers.values())

    def clear(self) -> None:
        """Forget all of them: the step is over."""
        self._numbers.clear()
        self._ends.clear()
        self._renewed = None


def _goes(resident: set[int], gone: list[int], key: int, _: object) -> None:
    resident.discard(key)
    gone.append(key)
