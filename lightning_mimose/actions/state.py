"""State that a forward writes: found by content, put back around a recomputation.

BatchNorm's running statistics change with no change of `_version`, `.data` writes bump nothing, and
`self.buffer = ...` replaces the object: so identity and content are compared, once per unit and mode. State is
every buffer and every tensor that is a plain attribute and needs no gradient (one that does is an activation).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Saved = list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]
"""(owner, name of the buffer or attribute, the object, a copy of its content)"""


class WrittenState:
    """The tensors that a unit's forward writes, learnt the first time it runs in each mode.

    A norm that was frozen in eval mode writes nothing, until somebody switches it to training. The module is not
    kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [weakref.ref(inner) for inner in module.modules()]
        self._mode: tuple[bool, ...] = ()
        self._written: dict[tuple[bool, ...], list[tuple[weakref.ref[nn.Module], str]]] = {}

    def before_forward(self) -> Saved:
        """Copy what the forward may write (all there is until it is known which it does)."""
        inside = [module for ref in self._modules if (module := ref()) is not None]
        self._mode = tuple([module.training for module in inside])
        known = self._written.get(self._mode)
        if known is None:
            found = ((owner, name) for owner in inside for name in [*owner._buffers, *vars(owner)])
        else:
            found = ((owner, name) for ref, name in known if (owner := ref()) is not None)
        return [
            (owner, name, tensor, tensor.detach().clone())
            for owner, name in found
            if (tensor := _look(owner, name)) is not None
        ]

    def after_forward(self, before: Saved) -> Saved:
        """Learn which tensors were written; returns their copies from before the forward.

        If one tensor of the unit is written, all that were seen written stay watched from then on.
        """
        if self._mode in self._written:
            return before
        changed = [entry for entry in before if _look(entry[0], entry[1]) is not entry[2] or not _same(*entry[2:])]
        self._written[self._mode] = [(weakref.ref(owner), name) for owner, name, _, _ in changed]
        return changed

    @contextmanager
    def restored(self, before: Saved) -> Iterator[None]:
        """Run a recomputation on the state the forward saw, and leave the state as it was found."""
        if not before:
            yield
            return
        now = [
            (owner, name, tensor, tensor.detach().clone())
            for owner, name, _, _ in before
            if (tensor := _look(owner, name)) is not None
        ]
        _put_back(before)
        try:
            yield
        finally:
            _put_back(now)


def _look(owner: nn.Module, name: str) -> torch.Tensor | None:
    """The buffer or plain attribute of a name, if it is a tensor that holds state."""
    value = owner._buffers[name] if name in owner._buffers else vars(owner).get(name)
    return value if isinstance(value, torch.Tensor) and not value.requires_grad else None


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    # NaN is unequal to itself and then counts as written, which is safe.
    return tensor.shape == copy.shape and torch.equal(tensor.detach(), copy)


def _put_back(saved: Saved) -> None:
    for owner, name, tensor, content in saved:
        if name in owner._buffers:
            owner._buffers[name] = tensor
        else:
            vars(owner)[name] = tensor
        # `.data` leaves the version counter alone: autograd may have saved this very tensor for backward.
        tensor.data.copy_(content)
