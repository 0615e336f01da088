"""Steps that take one of several paths through a model: tasks in turns, a generator's step or a discriminator's.

Which one comes next is anybody's guess before its forward. So a plan has to keep each of them inside the budget: what
is alive on one of them is put behind what is alive on the others, as if the step took all of them one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_mimose.predict.timeline import Option, SharedHold, Timeline

SETTLED_AFTER = 12
"""Steps that have to show no new path, after one did, before those that were seen are taken for all there are."""

HABIT_AFTER = 6
"""Steps of one size that take the same path, after which others are expected to do so."""
KNOWN_HABITS = 64
"""Sizes whose paths are remembered."""

Key: TypeAlias = tuple[tuple[str, int], ...]
"""A size: its named dimensions, sorted."""


def names_of(key: Key) -> tuple[str, ...]:
    """The names of a size's dimensions."""
    return tuple(name for name, _ in key)


class Path(NamedTuple):
    """What a step calls, and what becomes of it.

    Attributes:
        calls: Keys of all calls.
        dropped: Those without a backward.
    """

    calls: frozenset[str]
    dropped: frozenset[str]

    def is_part_of(self, other: Path) -> bool:
        """Whether the other makes the same calls, to the same ends, and more.

        Example:
            >>> short, long = Path(frozenset("ab"), frozenset()), Path(frozenset("abc"), frozenset("c"))
            >>> short.is_part_of(long), long.is_part_of(short)
            (True, False)
        """
        return self.calls < other.calls and self.dropped == other.dropped & self.calls


class Waits:
    """Of every kind of batch (names of dimensions): how many steps have yet to show whether there are more paths.

    Example:
        >>> waits, kind = Waits(), ("batch", "ids:1")
        >>> waits.new(kind, one_of_several=True)
        >>> waits.are_over(kind)
        False
        >>> for _ in range(SETTLED_AFTER):
        ...     waits.known(kind)
        >>> waits.are_over(kind)
        True
        >>> [waits.strange(kind) for _ in range(4)]
        [True, True, False, True]
    """

    def __init__(self) -> None:
        self.left: Counter[tuple[str, ...]] = Counter()
        """Kind -> steps that are waited for."""
        self._strange: Counter[tuple[str, ...]] = Counter()

    def are_over(self, kind: tuple[str, ...]) -> bool:
        """Whether plans may be made for such batches."""
        return not self.left[kind]

    def known(self, kind: tuple[str, ...]) -> None:
        """A measured step took a path that others had taken before, or a part of it."""
        self.left[kind] = max(0, self.left[kind] - 1)

    def new(self, kind: tuple[str, ...], *, one_of_several: bool) -> None:
        """A measured step took a new path; of several, if a known one makes calls that it does not."""
        self._strange[kind] = 0
        self.left[kind] = SETTLED_AFTER if one_of_several else 0

    def next(self, kind: tuple[str, ...]) -> None:
        """The next measured step is waited for."""
        self.left[kind] = max(1, self.left[kind])

    def strange(self, kind: tuple[str, ...]) -> bool:
        """A planned step took a new path, of which nothing is known but that; returns whether it is waited for.

        It may be a rare one, which none of the waiting steps takes: the second, fourth, eighth time counts, and so on,
        and is waited for as much longer.
        """
        self._strange[kind] += 1
        waits = self._strange[kind].bit_count() == 1
        if waits:
            self.left[kind] = SETTLED_AFTER * self._strange[kind]
        return waits


class Habits:
    """Sizes that always take one path: tasks in turns, each with images of its own size.

    Example:
        >>> habits, path = Habits(), Path(frozenset("ab"), frozenset())
        >>> for _ in range(HABIT_AFTER):
        ...     habits.add((("batch", 8),), path)
        >>> habits.of((("batch", 8),)) == path, habits.of((("batch", 9),))
        (True, None)
    """

    def __init__(self) -> None:
        self.steps: dict[Key, tuple[Path, int]] = {}
        """Size -> the path that it took of late, and how often."""

    def add(self, key: Key, path: Path) -> None:
        """A measured step of some size took a path."""
        before, steps = self.steps.pop(key, (path, 0))
        if len(self.steps) >= KNOWN_HABITS:
            del self.steps[next(iter(self.steps))]
        self.steps[key] = path, steps + 1 if path == before else 1

    def forget(self, names: tuple[str, ...]) -> None:
        """Forget all sizes with these dimensions."""
        self.steps = {key: each for key, each in self.steps.items() if names_of(key) != names}

    def of(self, key: Key) -> Path | None:
        """The path that steps of this size take, if enough have."""
        path, steps = self.steps.get(key, (None, 0))
        return path if steps >= HABIT_AFTER else None


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline for a step that may be any of several; its peak under a plan is the highest of theirs.

    Args:
        timelines: One for each path. An option that is not on all of them changes nothing on the others, and costs
            what it costs where it costs most.

    Returns:
        The timeline; without times, if there are several.
    """
    first, *others = timelines
    if not others:
        return first
    units = tuple(dict.fromkeys(unit for each in timelines for unit in each.units))
    index = {unit: i for i, unit in enumerate(units)}
    parents, torn = _forest(units, [_around(each) for each in timelines])
    seconds: dict[tuple[str, str], float] = {}
    for each in timelines:
        for slot, i in each.option_index.items():
            if slot[0] not in torn:
                seconds[slot] = max(seconds.get(slot, 0.0), each.options[i].added_seconds)
    row = {slot: i for i, slot in enumerate(seconds)}
    base = np.concatenate([each.base_bytes for each in timelines])
    relief = np.zeros((len(row), len(base)), dtype=np.int64)
    shared: list[SharedHold] = []
    start = 0
    for each in timelines:
        end = start + len(each.base_bytes)
        here = {i: row[slot] for slot, i in each.option_index.items() if slot in row}
        relief[list(here.values()), start:end] = each.relief_bytes[list(here)]
        for hold in each.shared:
            known = [i for i, holder in enumerate(hold.holders) if holder in here]
            mask = np.zeros((len(known), len(base)), dtype=np.bool_)
            mask[:, start:end] = hold.mask[known]
            if known:
                shared.append(SharedHold(hold.size_bytes, tuple(here[hold.holders[i]] for i in known), mask))
        start = end
    return Timeline(
        units=units,
        parents=tuple(-1 if (parent := parents[unit]) is None else index[parent] for unit in units),
        options=tuple(Option(index[unit], action, cost) for (unit, action), cost in seconds.items()),
        base_bytes=base,
        relief_bytes=relief,
        shared=tuple(shared),
        labels=tuple(label for each in timelines for label in each.labels),
        ending_bytes=np.concatenate([np.broadcast_to(t.ending_bytes, t.base_bytes.shape) for t in timelines]),
    )


def _around(timeline: Timeline) -> dict[str, list[str]]:
    """Unit -> the units that enclose it, the nearest first."""
    found: dict[str, list[str]] = {}
    for i, unit in enumerate(timeline.units):
        chain = found[unit] = []
        while timeline.parents[i] >= 0:
            i = timeline.parents[i]
            chain.append(timeline.units[i])
    return found


def _forest(
    units: Sequence[str], around: Sequence[Mapping[str, Sequence[str]]]
) -> tuple[dict[str, str | None], set[str]]:
    """One forest for all paths, so that units that enclose each other on any of them never act at once.

    Returns:
        Unit -> the one that encloses it; units for which there is none that does for all paths: they cannot act.
    """
    parents: dict[str, str | None] = {}

    def above(unit: str) -> Iterator[str]:
        parent = parents.get(unit)
        while parent is not None:
            yield parent
            parent = parents.get(parent)

    for unit in units:
        longest = max((chains[unit] for chains in around if unit in chains), key=len)
        # Units that enclose each other in turns do not get a tree.
        parents[unit] = longest[0] if longest and unit not in (longest[0], *above(longest[0])) else None
    torn = {unit for unit in units for chains in around if not set(chains.get(unit, ())) <= set(above(unit))}
    return parents, torn
