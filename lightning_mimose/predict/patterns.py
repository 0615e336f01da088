"""Patterns: when steps of a kind come, every so many steps or in the same places of every epoch."""

from __future__ import annotations

from collections import deque

from lightning_mimose.predict.told import CHANCE, PROVEN

MOST_WRONG = 3
"""How often a kind may be foreseen and not come before it has to come more often than not."""
REMEMBERED = 16
"""Steps of a kind among which a period is looked for."""
MISSING, MOST_PLACES = 5, 256
"""One in how many of them may be missing; and places in an epoch that are remembered."""


class Pattern:
    """When a kind comes: as it came some steps ago, or in the same places as in the epoch before.

    Attributes:
        period: After how many steps it comes again; None where nobody knows.
    """

    def __init__(self) -> None:
        self.period: int | None = None
        self._came: deque[int] = deque(maxlen=REMEMBERED)
        self._places: tuple[set[int], set[int]] = (set(), set())
        """In the epoch before, and in this one."""
        self._right, self._wrong = [0, 0], [0, 0]
        """How often it was foreseen and came, and did not, by the step and by the place."""

    def is_proven(self, share: float) -> bool:
        """Whether it came as foreseen so often, and hardly ever not, that this is no chance.

        Args:
            share: In which share of the steps it comes.
        """
        ways = zip(self._right, self._wrong, strict=True)
        return any(
            right >= PROVEN and wrong * PROVEN <= right and share ** (right - wrong) < CHANCE for right, wrong in ways
        )

    @property
    def is_loose(self) -> bool:
        """Whether the kind comes by chance."""
        return not self._holds(0) and not self._holds(1)

    def _holds(self, way: int) -> bool:
        return self._wrong[way] < MOST_WRONG or self._wrong[way] <= self._right[way]

    def foresees(self, step: int, place: int, *, goes_on: bool) -> bool:
        """Whether it comes in a step of the training that is at this place in its epoch.

        Args:
            step: The step.
            place: Its place.
            goes_on: Whether what came for the first time right before is taken to come again.
        """
        if goes_on and len(self._came) == 1 and self._came[0] == step - 1:
            return True
        return any(self._ways(step, place))

    def _ways(self, step: int, place: int) -> tuple[bool, bool]:
        return self._fits(step) and self._holds(0), place in self._places[0] and self._holds(1)

    def _fits(self, step: int) -> bool:
        """Whether it came a period before a step."""
        return self.period is not None and step - self.period in self._came

    def came(self, step: int, place: int) -> None:
        """It has come."""
        fits = self._fits(step)
        for way, foreseen in enumerate(self._ways(step, place)):
            self._right[way] += foreseen
        self._came.append(step)
        if len(self._places[1]) < MOST_PLACES:
            self._places[1].add(place)
        if not fits:
            self.period = self._period(step + 1)

    def stayed_away(self, step: int, place: int) -> None:
        """It was foreseen and has not come."""
        for way, foreseen in enumerate(self._ways(step, place)):
            self._wrong[way] += foreseen
        self.period = self._period(step + 1)

    def ends_epoch(self) -> None:
        """Another epoch begins."""
        self._places = (self._places[1], set())

    def _period(self, now: int) -> int | None:
        """The least number of steps after which it came again whenever it could, or nearly so."""
        first = min(self._came)
        came = 0  # a bit for each step: all are moved on at once
        for step in self._came:
            came |= 1 << (step - first)
        over = (1 << (now - first)) - 1
        for period in sorted({step - other for step in self._came for other in self._came if step > other}):
            due, before = came << period, came >> period
            missing, surplus = due & over & ~came, before & ~came
            again = (due & came).bit_count()
            if again and (missing.bit_count() + surplus.bit_count()) * MISSING <= again:
                return period
        return None
