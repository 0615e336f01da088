"""What is known about the places in a unit's forward where tensors are saved, over all steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_mimose.actions.lean.handles import Handle, with_sources


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


Spot = tuple[int, int, int, str]
"""Where a tensor is saved and by which grade: the grade, how many were saved before it, how many operations had run,
and the one that made it. It takes less to tell than a `Place`, for nothing has to be looked for."""
SURE, AGAIN = 2, 16
"""Calls in which nothing came of a spot before it is passed over, and after how many calls it is looked at again."""
BUSY = -1
MOST_SPOTS = 4096
"""That are remembered: a block whose operations go by what a batch holds has new ones in every call."""


@dataclass
class Sites:
    """What is known about the places of one unit, over all steps.

    Attributes:
        checked: Places whose recipe gave the same bits.
        different: Places whose recipe did not; they keep their tensor.
        vain: Places that keep theirs in grades below this: a recipe would hold what is lost otherwise, see `lost`.
        idle: In how many calls of late a spot's tensor was kept and nothing was rebuilt from it; `BUSY` where it was
            rebuilt once, or something from it.
    """

    checked: set[Place] = field(default_factory=set)
    different: set[Place] = field(default_factory=set)
    vain: dict[Place, int] = field(default_factory=dict)
    idle: dict[Spot, int] = field(default_factory=dict)
    _calls: int = field(default=0, compare=False)

    def settle(self, kept: Iterable[tuple[Spot, Iterable[Handle | None]]], made: Iterable[Handle]) -> None:
        """Learn from a call where looking for recipes is in vain.

        Args:
            kept: Spots whose tensors were kept, and the handles that stood for them.
            made: What came of the call that is rebuilt.
        """
        unknown = [(spot, handles) for spot, handles in kept if self.idle.get(spot) != BUSY]
        self._calls += 1
        if self._calls % AGAIN == 0 or len(self.idle) > MOST_SPOTS:
            busy = (spot for spot, count in self.idle.items() if count == BUSY)
            self.idle = dict.fromkeys(busy if len(self.idle) <= MOST_SPOTS else (), BUSY)
        if unknown:
            used = set(map(id, with_sources(made)))
            for spot, handles in unknown:
                is_used = any(id(each) in used for each in handles)
                self.idle[spot] = BUSY if is_used else self.idle.get(spot, 0) + 1


class References:
    """Tensors that are not kept alive by being known."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._refs = [weakref.ref(each) for each in tensors if isinstance(each, torch.Tensor)]

    def live(self) -> Iterator[torch.Tensor]:
        """Those that are still there."""
        return (tensor for ref in self._refs if (tensor := ref()) is not None)
