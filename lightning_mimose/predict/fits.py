"""The fits over what was observed: each is made when it is first asked for, and again when more was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from lightning_mimose.predict.checking import USABLE_ERROR
from lightning_mimose.predict.features import may_be_surfaces
from lightning_mimose.predict.fit import Fit, Value
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.late import Late
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.paths import Key, names_of
from lightning_mimose.predict.shapes import NEVER
from lightning_mimose.predict.structure import Structure

MAY_BE_LATE = 6
"""Sizes of images from which on a fit that was hopeless before comes late: others take little time."""
HOPELESS_ERROR = 2 * USABLE_ERROR
"""Share of the step's peak: nothing is planned by a fit that misses sizes by more, however many there are."""

Part: TypeAlias = tuple[str, range]
"""Some of the sizes: a dimension, and which of its values these have."""
Slot: TypeAlias = tuple[Structure, Part | None, tuple[str, ...]]
"""What a fit is of: the shape of a step, which of its sizes, names of dimensions."""


def with_value(name: str, value: int) -> Part:
    """The sizes that have one value of a dimension.

    Args:
        name: The dimension.
        value: That value.
    """
    return name, range(value, value + 1)


def with_side(name: str, value: int, turns: Sequence[int]) -> Part:
    """The sizes of which kernels are those of some value of a dimension.

    Args:
        name: The dimension.
        value: That value.
        turns: From which of its values on kernels are others.

    Example:
        >>> with_side("batch", 5, (2, 16))
        ('batch', range(2, 16))
    """
    first = max((turn for turn in turns if turn <= value), default=0)
    return name, range(first, min((turn for turn in turns if turn > value), default=NEVER))


def with_batch_of(key: Key) -> Part | None:
    """The sizes whose batches are as large as that of one size; None if it has no batch."""
    return next((with_value(name, value) for name, value in key if name == "batch"), None)


def those_in(part: Part | None, known: Iterable[Key]) -> list[Key]:
    """The sizes of a part.

    Args:
        part: The part; None for all of them.
        known: All of them, with the same dimensions.
    """
    keys = list(known)
    if part is None or not keys:
        return keys
    place = names_of(keys[0]).index(part[0])  # once: this is asked for every prediction
    return [key for key in keys if key[place][1] in part[1]]


class Fits:
    """The fits of what is known so far.

    Attributes:
        hurries: Whether training waits for what is asked: otherwise no fit comes late.
    """

    def __init__(self) -> None:
        self.hurries = False
        self._fits: dict[Slot, Fit] = {}
        self._before: dict[Slot, Fit] = {}
        """What stands in for fits that are late: the last ones, of fewer sizes."""
        self._without: dict[tuple[Part | None, tuple[str, ...]], tuple[Value, ...]] = {}
        """What fits have left out, before the latest size was measured."""
        self._late = Late[Slot, tuple[Fit, int]]()
        self._stood_in: set[Slot] = set()
        self._failed: set[Slot] = set()
        self._news = False
        self._additions = 0

    def measured(self, observed: Collection[Structure]) -> None:
        """More was measured: all fits are made anew.

        Args:
            observed: The shapes of steps that are still of interest.
        """
        self._without |= {slot[1:]: fit.without for slot, fit in self._fits.items()}
        self._before = {slot: fit for slot, fit in (self._before | self._fits).items() if slot[0] in observed}
        self._fits.clear()
        self._stood_in.clear()
        self._failed.clear()
        self._additions += 1

    def of(
        self, structure: Structure, part: Part | None, known: Mapping[Key, Measured], resident_bytes: int
    ) -> Fit | None:
        """The fit over some sizes, or over a part of them; None if there is none.

        Args:
            structure: The shape of their steps.
            part: That part.
            known: What was observed of them, all with the same dimensions.
            resident_bytes: See `best_fit`.
        """
        keys = those_in(part, known)
        if not keys:  # and nothing is remembered of that: there may be a batch of any size
            return None
        names = names_of(keys[0])
        if part is not None:
            alone = with_value(part[0], dict(keys[0])[part[0]])
            # The same sizes, by whatever they were told apart: one fit.
            part = alone if len(those_in(alone, keys)) == len(keys) else part
        slot = (structure, None if len(keys) == len(known) else part, names)  # one where there is but one batch size
        if slot in self._fits:
            return self._fits[slot]
        sizes, measured = [dict(key) for key in keys], [known[key] for key in keys]
        work = partial(best_fit, sizes, measured, structure, resident_bytes, self._without.get(slot[1:], ()))
        before, additions = self._before.get(slot), self._additions
        if self.hurries and before is not None and self._may_be_late(slot, before, sizes):
            self._late.begin(slot, lambda: (work(), additions))
            self._stood_in.add(slot)
            return before
        fit = self._fits[slot] = work()
        self._news |= slot in self._stood_in
        self._stood_in.discard(slot)
        return fit

    def _may_be_late(self, slot: Slot, before: Fit, sizes: Sequence[Mapping[str, int]]) -> bool:
        is_hopeless = len(sizes) >= MAY_BE_LATE and before.error > HOPELESS_ERROR and may_be_surfaces(sizes)
        return is_hopeless and slot not in self._failed

    @property
    def is_late(self) -> bool:
        """Whether something stands in for a fit that is still being made."""
        return bool(self._stood_in)

    @contextmanager
    def at_leisure(self) -> Iterator[None]:
        """While somebody asks who would rather wait."""
        hurries, self.hurries = self.hurries, False
        try:
            yield
        finally:
            self.hurries = hurries

    def settle(self) -> bool:
        """Take in the fits that have come late; whether predictions are others than they were."""
        for slot, late in self._late.arrived():
            if late is None:  # whoever asks next does the work itself, and is told
                self._failed.add(slot)
                continue
            fit, additions = late
            self._news |= slot in self._stood_in
            if additions == self._additions:
                self._fits.setdefault(slot, fit)
                self._stood_in.discard(slot)
            elif slot not in self._before or self._before[slot].sizes <= fit.sizes:  # more was measured since
                self._before[slot] = fit
                self._without[slot[1:]] = fit.without
        news, self._news = self._news, False
        return news
