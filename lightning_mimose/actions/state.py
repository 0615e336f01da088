"""State that a forward writes: found by content, put back around a recomputation.

BatchNorm's running statistics change with no change of `_version`, `.data` writes bump nothing, and
`self.buffer = ...` replaces the object: so identity and content are compared, once per unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_Buffers = dict[tuple[nn.Module, str], torch.Tensor]
Saved = list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]
"""(owner, buffer name, the object, a copy of its content)"""


class WrittenState:
    """The buffers that a unit's forward writes, learnt the first time it runs under `watch`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: list[tuple[nn.Module, str]] | None = None

    def before_forward(self) -> Saved:
        """Copy what the forward may write (all buffers until it is known which it does)."""
        if self._written is not None:
            return [_copy(owner, name) for owner, name in self._written if owner._buffers.get(name) is not None]
        return [
            _copy(owner, name)
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def after_forward(self, before: Saved) -> Saved:
        """Learn which buffers were written; returns their copies from before the forward.

        If one buffer of the unit is written, all that were seen written stay watched from then on.
        """
        changed = [
            entry
            for entry in before
            if entry[0]._buffers.get(entry[1]) is not entry[2] or not _same(entry[2], entry[3])
        ]
        if self._written is None:
            self._written = [(owner, name) for owner, name, _, _ in changed]
            return changed
        return before

    @contextmanager
    def restored(self, before: Saved) -> Iterator[None]:
        """Run a recomputation on the state the forward saw, and leave the state as it was found."""
        if not before:
            yield
            return
        now = [_copy(owner, name) for owner, name, _, _ in before]
        _put_back(before)
        try:
            yield
        finally:
            _put_back(now)


def _copy(owner: nn.Module, name: str) -> tuple[nn.Module, str, torch.Tensor, torch.Tensor]:
    buffer = owner._buffers[name]
    assert buffer is not None
    return owner, name, buffer, buffer.detach().clone()


def _same(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    # NaN is unequal to itself and then counts as written, which is safe.
    return buffer.shape == copy.shape and torch.equal(buffer.detach(), copy)


def _put_back(saved: Saved) -> None:
    for owner, name, buffer, content in saved:
        owner._buffers[name] = buffer
        # `.data` leaves the version counter alone: autograd may have saved this very buffer for backward.
        buffer.data.copy_(content)
