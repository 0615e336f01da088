"""Recipes: values that are rebuilt from those of other handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_mimose.actions.lean.handles import Handle, Rebuilt
from lightning_mimose.actions.switches import ARITHMETIC

Rebuild = Callable[..., torch.Tensor]
MANY_OPERATIONS = 12
"""Above so many, it is looked at in which order the values of a recipe's inputs are made."""


class Recipe(Rebuilt):
    """A value that is rebuilt from those of other handles.

    Attributes:
        widest_bytes: Bytes of the largest value that is made on the way to it, itself included.
        own_grade: The least grade that would have it, if all of `inputs` were saved.
        operations: How many of the same call are run for it where nothing is made once for several; what another unit
            has returned is made when that is due.

    Args:
        rebuild: Makes it from the values of `inputs`.
        inputs: What it is made from.
        nbytes: Its bytes.
        shape: Its shape.
        grade: See `Handle`.
        work: What rebuilding costs, in floating-point operations or as much time.
        is_view: Whether it takes no memory of its own.
        gives_away: Whether nobody else has what `rebuild` returns: new memory, or all of such a value in its order.
        takes_out: Whether `rebuild` can be told to write its result over one of the values, as `out`.
        made_in: Stands for the call that it is made in, whoever packs it (`owner`).
        own_grade: See above; `grade` by default.
    """

    __slots__ = (
        "_gives_away",
        "_longest_first",
        "_made_in",
        "_rebuild",
        "_switches",
        "_takes_out",
        "inputs",
        "is_view",
        "operations",
        "own_grade",
        "widest_bytes",
        "work",
    )

    def __init__(
        self,
        rebuild: Rebuild,
        inputs: Sequence[Handle],
        nbytes: int,
        shape: tuple[int, ...],
        grade: int,
        work: float,
        *,
        is_view: bool = False,
        gives_away: bool = False,
        takes_out: bool = False,
        made_in: object = None,
        own_grade: int | None = None,
    ) -> None:
        super().__init__(nbytes, shape, grade)
        self._rebuild, self.work, self.is_view = rebuild, work, is_view
        self._gives_away, self._takes_out = gives_away or takes_out, takes_out
        self._switches = ARITHMETIC.positions()
        self._made_in = made_in
        self.own_grade = grade if own_grade is None else own_grade
        self._longest_first: Sequence[int] = ()
        self.operations, self.widest_bytes = 1, 0 if is_view else nbytes
        self.inputs = tuple(inputs)
        self._count(1)
        for each in self.inputs:
            rebuilt = each.rebuilt
            if isinstance(rebuilt, Recipe):
                self.operations += self._operations_of(rebuilt)
                if each is rebuilt and not each.is_saved:
                    self.widest_bytes = max(self.widest_bytes, rebuilt.widest_bytes)
        if self.operations > MANY_OPERATIONS:
            operations = [self._operations_of(each.rebuilt) for each in self.inputs]
            self._longest_first = sorted(range(len(operations)), key=operations.__getitem__, reverse=True)

    def __del__(self) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        """Tell what it is made from that it is, or no more."""
        for each in self.inputs:
            rebuilt = each.rebuilt
            if rebuilt is not None:
                rebuilt.builds += change

    @property
    def sources(self) -> Sequence[Handle]:
        """Its inputs."""
        return self.inputs

    def _operations_of(self, rebuilt: Rebuilt | None) -> int:
        return rebuilt.operations if isinstance(rebuilt, Recipe) and rebuilt._made_in is self._made_in else 0

    @property
    def is_given_away(self) -> bool:
        """See `Handle`: what an operation saved is shared among its uses."""
        if self.is_saved or not self._gives_away:
            return False
        return self.inputs[0].is_given_away if self.is_view else True

    @property
    def overwritten(self) -> int | None:
        """Which input's value the result is written over, so that no memory has to be got from the system."""
        if not self._takes_out:
            return None
        for index, each in enumerate(self.inputs):
            if each.is_given_away and (each.nbytes, each.shape) == (self.nbytes, self.shape):
                return index
        return None

    def _made(self) -> torch.Tensor:
        with ARITHMETIC.lent(self._switches):
            return self._followed()

    def _followed(self) -> torch.Tensor:
        if torch.is_grad_enabled():  # as it is not in backward, mostly
            with torch.no_grad():
                return self._followed()
        values = self._values()
        index = self.overwritten
        if index is None or not _in_one_order(values[index], values):
            return self._rebuild(*values)
        return self._rebuild(*values, out=values[index])

    def _values(self) -> list[Any]:
        if not self._longest_first or torch._C._current_graph_task_id() != -1:
            return [each.value() for each in self.inputs]
        # Outside of a backward pass what was saved is made again for every link of a chain, and what is made before
        # the rest of the chain waits for that.
        made = {place: self.inputs[place].value() for place in self._longest_first}
        return [made[place] for place in range(len(made))]


def _in_one_order(out: torch.Tensor, values: Sequence[Any]) -> bool:
    """Whether an operation on these values would give its result the strides of `out`, which is one of them."""
    return is_ordered(out) and all(
        each.stride() == out.stride()
        for each in values
        if isinstance(each, torch.Tensor) and each.shape == out.shape and each is not out
    )


def is_ordered(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory in an order that kernels have a way for: rows, or channels last."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
