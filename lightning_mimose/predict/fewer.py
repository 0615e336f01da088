"""Bases in which only one or two dimensions count: asked where all of them would take more sizes than were seen.

Batches have dimensions that decide next to nothing: how many boxes each image has, how many answers a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from lightning_mimose.predict.features import Basis, bases, of_one_tensor
from lightning_mimose.predict.solving import described

FEWEST_DIMENSIONS, MOST_PAIRED, MOST_DIMENSIONS = 3, 5, 16
"""Dimensions besides the batch from which on others may be left out, up to which any two may be all that count, and up
to which the bases are few enough to be looked at in a step."""
FOLLOWS = 0.1
"""Share of a dimension's variance that has to be its own: what goes with those that count may count instead of them."""


def fewer_bases(dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> list[Basis]:
    """Bases of single dimensions, of pairs of them, and of the sides of one tensor; with the batch, where it varies.

    Example:
        >>> sizes = [{"pixels:2": 32 * n, "boxes.0:0": n % 3, "boxes.1:0": n % 5} for n in range(1, 8)]
        >>> found = fewer_bases(("pixels:2", "boxes.0:0", "boxes.1:0"), sizes)
        >>> ("pixels:2",) in {basis.dims for basis in found}
        True
    """
    others = [name for name in dims if name != "batch"]
    if not FEWEST_DIMENSIONS <= len(others) <= MOST_DIMENSIONS:
        return []
    found: list[Basis] = []
    for kept in (*((name,) for name in others), *combinations(others, 2)):
        sides = len(kept) == 2 and ":" in kept[0] and of_one_tensor(*kept)
        if len(kept) == 2 and not sides and len(others) > MOST_PAIRED:
            continue
        names = tuple(name for name in dims if name in kept or name == "batch")
        found += bases(names, [{name: size[name] for name in names} for size in sizes], rounds=sides)
    return found


def may_do_without(basis: Basis, dims: tuple[str, ...], sizes: Sequence[Mapping[str, int]]) -> bool:
    """Whether what a basis leaves out has varied on its own, so that it shows how little that decides."""
    left_out = [name for name in dims if name not in basis.dims]
    values = np.array([[float(size[name]) for name in left_out] for size in sizes])
    values -= values.mean(axis=0)
    own = values - described(basis.design(sizes), values)
    return bool((np.square(own).sum(axis=0) >= FOLLOWS * np.square(values).sum(axis=0)).all())


def together(dims: Mapping[str, int], names: Sequence[str], high: Mapping[str, int]) -> float:
    """What dimensions come to in a size, each as a share of the most that was seen of it."""
    return sum(dims[name] / max(1, high[name]) for name in names)
