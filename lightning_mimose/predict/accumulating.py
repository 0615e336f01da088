"""Loops that zero gradients when they like: some steps add to older ones, others let go of them first.

Which of the two the next step will do does not show at its start. So as soon as steps of one shape were seen to do
either, they count as one shape, in which as many gradients are alive as were made by then, or as there were before,
whichever is more. That is what a step holds that adds to older ones, or finds none, and more than one that frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from lightning_mimose.predict.structure import Structure

EITHER = -1
"""In place of a structure's older gradients: whether they are added to is not known before its steps."""


def either(structure: Structure, known: Iterable[Structure]) -> tuple[Structure, list[Structure]]:
    """The shape that a measured step counts as, and the known ones that count as that from now on.

    Args:
        structure: The step's shape.
        known: Those of the steps before it.

    Returns:
        Itself and none, unless both kinds of steps were seen.
    """
    if _kind(structure) is None:
        return structure, []
    bare = _without_gradients(structure)
    alike = [each for each in known if _kind(each) and each.path == structure.path and _without_gradients(each) == bare]
    if len({_kind(each) for each in (structure, *alike)}) == 1:
        return structure, []
    made = (max(each) for each in zip(*(other.due_gradients.tolist() for other in (structure, *alike)), strict=True))
    positions = tuple(replace(each, gradient_bytes=nbytes) for each, nbytes in zip(bare.positions, made, strict=True))
    return replace(structure, positions=positions, old_gradient_bytes=EITHER), alike


def _kind(structure: Structure) -> Literal["adds", "frees", "either"] | None:
    """What becomes of the older gradients of such steps: all are added to, or all are gone before backward.

    None where it is known when they go, or where a part of them stays (two networks in turns): as a rule the same one
    in every step, which is known exactly.
    """
    if not structure.adds_to_gradients:
        return None
    if structure.old_gradient_bytes == EITHER:
        return "either"
    alive = {position.old_gradient_bytes for position in structure.positions if position.backward}
    if alive <= {0}:
        return "frees"
    return "adds" if alive <= {0, structure.old_gradient_bytes} else None  # after an update they may be gone


def _without_gradients(structure: Structure) -> Structure:
    """The same with no word of gradients."""
    positions = (
        replace(each, gradient_bytes=0, old_gradient_bytes=0, reached_gradient_bytes=0) for each in structure.positions
    )
    return replace(structure, positions=tuple(positions), old_gradient_bytes=0)
