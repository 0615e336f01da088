"""Whether the number of a loop's rounds goes by the size, so that steps of all sizes count as one shape.

A model that leaves out calls at random (LayerDrop, over one layer that is called several times) has as many shapes. Of
those the longest is learnt; folded they would be one whose sizes say nothing. So loops are folded once enough sizes
have shown numbers that rise with one of their dimensions, and for as long as none contradicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.predict.folding import fold, has_loops, rounds_of
from lightning_mimose.predict.paths import Key, Path, names_of
from lightning_mimose.predict.structure import Structure

FEWEST_SIZES, FEWEST_NUMBERS = 6, 3
"""That have to be seen of a folded shape: sizes, and numbers of rounds among them."""
MOST_SIZES, MOST_SHAPES = 48, 8
"""That are remembered until then."""

Names: TypeAlias = tuple[str, ...]
Known: TypeAlias = dict[Key, NDArray[np.float64]]


class Loops:
    """Follows steps that have loops.

    Attributes:
        folded: Of every kind of batch (names of dimensions): the folded shapes that its steps have.
        refuted: Whether numbers of rounds do not go by the size: nothing is folded any more.
    """

    def __init__(self) -> None:
        self.folded: dict[Names, set[Structure]] = {}
        self.refuted = False
        self._waiting: dict[tuple[Names, Structure], tuple[Structure, Known]] = {}
        self._alike: list[tuple[Key, Structure, NDArray[np.float64]]] = []
        """Steps with loops, as long as all of them take one path, as those of most models do."""

    def take(self, key: Key, structure: Structure, values: NDArray[np.float64]) -> tuple[Structure, Known] | None:
        """Look at a measured step.

        Args:
            key: Its size.
            structure: Its shape.
            values: Shape (structure.columns,).

        Returns:
            Its folded shape, and what is to be learnt of that; None if it counts as it is.
        """
        if self.refuted or not has_loops(structure):
            return None
        steps = [(key, structure, values)]
        if not self.folded and not self._waiting:
            self._alike = [*self._alike[1 - MOST_SIZES :], *steps]
            if all(other.path == structure.path for _, other, _ in self._alike):
                return None
            steps, self._alike = self._alike, []
        return [self._folded(*step) for step in steps][-1]

    def _folded(self, key: Key, structure: Structure, values: NDArray[np.float64]) -> tuple[Structure, Known] | None:
        found, names = fold(structure, values), names_of(key)
        if found is None:
            return None
        structure, values = found
        if structure in self.folded.get(names, ()):
            return structure, {key: values}
        before, known = self._waiting.pop((names, structure), (structure, {}))
        # Others may hold on to the first batch's inputs for good.
        structure = before.with_holds_of(structure) if len(known) > 1 else structure
        if self.contradicts(structure, known, key, values):
            return None
        known.pop(key, None)
        known[key] = values
        if (
            len(known) >= FEWEST_SIZES
            and len({rounds_of(structure, each) for each in known.values()}) >= FEWEST_NUMBERS
        ):
            self.adopt(names, structure)
            return structure, known
        self._waiting[names, structure] = structure, dict(list(known.items())[-MOST_SIZES:])
        if len(self._waiting) > MOST_SHAPES:
            del self._waiting[next(iter(self._waiting))]
        return None

    def contradicts(
        self, structure: Structure, known: Mapping[Key, NDArray[np.float64]], key: Key, values: NDArray[np.float64]
    ) -> bool:
        """Whether a step shows that numbers of rounds do not go by the size; that is remembered.

        Args:
            structure: Its folded shape.
            known: What is known of that.
            key: Its size.
            values: Shape (structure.columns,).
        """
        rounds = {each: rounds_of(structure, columns) for each, columns in known.items()}
        now = rounds_of(structure, values)
        self.refuted |= rounds.get(key, now) != now or not rise_with_size({**rounds, key: now})
        return self.refuted

    def adopt(self, names: Names, structure: Structure) -> None:
        """Fold steps of a kind of batch that have such a shape."""
        self.folded.setdefault(names, set()).add(structure)

    def path_of(self, names: Names, structure: Structure) -> Path:
        """The path that a step counts as of which nothing is known but its shape."""
        if names in self.folded and not self.refuted:
            found = fold(structure, np.zeros(structure.columns))
            if found is not None and any(found.structure.path == known.path for known in self.folded[names]):
                return found.structure.path
        return structure.path


def rise_with_size(rounds: Mapping[Key, Sequence[int]]) -> bool:
    """Whether the number of every loop's rounds follows from one dimension, and rises with it.

    Args:
        rounds: Size -> how many there are of every loop.

    Example:
        >>> rise_with_size({(("ids:1", 32),): (1,), (("ids:1", 60),): (2,), (("ids:1", 64),): (2,)})
        True
        >>> rise_with_size({(("ids:1", 32),): (3,), (("ids:1", 60),): (2,)})
        False
    """
    keys = list(rounds)
    return all(
        any(
            _rises([(key[dim][1], count) for key, count in zip(keys, counts, strict=True)])
            for dim in range(len(keys[0]))
        )
        for counts in zip(*rounds.values(), strict=True)
    )


def _rises(pairs: Iterable[tuple[int, int]]) -> bool:
    ordered = sorted(set(pairs))
    return all(value < larger and count <= more for (value, count), (larger, more) in pairwise(ordered))


def paths_at(key: Key, seen: Mapping[Path, Iterable[Key]]) -> set[Path]:
    """The paths that a size may take where they go by a dimension: by how often blocks are called for its length.

    That of the sizes around it, or those of the next smaller and the next larger ones.

    Args:
        key: The size.
        seen: Path -> the sizes that took it.

    Example:
        >>> once, twice = Path(frozenset("a"), frozenset()), Path(frozenset("ab"), frozenset())
        >>> seen = {once: [(("ids:1", 12),), (("ids:1", 30),)], twice: [(("ids:1", 34),), (("ids:1", 60),)]}
        >>> [len(paths_at((("ids:1", length),), seen)) for length in (20, 32, 40, 80)]
        [1, 2, 1, 1]
    """
    for dim, (_, value) in enumerate(key):
        spans = sorted((min(k[dim][1] for k in keys), max(k[dim][1] for k in keys), p) for p, keys in seen.items())
        if all(high < low for (_, high, _), (low, _, _) in pairwise(spans)):
            below = [path for low, _, path in spans if low <= value][-1:]
            above = [path for _, high, path in spans if high >= value][:1]
            return {*below, *above}
    return set(seen)
