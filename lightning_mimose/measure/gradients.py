"""Gradients during one measured step: how many bytes are from before it, how many were made in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from lightning_mimose.parts import plain_parts


class GradientLedger:
    """Follows the gradients through a step without looking at all of them at every mark.

    Args:
        parameters: Every parameter with the bytes of its gradient.
        follow: Whether to count the gradients as they are made, with one hook per parameter.
        anytime: Whether gradients may be freed at any time of the step (a loop that zeroes them by itself), so that
            all of them are looked at whenever the bytes are asked for.

    Attributes:
        aside_bytes: Old gradients that are no parameter's until the step is over; they count as old.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, int]], *, follow: bool, anytime: bool = False) -> None:
        self._follow, self._anytime = follow, anytime
        self._parameters = parameters
        # An old gradient is one that was there at the start: the same tensor, which later backward passes add to.
        self._first = {id(p): TensorWeakRef(p.grad) for p, _ in parameters if p.grad is not None}
        self._old_bytes = sum(size for parameter, size in parameters if parameter.grad is not None)
        self._new_bytes = self.aside_bytes = 0
        self._handles: dict[int, RemovableHandle] = {}
        self._counted: set[int] = set()
        self._reached: dict[int, int] = {}

    @property
    def are_windows(self) -> bool:
        """Whether old gradients are parts of larger storages."""
        parts = (part for p, _ in self._parameters if p.grad is not None for part in plain_parts(p.grad))
        return any(part.untyped_storage().nbytes() > part.nbytes for part in parts)

    def __call__(self) -> tuple[int, int, int]:
        """(bytes older than the step, bytes made in it, bytes of older ones that backward has added to)."""
        if self._anytime:
            self.look()
        return self._old_bytes + self.aside_bytes, self._new_bytes, sum(self._reached.values())

    def begin_backward(self) -> None:
        """Look at what there is, and count new gradients as they are made; once per backward pass of the step."""
        self.look()
        for parameter, size in self._parameters:
            # What is frozen now may be trained in the next backward pass: two networks that take turns.
            if self._follow and parameter.requires_grad and id(parameter) not in self._handles:
                hook = self._made(size)
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)

    def look(self) -> None:
        """Look at all of them: whoever sets one by hand (`parameter.grad = ...`) tells no hook."""
        self._old_bytes = self._new_bytes = 0
        self._counted.clear()
        reached, self._reached = self._reached, {}
        for parameter, size in self._parameters:
            if parameter.grad is not None:
                if not self._is_old(parameter):
                    self._count(parameter, size)
                else:
                    self._old_bytes += size
                    if id(parameter) in reached:
                        self._reached[id(parameter)] = size

    def _is_old(self, parameter: torch.Tensor) -> bool:
        first = self._first.get(id(parameter))
        return first is not None and first() is parameter.grad

    def _count(self, parameter: torch.Tensor, size: int) -> None:
        if id(parameter) not in self._counted:
            self._counted.add(id(parameter))
            self._new_bytes += size

    def _made(self, size: int) -> Callable[[torch.Tensor], None]:
        def made(parameter: torch.Tensor) -> None:
            if not self._is_old(parameter):
                self._count(parameter, size)
            elif parameter.grad is not None:  # else a hook has let go of it
                self._reached[id(parameter)] = size

        return made

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.popitem()[1].remove()
