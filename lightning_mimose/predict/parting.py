"""Whether it goes by the size which units a step calls: long texts may skip blocks that short ones go through.

Of paths that are parts of each other only the longest is learnt, for a block that is left out by chance may be called
in the next step. Where one dimension parts the sizes of all that was called, after enough steps of each, it is no
chance: then each path is learnt, and predicted for its sizes alone. Planned steps tell that as well as measured ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_mimose.predict.loops import Names, Step
from lightning_mimose.predict.paths import Key, Path, names_of
from lightning_mimose.predict.spans import are_apart, around

FEWEST_STEPS, ENOUGH_STEPS = 6, 16
"""That have to be seen: of each set of units, and in all. Of two that come by chance, with sizes of one dimension that
do not come again, one in 4000 trainings begins like that at most."""
MOST_SETS = 8
MOST_ASIDE = 16
"""Steps on parts of paths that are laid aside until more is known."""


class _Sizes:
    """Of the steps that called a set of units.

    Attributes:
        steps: How many were seen.
        spans: The least and the largest value of each dimension.
        paths: What those that were measured took.
    """

    def __init__(self, steps: int = 0, spans: Sequence[tuple[int, int]] = (), paths: Iterable[Path] = ()) -> None:
        self.steps, self.spans, self.paths = steps, list(spans), set(paths)

    def add(self, key: Key) -> None:
        self.steps += 1
        spans = self.spans or [(value, value) for _, value in key]
        self.spans = [(min(low, value), max(high, value)) for (low, high), (_, value) in zip(spans, key, strict=True)]


class Parting:
    """Follows which sizes call which units; not in steps whose operations are not followed (parts of batches).

    Attributes:
        parts: Kinds of batches (names of dimensions) where that goes by the size.

    Example:
        >>> parting, names = Parting(), ("ids:1",)
        >>> for length in range(16, 32):
        ...     news = parting.called((("ids:1", length),), 1 if length < 24 else 2)
        >>> news, names in parting.parts
        (True, True)
        >>> parting.called((("ids:1", 26),), 1), names in parting.parts
        (True, False)
    """

    def __init__(self) -> None:
        self.parts: set[Names] = set()
        self._seen: dict[Names, dict[int, _Sizes]] = {}
        self._refuted: set[Names] = set()
        self._aside: dict[Names, deque[Step]] = {}

    def called(self, key: Key, units: int) -> bool:
        """A step of some size called a set of units; returns whether what is likely is another thing from now on.

        Args:
            key: The size.
            units: Stands for the set.
        """
        names = names_of(key)
        if names in self._refuted:
            return False
        before, seen = names in self.parts, self._seen.setdefault(names, {})
        seen.setdefault(units, _Sizes()).add(key)
        if len(seen) == 1:  # as in most models
            return False
        spans = zip(*(each.spans for each in seen.values()), strict=True)  # by dimension
        if len(seen) > MOST_SETS or not any(map(are_apart, spans)):
            self._refuted.add(names)
            self.forget(names)
        elif names not in self.parts:
            counts = [each.steps for each in seen.values()]
            if min(counts) >= FEWEST_STEPS and sum(counts) >= ENOUGH_STEPS:
                self.parts.add(names)
        return before != (names in self.parts)

    def took(self, key: Key, units: int, path: Path) -> None:
        """A step that called a set of units was measured, and took a path."""
        sizes = self._seen.get(names_of(key), {}).get(units)
        if sizes is not None:
            sizes.paths.add(path)

    def likely(self, key: Key) -> set[Path]:
        """The paths that a size may take; none if some of them may not have been measured yet.

        Those of the sets of units that the sizes around it call, or the next smaller and the next larger ones. By which
        dimension they go may not be clear yet: then all that is told by one that parts them.
        """
        found, seen = list[_Sizes](), self._seen[names_of(key)].values()
        for dim, (_, value) in enumerate(key):
            found += around(value, ((each.spans[dim], each) for each in seen))
        return {path for each in found for path in each.paths} if all(each.paths for each in found) else set()

    def may_skip(self, key: Key) -> bool:
        """Whether a size may take a part of the longest path, as those around it do, before it is known to go by that.

        What it takes is predicted by the longest one then: that it does not fit is no reason to refuse it.
        """
        seen = self._seen.get(names_of(key), {})
        if len(seen) < 2 or names_of(key) in self.parts or names_of(key) in self._refuted:
            return False
        every = {path for each in seen.values() for path in each.paths}
        return any(
            not each.paths or any(path.is_part_of(other) for path in each.paths for other in every)
            for dim, (_, value) in enumerate(key)
            for each in around(value, ((each.spans[dim], each) for each in seen.values()))
        )

    def lay_aside(self, step: Step) -> None:
        """A step that is not learnt from, for it took a part of another's path."""
        names = names_of(step.key)
        if names not in self._refuted:
            self._aside.setdefault(names, deque(maxlen=MOST_ASIDE)).append(step)

    def laid_aside(self, names: Names) -> list[Step]:
        """The steps that were laid aside, once it is known that they tell something of their sizes."""
        return list(self._aside.pop(names, ())) if names in self.parts else []

    def forget(self, names: Names) -> None:
        """Steps with these dimensions are other ones from now on: their loops are folded, or are not any more."""
        self._seen.pop(names, None)
        self._aside.pop(names, None)
        self.parts.discard(names)

    def state_dict(self, number: Mapping[Path, int]) -> dict[str, Any]:
        """What is known, as plain data.

        Args:
            number: Path -> what stands for it.
        """
        return {
            "called": [
                [list(names), units, each.steps, each.spans, [number[path] for path in each.paths if path in number]]
                for names, seen in self._seen.items()
                for units, each in seen.items()
            ],
            "parted": [list(names) for names in self.parts],
            "unparted": [list(names) for names in self._refuted],
        }

    def load_state_dict(self, state: Mapping[str, Any], paths: Sequence[Path]) -> None:
        """Take over what another one knew.

        Args:
            state: See `state_dict`.
            paths: What numbers stand for.
        """
        for names, units, steps, spans, numbers in state.get("called", ()):
            known = _Sizes(int(steps), [(int(low), int(high)) for low, high in spans], (paths[i] for i in numbers))
            self._seen.setdefault(tuple(names), {})[int(units)] = known
        self.parts |= {tuple(names) for names in state.get("parted", ())}
        self._refuted |= {tuple(names) for names in state.get("unparted", ())}
