"""Ample room: batches that no fit describes yet, or ever will, but that fit into the budget whatever they keep.

Steps that run backward twice over one graph, texts that are packed to lengths which the batch's dimensions do not tell:
what they would take if everything were kept is not known to the percent, but what sheltered steps took and saved
together is more than they would have. Likewise where some units are kept: what those would have saved comes on top.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

PATIENCE_STEPS = 12
"""Sheltered steps after which bounds are used: by then fits have mostly come about."""
MUCH_LARGER = 1.5
"""How many times as large as all before no size may be."""
GROWTH = 3
"""The power of it that memory may grow with: attention over pairs takes as much."""
LEAST_SAFETY = 1.2
"""What a step may take, over the most that any other one would have: batches of the same size need not be alike. Twice
as much at first, and less the more steps were seen: the next of n + 1 is the largest once in n + 1 times."""


class Spared(NamedTuple):
    """What recomputing a unit spares, and what it costs.

    Attributes:
        nbytes: What it would save.
        seconds: What it takes to run it again.
    """

    nbytes: int
    seconds: float


class Bounds:
    """What steps take at most if everything is kept, or some of it.

    Beyond the sizes that were seen a step may grow with the cube of each, and nothing is known far beyond them.

    Example:
        >>> bounds = Bounds()
        >>> for _ in range(PATIENCE_STEPS):
        ...     bounds.add({"batch": 4, "ids:1": 60}, 1000)
        >>> bounds.of({"batch": 4, "ids:1": 50}), bounds.of({"batch": 4, "ids:1": 66}), bounds.of({"batch": 4})
        (2000, 2662, None)
        >>> for _ in range(PATIENCE_STEPS):
        ...     bounds.add({"ids:1": 60}, 1000, 600, {"a": Spared(300, 0.1), "b": Spared(100, 0.2)})
        >>> bounds.within({"ids:1": 60}, 1500), bounds.within({"ids:1": 60}, 1000)
        ((frozenset({'b'}), 1400), None)
    """

    def __init__(self) -> None:
        self._steps: Counter[frozenset[str]] = Counter()
        self._refuted = False
        self._most_bytes: dict[frozenset[str], int] = {}
        self._largest: dict[frozenset[str], dict[str, int]] = {}
        self._sheltered_bytes = defaultdict[frozenset[str], int](int)
        self._spared = defaultdict[frozenset[str], dict[str, Spared]](dict)

    @property
    def knows_anything(self) -> bool:
        """Whether any step was seen."""
        return bool(self._steps)

    def add(
        self,
        dims: Mapping[str, int],
        kept_bytes: int,
        sheltered_bytes: int = 0,
        spared: Mapping[str, Spared] = MappingProxyType({}),
    ) -> None:
        """Take in a sheltered step.

        Args:
            dims: Named dimensions of its batch.
            kept_bytes: Its peak and all it saved, above what is resident.
            sheltered_bytes: Its peak alone.
            spared: The units that were recomputed, and what that spared.
        """
        names = frozenset(dims)
        self._steps[names] += 1
        largest = self._largest.setdefault(names, dict(dims))
        for name, value in dims.items():
            largest[name] = max(value, largest[name])
        self._most_bytes[names] = max(kept_bytes, self._most_bytes.get(names, 0))
        self._sheltered_bytes[names] = max(sheltered_bytes, self._sheltered_bytes[names])
        known = self._spared[names]
        for unit, (nbytes, seconds) in spared.items():
            most = known.get(unit, Spared(0, 0.0))
            known[unit] = Spared(max(nbytes, most.nbytes), max(seconds, most.seconds))

    def of(self, dims: Mapping[str, int]) -> int | None:
        """The bound for a size, in bytes above what is resident; None if there is none, or not yet."""
        times = self._times(dims)
        return None if times is None else int(times * self._most_bytes[frozenset(dims)])

    def within(self, dims: Mapping[str, int], room_bytes: int) -> tuple[frozenset[str], int] | None:
        """The units that may be kept, those first that take longest for what they save.

        Args:
            dims: Named dimensions of a batch.
            room_bytes: What the step may take above what is resident.

        Returns:
            They, and the bound for that step, in bytes above what is resident; None if there are none.
        """
        times, names = self._times(dims), frozenset(dims)
        if times is None:
            return None
        most, kept = self._sheltered_bytes[names], set[str]()
        for unit, spared in sorted(
            self._spared[names].items(), key=lambda each: each[1].nbytes / max(each[1].seconds, 1e-9)
        ):
            if times * (most + spared.nbytes) <= room_bytes:
                kept.add(unit)
                most += spared.nbytes
        return (frozenset(kept), int(times * most)) if kept else None

    def _times(self, dims: Mapping[str, int]) -> float | None:
        """How many times as much a size may take as any that was seen; None if nothing is known of that."""
        names = frozenset(dims)
        if self._refuted or self._steps.total() < PATIENCE_STEPS or names not in self._largest:
            return None
        largest = self._largest[names]
        if any(value > MUCH_LARGER * largest[name] for name, value in dims.items()):
            return None
        larger = prod(max(1.0, value / largest[name]) for name, value in dims.items() if largest[name])
        if larger > MUCH_LARGER:
            return None
        safety = max(LEAST_SAFETY, min(2.0, 1 + PATIENCE_STEPS / self._steps[names]))
        return safety * larger**GROWTH

    def refute(self) -> None:
        """A step took more, or may have: believe none of it any more."""
        self._refuted = True
