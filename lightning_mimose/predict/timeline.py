"""The memory model of one step: a walk along a timeline, not a sum.

A step visits *positions* (a unit's forward, its backward, its recomputation, the gaps between units, the
optimizer's update). At every position something is alive; the peak of the step is the maximum over the walk.
A `Timeline` states, for one batch size, what is alive at every position when everything is kept, and by how
much each possible choice (*option*) lowers it there. Predicting the peak of a plan is then one subtraction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_mimose.menu import KEEP

BLOCK = 1 << 15
"""Numbers that are added up at a time: a copy of hundreds of rows takes longer to be made room for than to be read."""


@dataclass(frozen=True)
class Option:
    """One action that one unit could take instead of keeping everything.

    Attributes:
        unit: Index of the unit in `Timeline.units`.
        action: Name of the action, `"recompute"` for instance.
        added_seconds: What choosing it adds to the step.
    """

    unit: int
    action: str
    added_seconds: float


@dataclass(frozen=True, eq=False)
class SharedHold:
    """A storage that stays alive in backward only because a chosen option holds it, and is counted once.

    An example is T5's position bias: no operation saves it, but every recomputed block holds it as an input.

    Attributes:
        size_bytes: Bytes of the storage.
        holders: Indices into `Timeline.options`, the one that holds longest first.
        mask: Shape (holders, positions); where each holder, alone, keeps the storage alive. Each row's
            positions contain the next row's.
    """

    size_bytes: int
    holders: tuple[int, ...]
    mask: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Timeline:
    """What one step of one batch size would hold in memory, position by position.

    Attributes:
        units: Qualified names of the units, in forward order.
        parents: For each unit the index of the nearest enclosing unit, -1 at the top. At most one unit on
            every path from the root may take an action that is not *keep*.
        options: All choices there are besides keeping.
        base_bytes: Shape (positions,), int64. Live bytes at each position, resident ones included, when every
            unit is kept.
        relief_bytes: Shape (options, positions), int64. By how much choosing the option lowers the live bytes
            there; negative where it raises them (a recomputation's working set).
        shared: Storages that several options would hold, each counted once.
        labels: One readable name per position.
        times: When each position is, in ranks of the marks of a measured step; -1 for the update. Empty if not known.
        ending_bytes: Shape (positions,), int64. What a recomputation takes besides if it runs to its end, as in steps
            that learn, and does not stop at the last tensor that is needed. One zero where that is not known.

    Example:
        >>> import numpy as np
        >>> timeline = Timeline(
        ...     units=("a", "b"), parents=(-1, -1),
        ...     options=(Option(0, "recompute", 1.0), Option(1, "recompute", 1.0)),
        ...     base_bytes=np.array([10, 30, 20]), relief_bytes=np.array([[0, 8, 0], [0, 0, 0]]),
        ...     shared=(), labels=("forward a", "backward b", "backward a"))
        >>> timeline.peak_bytes({})
        30
        >>> timeline.peak_bytes({"a": "recompute"})
        22
    """

    units: tuple[str, ...]
    parents: tuple[int, ...]
    options: tuple[Option, ...]
    base_bytes: NDArray[np.int64]
    relief_bytes: NDArray[np.int64]
    shared: tuple[SharedHold, ...]
    labels: tuple[str, ...]
    times: tuple[int, ...] = ()
    ending_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    @cached_property
    def option_index(self) -> dict[tuple[str, str], int]:
        """(unit name, action) -> index into `options`."""
        return {(self.units[option.unit], option.action): i for i, option in enumerate(self.options)}

    @cached_property
    def names(self) -> list[tuple[str, int]]:
        """Every label, and the how many-th of its kind it is: steps with several passes, or paths, repeat them."""
        counts = defaultdict[str, int](int)
        names = []
        for label in self.labels:
            names.append((label, counts[label]))
            counts[label] += 1
        return names

    def only(self, allowed: Callable[[str, str], bool]) -> Timeline:
        """This timeline with no other options than those allowed.

        Args:
            allowed: Unit name, action -> whether it may be chosen.
        """
        kept = [i for i, option in enumerate(self.options) if allowed(self.units[option.unit], option.action)]
        if len(kept) == len(self.options):
            return self
        number = {old: new for new, old in enumerate(kept)}
        shared = []
        for hold in self.shared:
            rows = [row for row, holder in enumerate(hold.holders) if holder in number]
            if rows:
                holders = tuple(number[hold.holders[row]] for row in rows)
                shared.append(SharedHold(hold.size_bytes, holders, hold.mask[rows]))
        return replace(
            self,
            options=tuple(self.options[i] for i in kept),
            relief_bytes=self.relief_bytes[kept],
            shared=tuple(shared),
        )

    def chosen(self, actions: Mapping[str, str]) -> NDArray[np.intp]:
        """Indices of the options that `actions` chooses; units it does not name are kept.

        Raises:
            KeyError: A unit or an action that this timeline does not have.
        """
        picked = [self.option_index[unit, action] for unit, action in actions.items() if action != KEEP]
        return np.array(sorted(picked), dtype=np.intp)

    def relieved_bytes(self, chosen: NDArray[np.intp]) -> NDArray[np.int64]:
        """What the options `chosen` relieve together at every position, shape (positions,); holds left aside."""
        rows = max(1, BLOCK // max(1, self.relief_bytes.shape[1]))
        total: NDArray[np.int64] = self.relief_bytes[chosen[:rows]].sum(axis=0)
        for start in range(rows, len(chosen), rows):
            total += self.relief_bytes[chosen[start : start + rows]].sum(axis=0)
        return total

    def level_bytes(self, chosen: NDArray[np.intp]) -> NDArray[np.int64]:
        """Live bytes at every position (shape (positions,)) when the options `chosen` are taken."""
        level: NDArray[np.int64] = self.base_bytes - self.relieved_bytes(chosen)
        if self.shared:
            taken = set(chosen.tolist())
            for hold in self.shared:
                for row, holder in enumerate(hold.holders):
                    if holder in taken:
                        level += hold.size_bytes * hold.mask[row]
                        break
        return level

    def peak_bytes(self, actions: Mapping[str, str], *, learns: bool = False) -> int:
        """The step's peak under a plan's actions, resident bytes included.

        Args:
            actions: Unit -> action; units that are not named are kept.
            learns: Whether recomputations run to their end.
        """
        level = self.level_bytes(self.chosen(actions))
        return int((level + self.ending_bytes if learns else level).max())

    def peak_position(self, actions: Mapping[str, str]) -> str:
        """The label of the position at which the peak is reached."""
        return self.labels[int(self.level_bytes(self.chosen(actions)).argmax())]

    def added_seconds(self, actions: Mapping[str, str]) -> float:
        """What the plan adds to the step's time."""
        return self.seconds_of(self.chosen(actions))

    def seconds_of(self, chosen: NDArray[np.intp]) -> float:
        """What the options `chosen`, in ascending order, add to the step's time."""
        return float(sum(self.options[i].added_seconds for i in chosen.tolist()))
