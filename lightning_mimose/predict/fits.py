"""The fits over what was observed: each is made when it is first asked for, and again when more was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.features import may_be_surfaces
from lightning_mimose.predict.fit import GOOD_ERROR, Fit, Value, best_fit
from lightning_mimose.predict.late import Late
from lightning_mimose.predict.structure import Structure

MAY_BE_LATE = 6
"""Sizes of images from which on a fit that was no good before comes late: others take little time."""

Key: TypeAlias = tuple[tuple[str, int], ...]
"""A size: its named dimensions, sorted."""
Slot: TypeAlias = tuple[Structure, Value | None, tuple[str, ...]]
"""What a fit is of: the shape of a step, the value that a dimension has in all of its sizes, names of dimensions."""


class Fits:
    """The fits of what is known so far.

    Attributes:
        hurries: Whether training waits for what is asked: otherwise no fit comes late.
    """

    def __init__(self) -> None:
        self.hurries = False
        self._fits: dict[Slot, Fit | None] = {}
        self._before: dict[Slot, Fit] = {}
        """What stands in for fits that are late: the last ones, of fewer sizes."""
        self._without: dict[tuple[Value | None, tuple[str, ...]], tuple[Value, ...]] = {}
        """What fits have left out, before the latest size was measured."""
        self._late = Late[Slot, tuple[Fit, int]]()
        self._additions = 0

    def measured(self, observed: Collection[Structure]) -> None:
        """More was measured: all fits are made anew.

        Args:
            observed: The shapes of steps that are still of interest.
        """
        made = {slot: fit for slot, fit in self._fits.items() if fit is not None}
        self._without |= {slot[1:]: fit.without for slot, fit in made.items()}
        self._before = {slot: fit for slot, fit in (self._before | made).items() if slot[0] in observed}
        self._fits.clear()
        self._additions += 1

    def of(
        self, structure: Structure, part: Value | None, known: Mapping[Key, NDArray[np.float64]], resident_bytes: int
    ) -> Fit | None:
        """The fit over some sizes, or over those of them that have one value of some dimension; None if there is none.

        Args:
            structure: The shape of their steps.
            part: That value.
            known: What was observed of them, all with the same dimensions.
            resident_bytes: See `best_fit`.
        """
        keys = [key for key in known if part is None or part in key]
        names = tuple(name for name, _ in next(iter(known), ()))
        slot = (structure, None if len(keys) == len(known) else part, names)  # one where there is but one batch size
        if slot not in self._fits:
            some = {key: known[key] for key in keys}
            self._fits[slot] = self._make(slot, some, resident_bytes) if keys else None
        return self._fits[slot]

    def _make(self, slot: Slot, known: Mapping[Key, NDArray[np.float64]], resident_bytes: int) -> Fit:
        sizes, values = [dict(key) for key in known], np.array(list(known.values()))
        work = partial(best_fit, sizes, values, slot[0], resident_bytes, self._without.get(slot[1:], ()))
        before, additions = self._before.get(slot), self._additions
        is_hard = before is not None and before.error > GOOD_ERROR and may_be_surfaces(sizes)
        if before is None or not is_hard or not self.hurries or len(sizes) < MAY_BE_LATE:
            return work()
        self._late.begin(slot, lambda: (work(), additions))
        return before

    def settle(self, *, wait: bool = False) -> bool:
        """Take in the fits that have come late; whether there are any.

        Args:
            wait: Whether to wait for those that have not come.
        """
        news = False
        for slot, (fit, additions) in self._late.arrived(wait=wait):
            news = True
            if additions == self._additions:
                self._fits[slot] = fit
            else:  # more was measured since
                self._before[slot] = fit
                self._fits.pop(slot, None)
        return news
