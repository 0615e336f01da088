"""What becomes of the inputs of units in the forward of a planned step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from lightning_mimose.measure.call import call_key
from lightning_mimose.measure.storages import Storages, Tensors
from lightning_mimose.parts import storages_in


class InputWatch:
    """Follows every storage that a unit is given, without holding it.

    Args:
        known: Tensors that are no activations.
        renewed: Tells those of them that may be replaced; see `Storages`.

    Example:
        >>> watch, mask = InputWatch([]), torch.ones(3)
        >>> watch.enters("block", (mask,), {})
        >>> watch.enters("block", (mask,), {})
        >>> del mask
        >>> watch.enters("head", (torch.ones(2),), {})
        >>> {tuple(sorted(holders)): last for holders, last in watch.fates().items()}
        {('block', 'block#1'): ['block#1'], ('head',): ['head']}
    """

    def __init__(self, known: Iterable[torch.Tensor], renewed: Tensors | None = None) -> None:
        self._storages = Storages(known, renewed=renewed)
        self._given: dict[int, set[str]] = {}
        self._last: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._calls: dict[str, int] = {}
        self._begun: list[str] = []

    def enters(self, unit: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A unit is called in forward; tensors inside a transform of `torch.func` have no storage of their own."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        count = self._calls[unit] = self._calls.get(unit, -1) + 1
        self._begun.append(call_key(unit, count))
        for storage in storages_in((args, kwargs)):
            if self._storages.is_resident(storage):
                continue
            number = self._storages.number(storage)
            self._given.setdefault(number, set()).add(self._begun[-1])
            if number not in self._alive:
                self._alive[number] = weakref.ref(storage, partial(_note_end, self._last, self._begun, number))

    def fates(self) -> dict[frozenset[str], list[str | None]]:
        """Calls -> of each storage that just these were given, in order, which call had begun last when it died.

        None for one that is still alive; to be asked when backward is about to begin.
        """
        found: dict[frozenset[str], list[str | None]] = {}
        for number, calls in self._given.items():
            found.setdefault(frozenset(calls), []).append(self._last.get(number))
        return found


def _note_end(ends: dict[int, str], begun: list[str], number: int, _: object) -> None:
    """A storage is gone: the call that began last is the last of its life."""
    ends[number] = begun[-1]
