"""What is known about the places in a unit's forward where tensors are saved, over all steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

MOST_HOPELESS = 512
"""Places of a unit that are known to be without a recipe."""


class Place(NamedTuple):
    """Where in a unit's forward a tensor is saved.

    Attributes:
        number: How many were before it.
        made_by: The operation that made it.
        recipe: From which of them it would be rebuilt, and how (`Handle.identity`).
    """

    number: int
    made_by: str
    recipe: int


@dataclass
class Sites:
    """What is known about the places of one unit, over all steps.

    Attributes:
        checked: Places whose recipe gave the same bits.
        different: Places whose recipe did not; they keep their tensor.
        hopeless: Places without a recipe, for which none is looked for again: the grade, their number, that of the
            operation that made them, and what stands for the functions that were called until then.
    """

    checked: set[Place] = field(default_factory=set)
    different: set[Place] = field(default_factory=set)
    hopeless: set[tuple[int, int, int, int]] = field(default_factory=set)

    def give_up(self, place: tuple[int, int, int, int]) -> None:
        """Look for no recipe there again."""
        if len(self.hopeless) >= MOST_HOPELESS:  # a forward that takes another way each time
            self.hopeless.clear()
        self.hopeless.add(place)


class References:
    """Tensors that are not kept alive by being known."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._refs = [weakref.ref(each) for each in tensors if isinstance(each, torch.Tensor)]

    def live(self) -> Iterator[torch.Tensor]:
        """Those that are still there."""
        return (tensor for ref in self._refs if (tensor := ref()) is not None)
