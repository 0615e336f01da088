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
from torch.utils._python_dispatch import _disable_current_modes

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
        >>> held, originals = inputs.of([mask, 0.5])
        >>> originals[0]() is mask
        True
        >>> del mask
        >>> found, held
        ([(1, True)], [tensor([1., 1., 1.]), 0.5])
    """

    def __init__(self, storages: Storages, let_go: Callable[[int, bool], None]) -> None:
        self._storages, self._let_go = storages, let_go
        self._inputs: dict[int, _Input] = {}
        self._out_of_sight: set[int] = set()
        """Those that others hold by tensors which are not watched."""
        self._looks = 0
        self.followed: set[int] = set()
        """The numbers of all storages that have stand-ins."""

    def of(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[int, weakref.ref[torch.Tensor]]]:
        """What a region is to hold of its arguments: one stand-in for each tensor, where there can be any.

        Returns:
            The leaves, and by the index of each that stands for another: that one.
        """
        made: dict[int, torch.Tensor] = {}  # those that are the same in forward are the same again
        with _disable_current_modes():  # one that counts memory, or operations, has nothing to do with it
            held = [self._stand_in(leaf, made) if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        originals = {
            i: self._inputs[self._storages.number(leaf.untyped_storage())].watches[id(leaf)]
            for i, leaf in enumerate(leaves)
            if held[i] is not leaf
        }
        return held, originals

    def _stand_in(self, tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(tensor) in made:
            return made[id(tensor)]
        base = tensor._base
        if not self._can_have_one(tensor) or not (base is None or self._can_have_one(base)):
            return tensor
        one = stand_in(tensor) if base is None else _view_like(tensor, base, self._stand_in(base, made))
        if one is None:
            return tensor
        storage = tensor.untyped_storage()
        number = self._storages.number(storage)
        self.followed.add(number)
        known = self._inputs.setdefault(number, _Input(storage._cdata))
        known.ours.append(weakref.ref(one))
        if id(tensor) not in known.watches:
            known.watches[id(tensor)] = weakref.ref(tensor, partial(self._ends, number, id(tensor)))
        made[id(tensor)] = one
        return one

    def _can_have_one(self, tensor: torch.Tensor) -> bool:
        """Whether it is nothing but a window on its storage, and a recomputation can find no difference.

        Parameters, leaves and whatever has attributes, hooks or others' weak references are what they are to those who
        ask; dual numbers are more. What was let go of and comes back has come by a way that is not followed.
        """
        if _users is None or type(tensor) is not torch.Tensor:
            return False
        if tensor.layout is not torch.strided or tensor.is_nested or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        if self._storages.is_resident(storage) or tensor.__dict__ or tensor._backward_hooks:
            return False
        number = self._storages.given(storage)
        known = self._inputs.get(number)
        if known is None and number in self.followed:
            return False
        ours = known is not None and id(tensor) in known.watches
        return weakref.getweakrefcount(tensor) == ours and getattr(forward_ad, "_current_level", -1) < 0

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


def _view_like(tensor: torch.Tensor, base: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The same view of another base; None where it is more than a part of it in another shape."""
    if tensor.dtype != base.dtype or tensor.is_complex():
        return None
    with torch.set_grad_enabled(tensor.requires_grad):
        view = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    same = (view.requires_grad, view.is_neg()) == (tensor.requires_grad, tensor.is_neg())
    return view if same else None


_users: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", None)  # type: ignore[assignment]


@cache
def _unaccounted() -> int:
    """How many users torch itself counts for a storage that was seen in Python."""
    tensor = torch.zeros(1)
    tensor.untyped_storage()
    return _users(tensor.untyped_storage()._cdata) - 1
