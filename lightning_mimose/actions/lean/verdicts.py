"""Verdicts: which recipes give the bits of the tensor that was saved. Each place is compared when it is met first."""

from __future__ import annotations

from typing import Any

import torch

from lightning_mimose.actions.lean.comparison import rebuilds
from lightning_mimose.actions.lean.handles import Handle
from lightning_mimose.actions.lean.sites import Place, Sites


def place_of(number: int, node: Any, handle: Handle, base: torch.Tensor) -> Place:
    """Where a tensor is saved; of another layout it is another place: what is right in one may be wrong in the other.

    Args:
        number: How many were saved before it.
        node: The operation that made it.
        handle: What stands for it.
        base: The tensor, or the one it is a view of.
    """
    identity = handle.identity if base.is_contiguous() else ~handle.identity
    return Place(number, "" if node is None else node.name(), identity)


class Verdicts:
    """Those of one call of a unit.

    Attributes:
        compared: Whether a place was met for the first time, so that its tensor was there twice.
        differed: Whether it could not be rebuilt bit for bit.
        unmet: In a survey, what would have been compared, for its place was not met before.
        met: Where something is rebuilt, and what by; if it `notes` that.

    Args:
        sites: What is known about the unit's places.
        grade: What may be rebuilt.
        applies: Whether what is decided comes true. Otherwise (in a survey) a recipe that was never tried is taken to
            be right.
        notes: Whether it is noted where something is rebuilt.
    """

    def __init__(self, sites: Sites, grade: int, *, applies: bool, notes: bool) -> None:
        self._sites, self._grade, self._applies, self._notes = sites, grade, applies, notes
        self.compared = self.differed = False
        self.unmet: list[Handle] = []
        self.met: list[tuple[Place, Handle]] = []

    def is_right(self, place: Place, handle: Handle, tensor: torch.Tensor) -> bool:
        """Whether a handle gives a tensor, bit for bit; it is compared the first time that the place is met."""
        sites = self._sites
        if sites.vain and self._grade < sites.vain.get(place, 0):
            return False
        is_known = place in sites.checked
        if not is_known and place in sites.different:
            return False
        if self._notes:
            self.met.append((place, handle))
        if is_known:
            return True
        if not self._applies:
            self.unmet.append(handle)
            return True
        self.compared = True
        same = rebuilds(handle, tensor)
        (sites.checked if same else sites.different).add(place)
        self.differed |= not same
        return same

    def close(self) -> None:
        """Let go of all handles."""
        self.unmet.clear()
        self.met.clear()
