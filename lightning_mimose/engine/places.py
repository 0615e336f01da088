"""Where sizes are read from the next step on: in the batch, or at which of the model's calls.

Sizes are read in the batch (level 0) until one of these is seen:

- There is no tensor with dimensions in the first batch. (In a later one that is an error.)
- Batches of one size came to the first unit, or to the first one right inside a module around units, in tensors of
  different shapes. From the next step on sizes are read one level further inside; where that does not help a unit that
  is not the first, they are read where they were again. What a batch of few tensors tells itself stays part of the
  size: what the step has drawn is not all that decides (the tokens that were masked out come back in a decoder, a loss
  is taken at the resolution of the labels).
- After many steps that learnt, batches vary in far too many dimensions (a list of images, each of its own size), and
  the model is called with something else than these hold.
- Steps go by the shape of what comes to the first unit, and by what batches show they are described badly (two texts
  that are padded to the longer one).
- The model is called several times in a step, on inputs of sizes that do not follow from the first.

Level n is the nth call, from outside, of a module that holds units: level 1 is mostly the whole model's. The first
unit's own call is the last level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.dims import Leaf
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.paths import Key
from lightning_mimose.sizes import BatchSize, Place

MOST_RISES = 2
"""How often sizes are read further inside for a unit that is not the step's first."""


class Places:
    """Decides where the sizes of a model's steps are read.

    Args:
        advisor: Has the tracker of sizes; what it learnt by other sizes is forgotten, or laid aside.
        fixed: Whether sizes are read in the batch whatever they tell: a `size_fn` says what decides, or others (ranks,
            jobs) have to know a step's plan before it begins.
        moved: To be called when sizes mean something else from now on.

    Attributes:
        next: Where they are read from the next step on, if that is elsewhere.
        at_unit: Whether the latest size that was read inside a step was read in its first unit's call.
    """

    def __init__(self, advisor: Advisor, moved: Sequence[Callable[[], None]], *, fixed: bool) -> None:
        self._advisor, self._tracker, self._fixed, self._moved = advisor, advisor.tracker, fixed, moved
        self.next: Place | None = None
        self.at_unit = False
        self._risen: tuple[Place, str] | None = None
        """Where sizes were read before, for a unit that is not the first, they were read further inside, and what is
        around that."""
        self._rises = 0
        self._left: tuple[dict[str, Any], Estimator, int] | None = None
        """What was known of sizes where they were read before that, and of their steps, and when it was left."""
        self._looked_at = 0
        """Of how many sizes it was seen whether what the model is given tells more."""

    @property
    def level(self) -> int:
        """How far inside sizes are read, 0 for in the batch."""
        return self._tracker.level

    @property
    def stay(self) -> bool:
        """Whether it is decided where they are read from the next step on, or they cannot be read further inside."""
        return self._fixed or self.next is not None or (self.level > 0 and self.at_unit)

    @property
    def risen(self) -> bool:
        """Whether they are read further inside for a unit that is not the first."""
        return self._risen is not None

    def turn(self) -> None:
        """A step begins: read sizes where that was decided in those before."""
        if self.next is not None:
            self.move(self.next)
        if self._fixed and self.level:  # learnt by a run that could read them elsewhere
            self.move(Place(0))

    def may_go_inside(self) -> bool:
        """Whether sizes may be read inside the model where a batch of the first step tells none."""
        return not (self._fixed or self._tracker.names)

    def move(self, place: Place) -> None:
        """Read sizes at another place from now on; where they were read there before, what was learnt then is back."""
        tracker, advisor, left = self._tracker, self._advisor, self._left
        before = tracker.state_dict(), advisor.estimator
        self.next = self._left = None
        for each in self._moved:
            each()
        if left is not None and (*place, advisor.forgotten) == (*(left[0][name] for name in Place._fields), left[2]):
            tracker.load_state_dict({**left[0], "ignored": tracker.ignored.copy()})
            advisor.forget(left[1])
            return
        tracker.restart(*place)
        advisor.forget()
        if self._risen is not None and place.level == self._risen[0].level + 1:
            self._left = *before, advisor.forgotten

    def rise(self, why: str, *, with_batch: bool | None = None) -> bool:
        """Read sizes further inside from the next step on; returns whether that is possible.

        Args:
            why: For the log.
            with_batch: Whether what the batch tells itself is part of them; None for as it was.
        """
        if self.stay:
            return False
        here = self._tracker.place
        self.next = Place(here.level + 1, with_batch=here.with_batch if with_batch is None else with_batch)
        self._advisor.announce(f"mimose: {why}: sizes are read further inside the model from now on")
        return True

    def look(self, given: Mapping[Key, tuple[int, ...]], size: BatchSize) -> None:
        """A step was learnt from: see whether what came to its first unit tells more of it than its batch.

        Args:
            given: Size of a batch -> the shape of what came to its step's first unit.
            size: The step's.
        """
        estimator = self._advisor.estimator
        if self._fixed or len(estimator) == self._looked_at:  # no size is new
            return
        self._looked_at = len(estimator)
        told_better = estimator.is_told_better_by(given, size.dims)
        if told_better and self.rise("what the model is given tells more of steps than their batches do"):
            self._risen = None  # sizes are not read again where they were before that

    def read_all_calls(self, why: str) -> None:
        """Read the sizes of all of the model's calls from the next step on."""
        self.next = Place(self.level, entries=True)
        self._advisor.announce(f"mimose: {why} are read from now on")

    def cures(self, unit: str, around: str, told: str) -> bool:
        """A unit that is not the first is given other shapes than before; whether sizes will be read elsewhere for it.

        What it is given may follow from what is in a batch (tokens that are routed, a detector's proposals), and from
        no size at all: then to read them further inside does not help.

        Args:
            unit: The unit.
            around: The module that it is right inside of.
            told: What was seen, for the log.
        """
        here = self._tracker.place
        if self._risen is None and self._rises < MOST_RISES and self.rise(told, with_batch=True):
            self._risen = here, around
            self._rises += 1
            return True
        self._tracker.ignored.add(around)
        if self._risen is not None and self._risen[1] == around:
            self.next, self._risen = self._risen[0], None
            self._advisor.announce(f"mimose: {told} all the same: sizes are read where they were")
            return True
        return False


class Doubt:
    """Sizes tell hardly anything: looks, in one step, whether the model is called with what its batch holds.

    Args:
        why: For the log.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        self.over = False
        self._held: frozenset[tuple[int, ...]] | None = None

    @property
    def looking(self) -> bool:
        """Whether the step is running, or over, in which that is looked at."""
        return self._held is not None and not self.over

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """The step begins in which that is looked at.

        Args:
            leaves: What its batch holds.
        """
        self._held = frozenset(map(shape_of, leaves))

    def is_confirmed_by(self, leaves: Sequence[Leaf]) -> bool:
        """The model is called; returns whether with something else than the batch holds."""
        if not self.looking:
            return False
        self.over = True
        assert self._held is not None
        return not frozenset(map(shape_of, leaves)) <= self._held


shape_of: Callable[[Leaf], tuple[int, ...]] = itemgetter(1)
"""The shape of a tensor, of its path and that."""
