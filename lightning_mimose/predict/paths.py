"""Steps that take one of several paths through a model: tasks in turns, a generator's step or a discriminator's.

Which one comes next is anybody's guess before its forward. So a plan has to keep each of them inside the budget: what
is alive on one of them is put behind what is alive on the others, as if the step took all of them one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_mimose.predict.timeline import Option, SharedHold, Timeline


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
    parents: dict[str, int] = {}
    seconds: dict[tuple[str, str], float] = {}
    for each in timelines:
        for unit, parent in zip(each.units, each.parents, strict=True):
            if parents.get(unit, -1) < 0:  # with one that encloses it on any of them, it never acts at once
                parents[unit] = index[each.units[parent]] if parent >= 0 else -1
        for slot, i in each.option_index.items():
            seconds[slot] = max(seconds.get(slot, 0.0), each.options[i].added_seconds)
    row = {slot: i for i, slot in enumerate(seconds)}
    base = np.concatenate([each.base_bytes for each in timelines])
    relief = np.zeros((len(row), len(base)), dtype=np.int64)
    shared: list[SharedHold] = []
    start = 0
    for each in timelines:
        end = start + len(each.base_bytes)
        rows = [row[slot] for slot in each.option_index]
        relief[rows, start:end] = each.relief_bytes[list(each.option_index.values())]
        here = {i: row[slot] for slot, i in each.option_index.items()}
        for hold in each.shared:
            mask = np.zeros((len(hold.holders), len(base)), dtype=np.bool_)
            mask[:, start:end] = hold.mask
            shared.append(SharedHold(hold.size_bytes, tuple(here[i] for i in hold.holders), mask))
        start = end
    return Timeline(
        units=units,
        parents=tuple(parents[unit] for unit in units),
        options=tuple(Option(index[unit], action, cost) for (unit, action), cost in seconds.items()),
        base_bytes=base,
        relief_bytes=relief,
        shared=tuple(shared),
        labels=tuple(label for each in timelines for label in each.labels),
    )
