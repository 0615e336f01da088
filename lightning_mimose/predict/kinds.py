"""Kinds of step: some have other operations than the rest, a loss that is added now and then, and take other memory.

Nothing in a batch says so before its forward has run. That they come in every so many-th step can be foreseen.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_mimose.predict.patterns import Pattern
from lightning_mimose.predict.separate import are_separate
from lightning_mimose.predict.told import ToldBySize

MOST_KINDS, MOST_COUNTS = 6, 32
"""Numbers of operations that may be kinds of their own, and that may be met at all, before none is foreseen."""
MOST_SIZES, MOST_MIXED = 256, 32
"""Sizes whose number of operations is remembered, and those of steps of one kind."""
MOST_GUESSES = 4
"""Steps that were another kind than was foreseen before more of them have to be foreseen than not."""
STEADY = 6
"""Steps in a row that had a number that was known before, for a new one to tell something at once."""
FADES, CHANGED = 0.95, 2.0
"""What is left of a kind's weight with each step, and how many times as much another one needs to be the usual one."""
MOST_RENEWALS = 2
"""How often all is learnt anew where the number goes by the size, and another one of a size is met."""
MOST_PATHS, MOST_PATHS_OF_SIZE = 256, 16
"""Sets of units that were called and are remembered, in all and of each size."""


@dataclass
class _Kind:
    """Steps of one number of operations.

    Attributes:
        pattern: When they come, of those whose size has not told so before; of all of them once it is sure.
        every: When all of them come.
        index: Its name; None as long as nothing speaks for it.
        is_sure: Whether it is one, and not what steps of some sizes have.
        times: How often it came.
        weight: The same of late.
        sizes: Of such steps, as many as are remembered.
        shares: Whether steps that called the same units had another number: if not, it goes by what they call.
        is_apart: Whether their sizes alone may tell them from all others.
    """

    pattern: Pattern = field(default_factory=Pattern)
    every: Pattern = field(default_factory=Pattern)
    index: int | None = None
    is_sure: bool = False
    times: int = 0
    weight: float = 0.0
    sizes: set[Hashable] = field(default_factory=set)
    shares: bool = False
    is_apart: bool = False

    def came(self, step: int, place: int, *, told: bool = False) -> None:
        """It has come; `told` says that nothing else was to be expected of the size."""
        for pattern in {self.every} if told else {self.pattern, self.every}:
            pattern.came(step, place)

    def becomes_sure(self) -> None:
        """It is one: from now on all of its steps count."""
        self.is_sure, self.pattern = True, self.every

    def forget(self) -> None:
        """When it came is not known."""
        self.every = Pattern()
        self.pattern = self.every if self.is_sure else Pattern()

    def is_foreseen(self, step: int, place: int) -> bool:
        """Whether it comes then."""
        if not self.is_sure and self.pattern.period == 1:
            return False  # sizes may have grown
        return self.index is not None and self.pattern.foresees(step, place, goes_on=self.is_sure)


class Seen(NamedTuple):
    """What a step turned out to be.

    Attributes:
        kind: Its kind; None where that cannot be told.
        renews: Whether what was learnt before is to be learnt anew.
        mixed: Sizes of which something was learnt in steps of other kinds than it was taken for.
        doubts: Whether predictions may not hold, for it was another one than could be foreseen.
        is_new: Whether nothing like it had come, nor was to be expected: if it goes on, what it takes is not known.
    """

    kind: int | None
    renews: bool = False
    mixed: frozenset[Any] = frozenset()
    doubts: bool = False
    is_new: bool = False


class Kinds:
    """Follows which kind of step comes when. Sizes are whatever stands for them.

    Attributes:
        usual: The kind of most steps of late.

    Example:
        >>> kinds, foreseen = Kinds(), []
        >>> for step in range(16):
        ...     count = 90 if step % 5 == 4 else 70
        ...     foreseen.append(kinds.foresee(step, step))
        ...     _ = kinds.saw(step, step, "a size", count)
        >>> [step for step, kind in enumerate(foreseen) if kind == 1]  # after 4 it may go on; after 9 it is foreseen
        [5, 14]
    """

    def __init__(self) -> None:
        self.usual = 0
        self._place = 0
        self._counts: dict[Hashable, _Kind] = {}
        self._named: list[_Kind] = []
        self._times = self._steady = 0
        self._sizes: dict[Hashable, dict[Hashable, Hashable]] = {}
        """Size -> units that were called -> the number of operations, each the first time."""
        self._paths: dict[Hashable, Hashable] = {}
        """The same of all sizes."""
        self._told = ToldBySize()
        self._renewals = 0
        self._right = self._wrong = 0

    @property
    def follows(self) -> bool:
        """Whether they are told apart: no more if there are too many, or if most come by chance (layers left out)."""
        many = len(self._counts) > MOST_COUNTS or sum(not self._waits(kind) for kind in self._named) > MOST_KINDS
        return not many and (self._wrong < MOST_GUESSES or self._wrong < self._right)

    def is_sure(self, index: int) -> bool:
        """Whether there is such a kind for sure."""
        return index < len(self._named) and self._named[index].is_sure

    def _waits(self, kind: _Kind) -> bool:
        """Whether it may come by chance, with the units that are called (blocks left out) or the size (batches of one).

        What such steps take is known from the paths through the model, see `predict.paths`, and from their sizes.
        """
        if kind.is_sure or (kind.shares and not kind.is_apart and not self._told.holds):
            return False
        return not kind.pattern.is_proven(kind.times / max(1, self._times))

    def _hold_sizes_apart(self) -> None:
        if len(self._counts) > 1:
            for kind in self._counts.values():
                others = [size for other in self._counts.values() if other is not kind for size in other.sizes]
                kind.is_apart = are_separate(kind.sizes, others)

    def foresee(self, step: int, place: int) -> int:
        """The kind of a step.

        Args:
            step: How many there were before it.
            place: Its index in the epoch.
        """
        if len(self._named) < 2 or not self.follows:
            return self.usual
        likely = [kind for kind in self._named if kind.is_foreseen(step, place) and not self._waits(kind)]
        # What comes in most steps comes if nothing else does.
        rarest = min(likely, key=lambda kind: kind.weight, default=None)
        return self.usual if rarest is None or rarest.index is None else rarest.index

    def saw(self, step: int, place: int, size: Hashable, count: Hashable, path: Hashable = None) -> Seen:
        """A step's passes are over.

        Args:
            step: See `foresee`.
            place: Likewise.
            size: The batch's size.
            count: How many operations with gradients it had, or what stands for all that it did with them.
            path: Stands for the units that were called.
        """
        other = self._paths.setdefault(path, count) if len(self._paths) < MOST_PATHS else self._paths.get(path, count)
        if len(self._counts) == 1 and self._named and count in self._counts:  # as in most trainings, in every step
            self._of_size(size, path, count)
            only = self._named[0]
            only.weight, self._steady, self._place = only.weight * FADES + 1, self._steady + 1, place
            return Seen(only.index)
        if not self.follows:
            return self._by_chance(count)
        if place < self._place:
            for pattern in {pattern for each in self._counts.values() for pattern in (each.pattern, each.every)}:
                pattern.ends_epoch()
        self._place = place
        if len(self._counts) == 1 and self._named:
            self._named[0].forget()  # when it came was not written down for as long as it was the only one
        is_new, kind = count not in self._counts, self._counts.setdefault(count, _Kind())
        if other != count and other in self._counts:
            kind.shares = self._counts[other].shares = True
        self._told.saw(size, count, kind.weight / max(1.0, sum(each.weight for each in self._counts.values())))
        if self._named and self._told.holds:
            self._doubt()
        before, always = self._of_size(size, path, count)
        if self._named and always and not kind.is_sure:
            self._steady = 0
            kind.came(step, place, told=True)
            return Seen(None)  # its size has told so: what comes again is that
        was_foreseen = self._compare(kind, step, place)
        kind.times, kind.weight, self._times = kind.times + 1, kind.weight + 1, self._times + 1
        if len(kind.sizes) < MOST_MIXED and size not in kind.sizes:
            kind.sizes.add(size)
            self._hold_sizes_apart()
        # Of one size and two numbers neither goes by the size; or one of them goes by chance.
        conflicts = before != count
        steady, self._steady = self._steady, self._steady + 1 if kind.is_sure else 0
        mixed, is_first = frozenset[Hashable](), not self._named
        speaks = self._is_usual(kind) if is_first else (was_foreseen or conflicts) and not self._waits(kind)
        if speaks and not kind.is_sure:
            # Until now it was taken for the usual one; where this is the first, all others were.
            others = [kind] if not is_first else [other for other in self._counts.values() if other is not kind]
            mixed = frozenset().union(*(other.sizes for other in others if other.shares)) - {size}
            kind.becomes_sure()
        if kind.index is None and (kind.is_sure or (kind.times > 1 and not is_first)):
            kind.index = len(self._named)
            self._named.append(kind)
        if not kind.is_sure:
            is_new &= steady >= STEADY
            return self._by_size(conflicts) if is_first else Seen(None, doubts=is_new, is_new=is_new)
        return self._known(kind, mixed)

    def _doubt(self) -> None:
        """What was foreseen of numbers that go by the size was chance."""
        for kind in self._named[1:]:
            kind.is_sure &= kind.pattern.is_proven(kind.times / max(1, self._times))
        if not self._named[self.usual].is_sure:
            self.usual = 0

    def _of_size(self, size: Hashable, path: Hashable, count: Hashable) -> tuple[Hashable, bool]:
        """The number that a size had when these units were called, and whether it was met and had no other at all."""
        known = self._sizes.get(size)
        if known is None:
            if len(self._sizes) < MOST_SIZES:
                self._sizes[size] = {path: count}
            return count, False
        always = all(number == count for number in known.values())
        if path not in known and len(known) < MOST_PATHS_OF_SIZE:
            known[path] = count
        return known.get(path, count), always

    def _compare(self, kind: _Kind, step: int, place: int) -> bool:
        """Hold what was foreseen against the kind that came; returns whether it was foreseen."""
        foreseen, was_foreseen = self.foresee(step, place), kind.is_foreseen(step, place)
        if kind.is_sure and not foreseen == kind.index == self.usual:
            self._right, self._wrong = self._right + (kind.index == foreseen), self._wrong + (kind.index != foreseen)
        # Where two kinds were foreseen only one can come, which says nothing against the other.
        rarer = was_foreseen and kind.index != self.usual
        for other in self._counts.values():
            other.weight *= FADES
            if other is not kind and not rarer and other.is_foreseen(step, place):
                other.pattern.stayed_away(step, place)
        kind.came(step, place)
        return was_foreseen

    def _is_usual(self, kind: _Kind) -> bool:
        """Whether a number is met again, at another size where there are several."""
        return kind.times > 1 and (len(kind.sizes) > 1 or len(self._sizes) == 1)

    def _known(self, kind: _Kind, mixed: frozenset[Hashable]) -> Seen:
        if not self.follows or kind.index is None:
            return Seen(None)
        if kind.index != self.usual and kind.weight > CHANGED * self._named[self.usual].weight:
            self.usual = kind.index
        if kind.index != self.usual and kind.pattern.is_loose:
            return Seen(None, doubts=True)
        return Seen(kind.index, mixed=mixed)

    def _by_chance(self, count: Hashable) -> Seen:
        """A number where none is foreseen any more."""
        is_usual = bool(self._named) and self._counts.get(count) is self._named[self.usual]
        steady, self._steady = self._steady, self._steady + 1 if is_usual else 0
        return Seen(None, doubts=not is_usual and steady >= STEADY)

    def _by_size(self, differs: bool) -> Seen:
        """A number that may go by the size."""
        if not differs:
            return Seen(None)
        self._sizes.clear()
        renews, self._renewals = self._renewals < MOST_RENEWALS, self._renewals + 1
        return Seen(None, renews=renews, doubts=True)
