"""Stand-ins: what the regions of a measured step hold of their inputs, so that it shows when everybody else lets go.

A mask is given to every block of an encoder, and saved by none of them. A region has to hold it until it runs again,
where it would live only as long as the caller wants it if the block were kept. So a region holds another tensor on the
same storage, and the storage's count of users tells when no others are left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad

from lightning_mimose.measure.storages import Storages


class _Same(torch.autograd.Function):
    """The same memory, dtype and version counter, made by a node of its own: neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same storage, that keeps nothing else alive but what made it."""
    if not tensor.requires_grad:
        return tensor.detach()
    same: torch.Tensor = _Same.apply(tensor)  # type: ignore[no-untyped-call]
    return same


class _Input:
    """A storage that regions were given.

    Attributes:
        address: Of the storage.
        ours: The stand-ins.
        watches: Identity of a tensor that others may hold -> what tells of its end.
        latest: At which look the latest of these ended, and how many others there were, that one included.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.ours: list[weakref.ref[torch.Tensor]] = []
        self.watches: dict[int, weakref.ref[torch.Tensor]] = {}
        self.latest = (0, 0)

    @property
    def others(self) -> int | None:
        """How many tensors besides the stand-ins use it; None where these are gone, and it may be as well."""
        # One that the unit's own code has moved to other memory (`x.data = y`) is none of them.
        alive = (tensor for each in self.ours if (tensor := each()) is not None)
        ours = sum(tensor.untyped_storage()._cdata == self.address for tensor in alive)
        return _users(self.address) - ours - _unaccounted() if ours else None


class StandIns:
    """The inputs of a measured step's regions.

    Args:
        storages: Numbers them.
        let_go: Told a storage's number when only regions hold it any more, and whether that has happened just now, or
            at some moment since the last look.

    Example:
        >>> found = []
        >>> inputs, mask = StandIns(Storages([]), lambda number, now: found.append((number, now))), torch.ones(3)
        >>> held = inputs.of([mask, 0.5])
        >>> del mask
        >>> found, held[0]
        ([(1, True)], tensor([1., 1., 1.]))
    """

    def __init__(self, storages: Storages, let_go: Callable[[int, bool], None]) -> None:
        self._storages, self._let_go = storages, let_go
        self._inputs: dict[int, _Input] = {}
        self._out_of_sight: set[int] = set()
        """Those that others hold by tensors which are not watched."""
        self._looks = 0
        self.followed: set[int] = set()
        """The numbers of all storages that have stand-ins."""

    def of(self, leaves: Sequence[Any]) -> list[Any]:
        """What a region is to hold of its arguments: one stand-in for each tensor, where there can be any."""
        # A recomputation finds those the same that were so in forward.
        known = {id(leaf): self._stand_in(leaf) for leaf in leaves if _can_have_one(leaf)}
        return [known.get(id(leaf), leaf) for leaf in leaves]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._storages.is_resident(storage):
            return tensor
        number = self._storages.number(storage)
        if number not in self.followed:
            self.followed.add(number)
            self._inputs[number] = _Input(storage._cdata)
        one = stand_in(tensor)
        known = self._inputs.get(number)
        if known is not None:  # else it was let go of, and comes back by a way that is not followed
            known.ours.append(weakref.ref(one))
            for each in (tensor, tensor._base):
                if each is not None and id(each) not in known.watches:
                    known.watches[id(each)] = weakref.ref(each, partial(self._ends, number, id(each)))
        return one

    def _ends(self, number: int, identity: int, _: object) -> None:
        """A tensor that others held ends, and still counts; so may a view of it, that has ended right before."""
        known = self._inputs.get(number)
        others = None if known is None else known.others
        if known is None or others is None:
            return
        known.watches.pop(identity, None)
        now = self._looks, others
        if others == 1 or (others == 2 and now == known.latest):
            self._is_alone(number, now=True)
        elif not known.watches:
            self._out_of_sight.add(number)
        known.latest = now

    def look(self) -> None:
        """See whether others have let go of anything in a way that could not be followed."""
        self._looks += 1
        for number in list(self._out_of_sight):
            known = self._inputs.get(number)
            if known is not None and known.others == 0:
                self._is_alone(number, now=False)

    def _is_alone(self, number: int, *, now: bool) -> None:
        del self._inputs[number]
        self._out_of_sight.discard(number)
        self._let_go(number, now)

    def close(self) -> None:
        """The step is over."""
        self._inputs.clear()
        self._out_of_sight.clear()


def _can_have_one(leaf: Any) -> bool:
    """Whether it is nothing but a window on its storage, and a recomputation can find no difference.

    Parameters, leaves and whatever has attributes or hooks are what they are to those who ask; dual numbers are more.
    """
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested or _users is None:
        return False
    if (leaf.is_leaf and leaf.requires_grad) or leaf.__dict__ or leaf._backward_hooks:
        return False
    return getattr(forward_ad, "_current_level", -1) < 0


_users: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", None)  # type: ignore[assignment]


@cache
def _unaccounted() -> int:
    """How many users torch itself counts for a storage that was seen in Python."""
    tensor = torch.zeros(1)
    tensor.untyped_storage()
    return _users(tensor.untyped_storage()._cdata) - 1
