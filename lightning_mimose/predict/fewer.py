"""Bases in which only one or two dimensions count: asked where all of them would take more sizes than were seen.

Batches have dimensions that decide next to nothing: how many boxes each image has, how many answers a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from lightning_mimose.predict.features import Basis, bases, of_one_tensor

FEWEST_DIMENSIONS, MOST_PAIRED = 3, 6
"""Dimensions besides the batch from which on others may be left out, and up to which any two may be all that count."""


def fewer_bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Bases of single dimensions, of pairs of them, and of the sides of one tensor; with the batch, where it varies.

    Example:
        >>> sizes = [{"pixels:2": 32 * n, "boxes.0:0": n % 3, "boxes.1:0": n % 5} for n in range(1, 8)]
        >>> found = fewer_bases(("pixels:2", "boxes.0:0", "boxes.1:0"), sizes)
        >>> sorted({basis.dims for basis in found}, key=len)[0]
        ('pixels:2',)
    """
    others = [name for name in dims if name != "batch"]
    if len(others) < FEWEST_DIMENSIONS:
        return []
    found: list[Basis] = []
    for kept in (*((name,) for name in others), *combinations(others, 2)):
        sides = len(kept) == 2 and of_one_tensor(*kept)
        if len(kept) == 2 and not sides and len(others) > MOST_PAIRED:
            continue
        names = tuple(name for name in dims if name in kept or name == "batch")
        among = bases(names, [{name: size[name] for name in names} for size in sizes])
        found += among if sides else [basis for basis in among if not basis.rounds]
    return found
