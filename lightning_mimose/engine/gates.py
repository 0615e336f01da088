"""Gates: the modules around a model's units, whose calls from outside tell what the model is given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_mimose.actions.foreign import in_backward
from lightning_mimose.actions.patch import is_patched, patch, undoing
from lightning_mimose.dims import Leaf
from lightning_mimose.engine.arguments import has_lists, leaves_in, named, positional_names
from lightning_mimose.units import Unit, is_compiled


class Calls(Protocol):
    """Is told of the calls."""

    outside: bool
    """Whether calls of modules around units count, for they are not inside one that did."""

    def offer(self, name: str, leaves: Sequence[Leaf]) -> bool:
        """A module around units is called with these tensors; returns whether that counts: no call inside does then."""

    def end_call(self) -> None:
        """A call that counted has returned."""


class Gates:
    """The modules around a model's units.

    Args:
        model: The model.
        units: What can be planned in it.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        outermost = [unit.name for unit in units if unit.parent < 0]
        around = {".".join(name.split(".")[:depth]) for name in outermost for depth in range(name.count(".") + 1)}
        self._gates = {name: model.get_submodule(name) for name in sorted(around)}
        self._undo: Callable[[], object] | None = None
        """Leaves the model as it was; called when the training is dropped without being closed, too."""

    def attach(self, taker: Calls) -> None:
        """Tell of calls from now on, unless it is done already."""
        if self._undo is not None:
            return
        patched: list[weakref.ref[nn.Module]] = []
        self._undo = undoing(self, patched)
        for name, gate in self._gates.items():
            # One module may have several names, and a list of blocks is not called.
            if not (is_compiled(gate) or is_patched(gate) or type(gate).forward is nn.Module.forward):
                switch = _Gate(taker, name, positional_names(type(gate).forward))
                patch(gate, switch.around, switch)
                patched.append(weakref.ref(gate))

    def detach(self) -> None:
        """Leave the model as it was."""
        if self._undo is not None:
            self._undo()
            self._undo = None


class _Gate:
    """What happens when a module around units is called. It holds no module: nothing of ours must keep one alive."""

    stops = None

    def __init__(self, taker: Calls, name: str, names: Sequence[str]) -> None:
        self._taker, self._name, self._names = weakref.ref(taker), name, names

    @property
    def armed(self) -> bool:
        """Whether its calls count now; without gradients (a teacher, a sample that is drawn) nothing is kept."""
        taker = self._taker()
        return taker is not None and taker.outside and torch.is_grad_enabled() and not in_backward()

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The handler that takes the place of its forward."""

        def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            taker = self._taker()
            given = named(self._names, args, kwargs)
            leaves = [] if has_lists(given) else leaves_in(given)
            if taker is None or not leaves or not taker.offer(self._name, leaves):
                return original(*args, **kwargs)
            taker.outside = False
            try:
                return original(*args, **kwargs)
            finally:
                taker.end_call()

        return handler
