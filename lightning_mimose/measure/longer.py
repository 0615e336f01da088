"""What the graph of a region holds for longer where that is kept: it is asked for early, and needed to the end.

A checkpoint of the user's inside a block asks for what it was given before it runs again, and so does whoever reads
`saved_tensors` by himself. Where the block is kept its graph holds that until nothing of it is left. What was
recomputed goes once it was asked for, as soon as nobody works with it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from lightning_mimose.measure.call import Call
from lightning_mimose.measure.curve import Curve
from lightning_mimose.measure.storages import Storages
from lightning_mimose.measure.trace import ENDS_EARLY, ENDS_LATE

_ENGINE = _engine_run_backward.__code__


def asked_by_hand() -> bool:
    """Whether the caller was called by Python code, and not by a node of the graph that backward has reached.

    Example:
        >>> def unpack(packed):
        ...     print(asked_by_hand())
        ...     return packed
        >>> with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        ...     out = torch.ones(2, requires_grad=True).exp()
        >>> out.sum().backward()
        False
    """
    try:
        return sys._getframe(2).f_code is not _ENGINE
    except ValueError:  # a thread of the engine's
        return False


class Longer:
    """Follows it in the backward of one region.

    Args:
        call: The region's.
        curve: What is cut where what was recomputed goes, and where the graph would let go of it; not kept alive.
        storages: Their numbers; nor are these.
        searching: Whether Python looks for cycles: what goes then goes at another moment in every step.
    """

    def __init__(self, call: Call, curve: Curve, storages: Storages, searching: Callable[[], bool]) -> None:
        self._searching = searching
        self._key, self._sizes = call.key, call.longer
        self._curve, self._storages = weakref.ref(curve), weakref.ref(storages)
        self._slots: dict[int, list[weakref.ref[Any]]] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._early: set[int] = set()

    def asked(self, slot: Any, tensor: torch.Tensor) -> None:
        """Somebody asks for a tensor.

        Args:
            slot: What the graph holds in its place, as long as it would hold the tensor.
            tensor: What was recomputed.
        """
        curve, storages = self._curve(), self._storages()
        if curve is None or storages is None or curve.over:
            return
        for storage in storages.kept_by(tensor):
            number = storages.number(storage)
            self._slots.setdefault(number, []).append(weakref.ref(slot, partial(self._ends, number)))
            if number not in self._watches:
                self._watches[number] = weakref.ref(storage, partial(self._goes, number, storage.nbytes()))

    def _goes(self, number: int, nbytes: int, _: object) -> None:
        curve = self._curve()
        if curve is not None and not curve.over and not self._searching() and self._is_held(number):
            self._early.add(number)
            self._sizes[number] = nbytes
            curve.cut(self._key, ENDS_EARLY, number)

    def _ends(self, number: int, _: object) -> None:
        curve = self._curve()
        if curve is not None and number in self._early and not self._is_held(number):
            self._early.discard(number)
            curve.cut(self._key, ENDS_LATE, number)

    def _is_held(self, number: int) -> bool:
        return any(ref() is not None for ref in self._slots[number])
