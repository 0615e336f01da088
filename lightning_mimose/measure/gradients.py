"""Gradients during one measured step: how many bytes are from before it, how many were made in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class GradientLedger:
    """Follows the gradients through a step without looking at all of them at every mark.

    Args:
        parameters: Every parameter with the bytes of its gradient.
        follow: Whether to count the gradients as they are made, with one hook per parameter.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, int]], *, follow: bool) -> None:
        self._follow = follow
        self._parameters = parameters
        self._old_bytes = sum(size for parameter, size in parameters if parameter.grad is not None)
        self._new_bytes = 0
        self._handles: list[RemovableHandle] = []
        self._counted: set[int] = set()

    def __call__(self) -> tuple[int, int]:
        """(bytes older than the step, bytes made in it)."""
        return self._old_bytes, self._new_bytes

    def begin_backward(self) -> None:
        """Look at what is left of the old gradients, and count new ones as they are made."""
        old = new = 0
        for parameter, size in self._parameters:
            if parameter.grad is not None:
                if id(parameter) in self._counted:
                    new += size
                else:
                    old += size
        self._old_bytes, self._new_bytes = old, new
        if self._follow and not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._made(size, parameter.grad is not None))
                for parameter, size in self._parameters
                if parameter.requires_grad
            ]

    def _made(self, size: int, existed: bool) -> Callable[[torch.Tensor], None]:
        def made(parameter: torch.Tensor) -> None:
            if not existed and id(parameter) not in self._counted:
                self._counted.add(id(parameter))
                self._new_bytes += size

        return made

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()
