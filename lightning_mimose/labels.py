"""What in a batch is no tensor and tells what its step does: the name of a task, say, which decides between heads.

Two batches of one size take the same memory, as a rule, and nothing but sizes is looked at. Where that does not hold,
and a batch comes with few words or whole numbers that are met again and again, one of these may tell why.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from math import prod
from typing import Any

from torch import Tensor

MOST_VALUES, MOST_TOGETHER = 8, 16
"""Values of one label, and of all that are told apart: what has more is a name of its batch, and tells nothing."""
MOST_LABELS, MOST_ITEMS, MOST_PARTS, DEEPEST = 16, 64, 8, 3
"""Labels of a batch, items of a container that are looked at, of a list that is none of samples, and containers inside
one another."""
MOST_PATHS = 64
"""Places that are followed at all: the names of samples are none."""
REPEATED = 3
"""How often values have to have come again before a label may tell anything."""
LONGEST = 64
"""Characters of a word."""

Value = str | int


@dataclass
class _Steps:
    """Of steps of batches with one value: numbers of operations, two of the sizes, and which dimensions these had."""

    counts: set[Hashable] = field(default_factory=set)
    sizes: set[Hashable] = field(default_factory=set)
    layouts: set[int] = field(default_factory=set)


@dataclass
class _Label:
    """What one place in batches has held."""

    values: dict[Value, _Steps] = field(default_factory=dict)
    times: int = 0

    @property
    def may_tell(self) -> bool:
        """Whether there are several values, which come again."""
        return len(self.values) > 1 and self.times >= len(self.values) + REPEATED

    @property
    def tells_counts(self) -> bool:
        """Whether it decides how many operations a step has, which its size does not."""
        known = [steps for steps in self.values.values() if steps.counts]
        if not self.may_tell or any(len(steps.counts) > 1 for steps in known):
            return False
        known = [steps for steps in known if len(steps.sizes) > 1]
        return any(one.counts != other.counts and one.layouts & other.layouts for one, other in combinations(known, 2))


class Labels:
    """Follows the words and whole numbers in batches, and says which of them to tell batches apart by.

    Those that are told apart by count as a dimension of their own, of 1, so that nothing is concluded from one to
    another. None is, as long as sizes tell all there is to know.

    Args:
        told: As they were told apart before.

    Attributes:
        told: Places in the batch by which batches are told apart.

    Example:
        >>> import torch
        >>> labels = Labels()
        >>> for step in range(6):
        ...     labels.observe({"task": ("tag", "parse")[step % 2], "ids": torch.zeros(2, 8 + step), "number": step})
        ...     found = labels.ran(8 + step, 0, count=70 + step % 2)
        >>> found, labels.dims
        ('task', {})
        >>> labels.tell(found)
        >>> labels.dims
        {'task=parse': 1}
    """

    def __init__(self, told: Iterable[str] = ()) -> None:
        self.told = tuple(told)
        self._labels: dict[str, _Label] = {}
        self._hopeless: set[str] = set()
        self._now: dict[str, Value] = {}

    def observe(self, batch: Any) -> None:
        """A batch is next."""
        self.clear()
        for path, value in _labels(batch):
            is_full = len(self._labels) + len(self._hopeless) >= MOST_PATHS
            if path in self._hopeless or (is_full and path not in self._labels):
                continue
            label = self._labels.setdefault(path, _Label())
            label.values.setdefault(value, _Steps())
            label.times += 1
            if len(label.values) > MOST_VALUES:
                self.drop(path)
            else:
                self._now[path] = value

    def clear(self) -> None:
        """The next batch has no labels."""
        self._now = {}

    def drop(self, path: str) -> None:
        """Look at a label no more: it tells nothing."""
        self._hopeless.add(path)
        self._labels.pop(path, None)
        self._now.pop(path, None)
        self.told = tuple(each for each in self.told if each != path)

    @property
    def dims(self) -> dict[str, int]:
        """What the latest batch is told apart by, as dimensions."""
        return self._dims(self._now) if self.told else {}

    def dims_of(self, batch: Any) -> dict[str, int]:
        """The same of another batch, from which nothing is learnt."""
        return self._dims(dict(_labels(batch))) if self.told else {}

    def _dims(self, values: Mapping[str, Value]) -> dict[str, int]:
        return {f"{path}={values[path]}": 1 for path in self.told if path in values}

    def told_in(self, names: Iterable[str]) -> int:
        """How many of some dimensions stand for labels that batches are told apart by."""
        return sum(name.partition("=")[0] in self.told for name in names if "=" in name)

    def ran(self, size: Hashable, layout: int, count: Hashable) -> str | None:
        """The latest batch's forward is over.

        Args:
            size: Its size.
            layout: Stands for the dimensions that it has: what has others is told apart anyway.
            count: How many operations with gradients there were, or what stands for all that was done with them.

        Returns:
            By what batches should be told apart, if anything decides about that number that is not the size.
        """
        if not self._now:
            return None
        for path, value in self._now.items():
            steps = self._labels[path].values[value]
            if len(steps.counts) < 2:
                steps.counts.add(count)
            if len(steps.sizes) < 2:
                steps.sizes.add(size)
            steps.layouts.add(layout)
        return self._best(path for path in self._now if self._labels[path].tells_counts)

    def suspect(self) -> str | None:
        """By what batches might be told apart, for one took another amount of memory than its size had told."""
        return self._best(path for path in self._now if self._labels[path].may_tell)

    def _best(self, paths: Iterable[str]) -> str | None:
        """The label with the fewest values, unless there would be too many to tell apart."""
        found = min((path for path in paths if path not in self.told), key=self._many, default=None)
        if found is None or prod(map(self._many, (*self.told, found))) > MOST_TOGETHER:
            return None
        return found

    def _many(self, path: str) -> int:
        return len(self._labels[path].values) if path in self._labels else 1

    def tell(self, path: str) -> None:
        """Tell batches apart by a label, from now on."""
        self.told = (*self.told, path)


def _labels(batch: Any) -> list[tuple[str, Value]]:
    """The words and whole numbers in a batch, and where they are; none in one that cannot be looked through."""
    found: list[tuple[str, Value]] = []
    try:
        _collect(batch, "", DEEPEST, found)
    except Exception:  # a mapping that decodes its items when it is asked for them, say
        return []
    return found


def _collect(value: Any, path: str, depth: int, found: list[tuple[str, Value]]) -> None:
    kind = type(value)
    if kind in _NOTHING or len(found) == MOST_LABELS:
        return
    if kind is str or kind is int or kind is bool:
        if kind is not str or len(value) <= LONGEST:
            found.append((path, value))
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (dict, UserDict)):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        names = getattr(kind, "_fields", None)
        if len(value) > MOST_ITEMS:
            return
        if value and type(value[0]) is str:  # as a loader collates the same word of every sample
            if all(each == value[0] for each in value):
                _collect(value[0], path, depth, found)
            return
        if names is None and len(value) > MOST_PARTS:
            return
        items = enumerate(value) if names is None else zip(names, value, strict=False)
    elif hasattr(kind, "__dataclass_fields__"):
        items = [(name, getattr(value, name, None)) for name in kind.__dataclass_fields__]
    else:
        return
    if depth:
        prefix = f"{path}." if path else ""
        for name, item in islice(items, MOST_ITEMS):
            if type(item) not in _NOTHING:
                _collect(item, f"{prefix}{name}", depth - 1, found)


_NOTHING = frozenset({Tensor, float, complex, bytes, type(None)})
