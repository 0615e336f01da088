"""Whether how often units are called goes by the size: then loops are folded, and sizes tell which path a step takes.

A model that leaves out calls at random (LayerDrop, over one layer that is called several times) has as many shapes as
one that calls blocks more often for longer texts. Of those the longest is learnt; folded they would be one whose sizes
say nothing. So loops are folded once enough sizes have shown numbers of calls that rise with one of their dimensions
(with two of them in loops inside of loops), and for as long as none contradicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lightning_mimose.predict.folding import fold
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.paths import Key, Path, names_of
from lightning_mimose.predict.rounds import FEWEST_ROUNDS
from lightning_mimose.predict.spans import around
from lightning_mimose.predict.structure import Structure

FEWEST_SIZES, FEWEST_NUMBERS = 6, 3
"""That have to be seen: sizes, and numbers of calls among them; or else two numbers, and as many sizes again."""
MOST_SIZES, MOST_STEPS = 256, 16
"""Sizes of which the number of calls is remembered, and steps that are, until it is known what to make of them."""

Names: TypeAlias = tuple[str, ...]
Calls: TypeAlias = Mapping[str, int]
"""Unit -> how often it is called."""


class Step(NamedTuple):
    """A measured step.

    Attributes:
        key: Its size.
        structure: Its shape.
        measured: Its columns.
    """

    key: Key
    structure: Structure
    measured: Measured


class _Kind:
    """What is known of one kind of batch."""

    def __init__(self) -> None:
        self.calls: dict[Key, Calls] = {}
        self.again = 0
        """How often a size was seen again."""
        self.steps: dict[Key, Step] = {}

    def saw(self, step: Step) -> bool:
        """A step was measured; returns whether it contradicts that its calls go by its size."""
        calls = Counter(call.unit for call in step.structure.calls)
        before = self.calls.pop(step.key, None)
        self.again += before == calls
        self.calls[step.key] = calls
        if len(self.calls) > MOST_SIZES:
            del self.calls[next(iter(self.calls))]
        if len(self.numbers) == 1:  # as in most models
            return False
        self.steps.pop(step.key, None)
        self.steps[step.key] = step
        if len(self.steps) > MOST_STEPS:
            del self.steps[next(iter(self.steps))]
        return before not in (None, calls) or not rise_with_size(self.calls)

    @property
    def numbers(self) -> set[frozenset[tuple[str, int]]]:
        """All numbers of calls there are."""
        return {frozenset(each.items()) for each in self.calls.values()}

    @property
    def is_enough(self) -> bool:
        """Whether there are loops, and enough sizes have shown that they go by the size."""
        numbers = self.numbers
        if len(numbers) < 2 or max(count for each in numbers for _, count in each) < FEWEST_ROUNDS:
            return False
        # Of two sizes in two dimensions often neither is the larger one, which says nothing.
        fewest = FEWEST_SIZES if rise_with_size(self.calls, 1) else 2 * FEWEST_SIZES
        return self.again >= FEWEST_SIZES or (len(self.calls) >= fewest and len(numbers) >= FEWEST_NUMBERS)


class Loops:
    """Follows how often units are called in measured steps.

    Attributes:
        folds: Kinds of batches (names of dimensions) of which the loops are folded.
    """

    def __init__(self) -> None:
        self.folds: set[Names] = set()
        self._kinds: dict[Names, _Kind] = {}
        self._refuted: set[Names] = set()

    def saw(self, step: Step) -> list[Step] | None:
        """A step was measured.

        Returns:
            What is to be learnt of this kind of batch in place of what was, for its loops are folded from now on, or
            are not any more; None if nothing changes.
        """
        names = names_of(step.key)
        if names in self._refuted:
            return None
        kind = self._kinds.setdefault(names, _Kind())
        if kind.saw(step):
            self._refuted.add(names)
            del self._kinds[names]
            was_folded = names in self.folds
            self.folds.discard(names)
            return [] if was_folded else None
        if names in self.folds:
            kind.steps.clear()
        elif kind.is_enough:
            self.folds.add(names)
            return list(kind.steps.values())
        return None

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain data, but for the steps themselves."""
        return {
            "folds": [list(names) for names in self.folds],
            "refuted": [list(names) for names in self._refuted],
            "calls": [_numbered(kind, names) for names, kind in self._kinds.items() if len(kind.numbers) > 1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another one knew."""
        self.folds |= {tuple(names) for names in state.get("folds", ())}
        self._refuted |= {tuple(names) for names in state.get("refuted", ())}
        for each in state.get("calls", ()):
            names = tuple(each["names"])
            kind = self._kinds.setdefault(names, _Kind())
            kind.again = int(each["again"])
            for values, number in each["sizes"]:
                kind.calls[tuple(zip(names, map(int, values), strict=True))] = Counter(each["numbers"][number])

    def folded(self, step: Step) -> Step:
        """What a step counts as."""
        measured = step.measured
        folds = names_of(step.key) in self.folds
        found = fold(step.structure, measured.values, measured.maxima) if folds else None
        if found is None:
            return step
        return Step(step.key, found.structure, measured._replace(values=found.values, maxima=found.maxima))

    def path_of(self, names: Names, structure: Structure) -> Path:
        """The path that a step counts as of which nothing is known but its shape."""
        found = fold(structure, np.zeros(structure.columns)) if names in self.folds else None
        return (structure if found is None else found.structure).path


def _numbered(kind: _Kind, names: Names) -> dict[str, Any]:
    """How often units were called in steps of one kind, as plain data: most sizes have numbers in common."""
    numbers = list(kind.numbers)
    index = {each: i for i, each in enumerate(numbers)}
    return {
        "names": list(names),
        "again": kind.again,
        "numbers": [dict(each) for each in numbers],
        "sizes": [[[value for _, value in key], index[frozenset(each.items())]] for key, each in kind.calls.items()],
    }


def rise_with_size(calls: Mapping[Key, Calls], most_dims: int = 2) -> bool:
    """Whether it follows from one dimension or two how often each unit is called, and rises with them.

    Args:
        calls: Size -> how often units are called.
        most_dims: From how many it may follow: of units in a loop inside another loop it does from two.

    Example:
        >>> rise_with_size({(("ids:1", 32),): {"a": 1}, (("ids:1", 60),): {"a": 2}, (("ids:1", 64),): {"a": 2}})
        True
        >>> rise_with_size({(("ids:1", 32),): {"a": 3}, (("ids:1", 60),): {"a": 2}})
        False
    """
    sizes = np.array([[value for _, value in key] for key in calls]).reshape(len(calls), -1)
    dims = [list(each) for n in range(1, most_dims + 1) for each in combinations(range(sizes.shape[1]), n)]
    below = [(sizes[:, None, each] <= sizes[None, :, each]).all(axis=2) for each in dims]
    units = {unit for each in calls.values() for unit in each}
    counts = (np.array([each.get(unit, 0) for each in calls.values()]) for unit in units)
    return all(any(not (each & (count[:, None] > count)).any() for each in below) for count in counts)


def paths_at(key: Key, seen: Mapping[Path, Collection[Key]]) -> set[Path]:
    """The paths that a size may take where they go by a dimension: by how often blocks are called for its length.

    That of the sizes around it, or those of the next smaller and the next larger ones. By which dimension they go may
    not be clear yet: then all that is told by one that parts them.

    Args:
        key: The size.
        seen: Path -> the sizes that took it.

    Example:
        >>> once, twice = Path(frozenset("a"), frozenset()), Path(frozenset("ab"), frozenset())
        >>> seen = {once: [(("ids:1", 12),), (("ids:1", 30),)], twice: [(("ids:1", 34),), (("ids:1", 60),)]}
        >>> [len(paths_at((("ids:1", length),), seen)) for length in (20, 32, 40, 80)]
        [1, 2, 1, 1]
    """
    here = {path for path, keys in seen.items() if key in keys}
    if here:
        return here
    found: set[Path] = set()
    for dim, (_, value) in enumerate(key):
        values = {path: [k[dim][1] for k in keys] for path, keys in seen.items()}
        found.update(around(value, (((min(each), max(each)), path) for path, each in values.items())))
    return found or set(seen)
