"""What lean units return to the next one: rebuilt from what they save themselves, wherever that one would keep it.

A block's output is one operation away from what the block saves (a norm's result, a sum and a ReLU), and yet the next
block saves it, or holds it to run again. So it is looked up here by whoever saves a tensor, and its recipe is kept.
It is made when that block's backward begins, from when on plans expect it to be there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lightning_mimose.actions.checksum import checksum
from lightning_mimose.actions.lean.handles import Rebuilt, rebuilt_now
from lightning_mimose.errors import is_out_of_memory
from lightning_mimose.parts import leaves_in


class Result:
    """One such tensor.

    Attributes:
        handle: What it is rebuilt by.
        unit: Whose result it is.
        taken: Whether another unit has saved it.
    """

    def __init__(self, base: torch.Tensor, handle: Rebuilt, unit: str, *, read: bool) -> None:
        self.handle, self.unit, self.taken = handle, unit, False
        self._state = state_of(base)
        self._checksum = checksum(base) if read else None

    def is_unchanged(self, base: torch.Tensor) -> bool:
        """Whether nobody has changed it in a way that autograd would see, or looks at more or less of it."""
        return state_of(base) == self._state

    def has_bits_of(self, base: torch.Tensor) -> bool:
        """Whether nobody has changed it at all; not known, and no, if its bits were not read."""
        return self._checksum is not None and checksum(base) == self._checksum


class Returned:
    """What lean units have returned so far in a step, as long as it is there.

    Example:
        >>> from lightning_mimose.actions.lean.handles import Kept
        >>> from lightning_mimose.actions.lean.recipe import Recipe
        >>> returned, hidden = Returned(), torch.ones(2, 2)
        >>> recipe = Recipe(torch.relu, [Kept(torch.ones(2, 2))], 16, (2, 2), 1, 4.0)
        >>> returned.add(hidden, recipe, "block", read=True)
        >>> returned.of(hidden.untyped_storage()).has_bits_of(hidden), len(returned)
        (True, 1)
        >>> del hidden
        >>> len(returned)
        0
    """

    def __init__(self) -> None:
        self._results: dict[int, tuple[weakref.ref[torch.UntypedStorage], Result]] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._results)

    def add(self, base: torch.Tensor, handle: Rebuilt, unit: str, *, read: bool) -> None:
        """A unit returns a tensor, or a view of it.

        Args:
            base: The tensor.
            handle: What it is rebuilt by.
            unit: The unit.
            read: Whether somebody will ask for its bits.
        """
        storage = base.untyped_storage()
        forget = partial(_forget, self._results, storage._cdata)
        self._results[storage._cdata] = weakref.ref(storage, forget), Result(base, handle, unit, read=read)

    def of(self, storage: torch.UntypedStorage) -> Result | None:
        """What was returned in a storage."""
        ref, result = self._results.get(storage._cdata, (None, None))
        return result if ref is not None and ref() is storage else None

    def units(self) -> set[str]:
        """Whose results are still there, of those that other units have saved."""
        return {result.unit for ref, result in self._results.values() if ref() is not None and result.taken}

    def clear(self) -> None:
        """The step is over."""
        self._results.clear()


def _forget(
    results: dict[int, tuple[weakref.ref[torch.UntypedStorage], Result]],
    address: int,
    ref: weakref.ref[torch.UntypedStorage],
) -> None:
    """A storage is gone; another one may have its address by now."""
    if address in results and results[address][0] is ref:
        del results[address]


def state_of(base: torch.Tensor) -> tuple[object, ...]:
    """What is another if somebody has written a tensor, or looks at more or less of its storage."""
    return base._version, base.shape, base.stride(), base.storage_offset(), base.dtype, base.is_conj(), base.is_neg()


def make_in_backward(taken: Sequence[Rebuilt], out: Any) -> None:
    """Make what a unit has taken from others when its backward begins, not when that first asks for it.

    Args:
        taken: By what it is made. Not kept alive.
        out: What the unit has returned.
    """
    waiting = [weakref.ref(each) for each in taken]

    def make(_: Any) -> None:
        for each in waiting:
            live = each()
            if live is not None and live.uses and not live.is_over:
                _try_to_make(live)

    for leaf in leaves_in(out) if waiting else ():
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(make)


def _try_to_make(result: Rebuilt) -> None:
    try:
        rebuilt_now(result)
    except Exception as error:  # whoever asks for it will be told, if anybody does in this pass
        if is_out_of_memory(error):
            raise
