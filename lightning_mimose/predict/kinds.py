"""Kinds of step: some have other operations than the rest, a loss that is added now and then, and take other memory.

Nothing in a batch says so before its forward has run. That they come in every so many-th step can be foreseen.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

MOST_BROKEN = 3
"""How often a kind may have come, or stayed away, otherwise than was foreseen."""
MOST_KINDS, MOST_COUNTS = 6, 32
"""Numbers of operations that may be kinds of their own, and that may be met at all, before none is foreseen."""
MOST_SIZES = 256
"""Sizes whose number of operations is remembered."""
MOST_WRONG = 4
"""Steps that were another kind than was foreseen before more of them have to be foreseen than not."""
STEADY = 6
"""Steps in a row that had a number that was known before, for a new one to tell something at once."""
FADES, CHANGED = 0.95, 2.0
"""What is left of a kind's weight with each step, and how many times as much another one needs to be the usual one."""
MOST_RENEWALS = 2
"""How often all is learnt anew where the number goes by the size, and another one of a size is met."""


@dataclass
class _Pattern:
    """When a kind comes: in every so many-th step.

    Attributes:
        last: Where it came last.
        period: After how many steps it comes again; 0 where it is always in the same place, None where nobody knows.
        broken: How often it did not do as was foreseen. That what came once does not go on is no surprise.
    """

    last: int
    period: int | None = 1
    broken: int = -1

    @property
    def holds(self) -> bool:
        """Whether it is worth to be followed."""
        return self.broken < MOST_BROKEN

    def foresees(self, place: int) -> bool:
        """Whether the kind comes there."""
        if self.period is None or not self.holds:
            return False
        return (place - self.last) % self.period == 0 if self.period else place == self.last

    def came(self, place: int) -> None:
        """It has come."""
        if self.period is None:
            self.period = abs(place - self.last)
        elif not self.foresees(place) and self.holds:
            self.period, self.broken = gcd(self.period, place - self.last), self.broken + 1
        self.last = place

    def stayed_away(self) -> None:
        """It was foreseen and has not come."""
        self.period, self.broken = None, self.broken + 1


@dataclass
class _Kind:
    """Steps of one number of operations.

    Attributes:
        patterns: By the steps of the training, and by those of an epoch.
        index: Its name; None as long as nothing speaks for it.
        is_sure: Whether it is one, and not what steps of some sizes have.
        times: How often it came.
        weight: The same of late.
        sizes: Of such steps, two of them.
    """

    patterns: tuple[_Pattern, _Pattern]
    index: int | None = None
    is_sure: bool = False
    times: int = 0
    weight: float = 0.0
    sizes: set[Hashable] = field(default_factory=set)

    def is_foreseen(self, step: int, place: int) -> bool:
        """Whether it comes in a step of the training that is at this place in its epoch."""
        return any(
            pattern.foresees(at) and (self.is_sure or pattern.period != 1)
            for pattern, at in zip(self.patterns, (step, place), strict=True)
        )

    def came(self, step: int, place: int) -> None:
        """It has come then."""
        for pattern, at in zip(self.patterns, (step, place), strict=True):
            pattern.came(at)

    def stayed_away(self, step: int, place: int) -> None:
        """It has not come then."""
        for pattern, at in zip(self.patterns, (step, place), strict=True):
            if pattern.foresees(at):
                pattern.stayed_away()

    @property
    def is_loose(self) -> bool:
        """Whether it comes by chance."""
        return not any(pattern.holds for pattern in self.patterns)


class Seen(NamedTuple):
    """What a step turned out to be.

    Attributes:
        kind: Its kind; None where that cannot be told.
        renews: Whether what was learnt before is to be learnt anew.
        mixed: Sizes of which something was learnt in steps of other kinds than it was taken for.
        doubts: Whether predictions may not hold, for it was another one than could be foreseen.
    """

    kind: int | None
    renews: bool = False
    mixed: frozenset[Any] = frozenset()
    doubts: bool = False


class Kinds:
    """Follows which kind of step comes when. Sizes are whatever stands for them.

    Example:
        >>> kinds, foreseen = Kinds(), []
        >>> for step in range(16):
        ...     count = 90 if step % 5 == 4 else 70
        ...     foreseen.append(kinds.foresee(step))
        ...     _ = kinds.saw(step, "a size", count)
        >>> [step for step, kind in enumerate(foreseen) if kind == 1]  # after 4 it may go on; after 9 it is foreseen
        [5, 14]
    """

    def __init__(self) -> None:
        self._steps = 0
        self._counts: dict[int, _Kind] = {}
        self._named: list[_Kind] = []
        self._usual = 0
        self._steady = 0
        self._sizes: dict[Hashable, int] = {}
        self._renewals = 0
        self._right = self._wrong = 0

    @property
    def follows(self) -> bool:
        """Whether they are told apart: no more if there are too many, or if most come by chance (layers left out)."""
        many = len(self._named) > MOST_KINDS or len(self._counts) > MOST_COUNTS
        return not many and (self._wrong < MOST_WRONG or self._wrong < self._right)

    def is_sure(self, index: int) -> bool:
        """Whether there is such a kind for sure."""
        return index < len(self._named) and self._named[index].is_sure

    def foresee(self, place: int) -> int:
        """The kind of the step that begins.

        Args:
            place: Its index in the epoch.
        """
        return self._foreseen(self._steps, place) if self.follows else self._usual

    def _foreseen(self, step: int, place: int) -> int:
        if len(self._named) < 2:
            return self._usual
        likely = [kind for kind in self._named if kind.is_foreseen(step, place)]
        # What comes in most steps comes if nothing else does.
        rarest = min(likely, key=lambda kind: kind.weight, default=None)
        return self._usual if rarest is None or rarest.index is None else rarest.index

    def saw(self, place: int, size: Hashable, count: int) -> Seen:
        """A step's forward is over.

        Args:
            place: The step's index in the epoch.
            size: The batch's size.
            count: How many operations with gradients it had.
        """
        if not self.follows:
            return self._by_chance(count)
        places, self._steps = (self._steps, place), self._steps + 1
        kind, is_new = self._counts.get(count), count not in self._counts
        was_foreseen = kind is not None and kind.index is not None and kind.is_foreseen(*places)
        foreseen = self._foreseen(*places)
        if kind is not None and kind.is_sure and not foreseen == kind.index == self._usual:
            right = kind.index == foreseen
            self._right, self._wrong = self._right + right, self._wrong + (not right)
        # Where two kinds were foreseen only one can come, which says nothing against the other.
        rarer = kind is not None and was_foreseen and kind.index != self._usual
        for other in self._counts.values():
            other.weight *= FADES
            if other is not kind and not rarer:
                other.stayed_away(*places)
        if kind is None:
            kind = self._counts[count] = _Kind((_Pattern(places[0]), _Pattern(places[1])))
        else:
            kind.came(*places)
        kind.times, kind.weight = kind.times + 1, kind.weight + 1
        if len(kind.sizes) < 2:
            kind.sizes.add(size)
        # Of one size and two numbers neither goes by the size; or one of them goes by chance.
        before = self._sizes.get(size)
        if before is None and len(self._sizes) < MOST_SIZES:
            self._sizes[size] = count
        conflicts = before not in (None, count)
        steady, self._steady = self._steady, self._steady + 1 if kind.is_sure else 0
        mixed, is_first = frozenset[Hashable](), not self._named
        if not kind.is_sure and (self._is_usual(kind) if is_first else was_foreseen or conflicts):
            # Until now it was taken for the first one; where this is the first, all others were.
            others = [kind] if not is_first else [other for other in self._counts.values() if other is not kind]
            mixed = frozenset().union(*(other.sizes for other in others)) - {size}
            kind.is_sure = True
        if kind.index is None and (kind.is_sure or (kind.times > 1 and not is_first)):
            kind.index = len(self._named)
            self._named.append(kind)
        if not kind.is_sure:
            return self._by_size(conflicts) if is_first else Seen(None, doubts=is_new and steady >= STEADY)
        return self._known(kind, mixed)

    def _is_usual(self, kind: _Kind) -> bool:
        """Whether a number is met again, at another size where there are several."""
        return kind.times > 1 and (len(kind.sizes) > 1 or len(self._sizes) == 1)

    def _known(self, kind: _Kind, mixed: frozenset[Hashable]) -> Seen:
        if not self.follows or kind.index is None:
            return Seen(None)
        if kind.index != self._usual and kind.weight > CHANGED * self._named[self._usual].weight:
            self._usual = kind.index
        if kind.index != self._usual and kind.is_loose:
            return Seen(None, doubts=True)
        return Seen(kind.index, mixed=mixed)

    def _by_chance(self, count: int) -> Seen:
        """A number where none is foreseen any more."""
        is_usual = bool(self._named) and self._counts.get(count) is self._named[self._usual]
        steady, self._steady = self._steady, self._steady + 1 if is_usual else 0
        return Seen(None, doubts=not is_usual and steady >= STEADY)

    def _by_size(self, differs: bool) -> Seen:
        """A number that may go by the size."""
        if not differs:
            return Seen(None)
        self._sizes.clear()
        renews, self._renewals = self._renewals < MOST_RENEWALS, self._renewals + 1
        return Seen(None, renews=renews, doubts=True)
