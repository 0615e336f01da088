"""What is known about the places in a unit's forward where tensors are saved, over all steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


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
    """

    checked: set[Place] = field(default_factory=set)
    different: set[Place] = field(default_factory=set)


class References:
    """Tensors that are not kept alive by being known."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._refs = [weakref.ref(each) for each in tensors if isinstance(each, torch.Tensor)]

    def live(self) -> Iterator[torch.Tensor]:
        """Those that are still there."""
        return (tensor for ref in self._refs if (tensor := ref()) is not None)
