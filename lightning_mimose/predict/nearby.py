"""Other shapes of steps on the same path, with sizes that are nearer to one than those of the latest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.paths import Key, names_of
from lightning_mimose.predict.structure import Structure

FEWEST_SIZES = 3
"""Sizes of a shape that say that there are more like these."""

Sizes: TypeAlias = Mapping[Structure, Mapping[Key, Measured]]
"""Shape of a step -> the sizes that were measured of it."""


def of_kind(known: Mapping[Key, Measured], names: tuple[str, ...]) -> dict[Key, Measured]:
    """Those of some sizes that have these dimensions."""
    return {key: measured for key, measured in known.items() if names_of(key) == names}


def nearer(sizes: Sizes, structure: Structure, key: Key) -> list[Structure]:
    """Other shapes of steps on the same path, with sizes that are nearer to one which was not measured.

    Short texts may be worked on in another way than long ones, by the same blocks: whatever was measured last, it
    says less of sizes far from its own than what was seen around those.

    Args:
        sizes: Shape of a step -> the sizes that were measured of it.
        structure: A shape that was measured.
        key: A size.
    """
    names = names_of(key)
    spans = {
        other: known
        for other in _beside(sizes, structure)
        if len(known := of_kind(sizes[other], names)) >= FEWEST_SIZES or other == structure
    }
    if any(key in known for known in spans.values()):
        return []
    beyond = {other: _beyond(key, known) for other, known in spans.items()}
    return [other for other in spans if beyond[other] < beyond[structure]]


def alone_with(sizes: Sizes, structure: Structure, key: Key) -> Structure | None:
    """The shape that all steps on the same path had whose batches are as large as a size's, which is among theirs.

    Batches of one leave out what others need (masks, repeated positions).

    Args:
        sizes: Shape of a step -> the sizes that were measured of it.
        structure: A shape that was measured.
        key: A size.
    """
    names, batch = names_of(key), dict(key).get("batch")
    shapes = _beside(sizes, structure)
    if batch is None or len(shapes) < 2:
        return None
    seen = {other: [each for each in of_kind(sizes[other], names) if dict(each)["batch"] == batch] for other in shapes}
    found = [other for other in shapes if seen[other]]
    if len(found) != 1 or len(seen[found[0]]) < FEWEST_SIZES or _beyond(key, seen[found[0]]) > 1:
        return None
    return found[0]


def may_have_been(sizes: Sizes, structure: Structure, key: Key) -> Iterator[Structure]:
    """Other shapes on the same path, that a step which was planned by one may have had: batches as large had them.

    The transposes of a batch of one are no copies: units save what they are given in their place.
    """
    batch = dict(key).get("batch")
    if key in sizes.get(structure, {}):
        return
    for other, known in sizes.items():
        as_large = any(dict(each).get("batch") == batch for each in known)
        if as_large and other != structure and other.path == structure.path:
            yield other


def _beside(sizes: Sizes, structure: Structure) -> list[Structure]:
    """The shapes on the same path, beside the same gradients of earlier steps."""
    gradients = structure.old_gradient_bytes
    return [each for each in sizes if each.path == structure.path and each.old_gradient_bytes == gradients]


def _beyond(key: Key, known: Collection[Key]) -> float:
    """How many times a size is outside of what others span, in one dimension at least; 1 if it is in there."""
    if not known:
        return float("inf")
    spans = ([other[i][1] for other in known] for i in range(len(key)))
    outside = (
        (value / max(1, max(span)), min(span) / max(1, value)) for (_, value), span in zip(key, spans, strict=True)
    )
    return max((1.0, *(each for pair in outside for each in pair)))
