"""The table of recipes: which operation's result is rebuilt how, and from what.

An entry is named after autograd's node. It is given a `Node`, through which it asks for what the node saved, for
what its inputs are rebuilt from, and for constants; if anything is missing (`MissingError`, or None among what the
recipe is made from) the tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_mimose.actions.lean.handles import Handle
from lightning_mimose.actions.lean.recipe import Rebuild
from lightning_mimose.menu import ELEMENTWISE

# What an element costs, in operations of a matrix product that take as long. Bandwidth decides for most. Measured in
# steps of BERT (two CPU cores), where what they read is long out of the caches; `bench grades` in `examples` compares.
VIEW, LIGHT, HEAVY, SOFTMAX, NORM, GELU = 0.0, 80.0, 100.0, 120.0, 150.0, 110.0
MASK = 220.0
"""To pack an element of a mask and unpack it."""
ALLOCATED = 30.0
"""How much of that goes for memory to write to: spared where a result is written over a value."""
PRODUCT = 1.0
"""The same for an operation of a matrix product."""


class MissingError(Exception):
    """An input cannot be had. Not an error of the package's: whoever asked for the recipe keeps the tensor."""


class Node(Protocol):
    """One operation, as recipes see it."""

    @property
    def output(self) -> int:
        """Which of its results is wanted; the first, but for those that have a recipe for all of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its result."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its result is; as far as is known, where that is on the way to what is to be rebuilt."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its result."""

    @property
    def device(self) -> torch.device:
        """Of its result."""

    def saved(self, name: str) -> Handle | None:
        """What the node saved under a name, if it is ours."""

    def field(self, name: str) -> Any:
        """What it saved that is no tensor.

        Raises:
            MissingError: This version of torch does not save it.
        """

    def edge(self, index: int) -> Handle:
        """The value that input `index` had.

        Raises:
            MissingError: It cannot be had.
        """

    def scores(self) -> Handle:
        """As `edge(0)`; a batched product on the way to it is attention's, of a lower grade than others."""

    def operand(self, name: str, index: int) -> Handle:
        """`saved`, or `edge` where the node did not need to save it."""

    def given(self, tensor: Tensor) -> Handle | None:
        """A tensor without gradients, if it is there as long as the recipe may need it."""

    def mask(self) -> Handle | None:
        """What attention's own function added to its scores, if this is that sum."""

    def constant(self, name: str) -> Any:
        """A number that the operation was called with and its node does not have; None if it was not seen."""


class Made(NamedTuple):
    """How to rebuild.

    Attributes:
        rebuild: A function of the inputs' values.
        inputs: What it is given.
        work_per_element: Operations it takes.
        work: Those that do not go with the elements.
        takes_out: Whether it takes a keyword `out`, which may be one of the values: then nothing is allocated.
        gives_away: Whether nobody else has its result: it is never one of the values, or a part of one. Of a view:
            whether it is all of the value in the same order. What takes `out` says so with it.
        grade: Its own grade, if that is more than its entry's.
    """

    rebuild: Rebuild
    inputs: tuple[Handle | None, ...]
    work_per_element: float
    work: float = 0.0
    takes_out: bool = False
    gives_away: bool = False
    grade: int = 0


class Entry(NamedTuple):
    """A row of the table.

    Attributes:
        grade: The least grade of lean saves that has it.
        make: Makes the recipe.
        needs_first: Whether nothing can be made without the value of the first input.
        all_outputs: Whether it is asked for any of the operation's results, not for the first alone.
    """

    grade: int
    make: Callable[[Node], Made | None]
    needs_first: bool = False
    all_outputs: bool = False


TABLE: dict[str, Entry] = {}


def recipe(
    *names: str, grade: int = ELEMENTWISE, needs_first: bool = False, all_outputs: bool = False
) -> Callable[[Callable[[Node], Made | None]], Any]:
    """Enter a recipe for nodes of some names, see `Entry`."""

    def enter(make: Callable[[Node], Made | None]) -> Callable[[Node], Made | None]:
        for name in names:
            TABLE[name] = Entry(grade, make, needs_first, all_outputs)
        return make

    return enter


def signed(number: int) -> int:
    """Dimensions come back as unsigned 64-bit integers."""
    return number - 2**64 if number >= 2**63 else number
