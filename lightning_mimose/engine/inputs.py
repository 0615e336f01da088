"""What units are given, compared with what they were given at that size before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lightning_mimose.engine.arguments import first_tensor
from lightning_mimose.predict.paths import Key
from lightning_mimose.sizes import BatchSize
from lightning_mimose.units import Unit

KNOWN_INPUTS, KNOWN_SHAPES = 2048, 64
"""How often it is remembered what a unit was given at some size; and in full, what the first one was given."""


class Inputs:
    """Compares the first unit of every step, and the first one right inside each module around units.

    Of the others, which ones these are is seen in steps that learn. Of what they are given the first tensor counts:
    masks come and go with their contents, and stand behind what they mask.

    Args:
        units: All units; what is called inside a unit says no more.
        ignored: Modules around units whose first one is not compared unless it is the step's first.

    Attributes:
        given: Size of a batch -> the shape of what came to its step's first unit.
    """

    def __init__(self, units: Sequence[Unit], ignored: Collection[str]) -> None:
        self._around = {unit.name: unit.name.rpartition(".")[0] for unit in units if unit.parent < 0}
        self._known: dict[int, int] = {}
        self.given: dict[Key, tuple[int, ...]] = {}
        self._compared: set[str] = set()
        self._awaited: set[str] | None = None
        self._seen: set[str] = set()
        self._ignored = ignored

    def forget(self) -> None:
        """Sizes mean something else from now on."""
        self._known.clear()
        self._compared.clear()
        self.given.clear()

    def begin(self, *, learns: bool) -> None:
        """A step begins; all calls of one that learns are looked at, and while nothing is known of which to look at."""
        everything = learns or not self._compared
        self._awaited = None if everything else set(self._compared)
        self._seen.clear()

    def around(self, unit: str) -> str:
        """The module that an outermost unit is right inside of."""
        return self._around[unit]

    @property
    def started(self) -> bool:
        """Whether a unit was compared in this step."""
        return bool(self._seen)

    @property
    def awaits_more(self) -> bool:
        """Whether there is one yet to be compared."""
        return not self._seen or self._awaited is None or bool(self._awaited)

    def differ(self, size: BatchSize, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A unit is called, in a step of some size: whether it was given something else at that size before."""
        around = self._around.get(unit)
        if around is None or around in self._seen:
            return False
        tensor = first_tensor([*args, *kwargs.values()])
        if tensor is None:
            return False
        if self._awaited is None and around not in self._ignored:
            self._compared.add(unit)
        if not self._seen:
            self._note(size, tuple(tensor.shape))
        counts = not self._seen or (unit in self._compared and around not in self._ignored)
        if counts and not self._is_known(size, unit, tuple(tensor.shape)):
            return True
        self.take(unit)
        return False

    def take(self, unit: str) -> None:
        """Nothing more is to be compared of the module around a unit in this step."""
        around = self._around[unit]
        self._seen.add(around)
        if self._awaited:
            self._awaited = {other for other in self._awaited if self._around[other] != around}

    def _note(self, size: BatchSize, shape: tuple[int, ...]) -> None:
        key = tuple(sorted(size.dims))
        self.given.pop(key, None)
        self.given[key] = shape
        if len(self.given) > KNOWN_SHAPES:
            del self.given[next(iter(self.given))]

    def _is_known(self, size: BatchSize, unit: str, shape: tuple[int, ...]) -> bool:
        if len(self._known) >= KNOWN_INPUTS:
            self._known.clear()
        found = hash(shape)
        return self._known.setdefault(hash((size.dims, size.layout, unit)), found) == found
