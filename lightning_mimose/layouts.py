"""What one set of names of dimensions has shown: which of them vary, and which were always equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_mimose.dims import BATCH


@dataclass
class Layout:
    """What one set of names has shown so far, in O(dims): no history is kept."""

    names: tuple[str, ...]
    low: list[int]
    high: list[int]
    groups: list[list[int]]  # indices of dimensions that were equal in every batch; the first stands for the others
    last: tuple[int, ...] | None = None
    shown: list[int] = field(default_factory=list)  # the groups' first members that are worth naming
    seen: int = 0  # how many sizes

    @classmethod
    def of(cls, names: tuple[str, ...], values: tuple[int, ...]) -> Layout:
        """That of a first size."""
        alone = [[i] for i, name in enumerate(names) if name == BATCH]
        others = [i for i, name in enumerate(names) if name != BATCH]
        layout = cls(names, list(values), list(values), [*alone, others] if others else alone)
        layout.see(values)
        return layout

    def see(self, values: tuple[int, ...]) -> None:
        """Another size, in the order of `names`."""
        self.seen += 1
        if values == self.last:
            return
        self.last = values
        self.low = list(map(min, self.low, values))
        self.high = list(map(max, self.high, values))
        refined: list[list[int]] = []
        for group in self.groups:
            by_value: dict[int, list[int]] = {}
            for i in group:
                by_value.setdefault(values[i], []).append(i)
            refined.extend(by_value.values())
        if len(refined) > len(self.groups):
            refined.sort()
        self.groups = refined
        self.update_shown()

    def update_shown(self) -> None:
        """See which groups are worth naming."""
        varying = self.varying()
        first = [group[0] for group in self.groups]
        self.shown = [i for i in first if not varying or i in varying or self.names[i] == BATCH]

    def varying(self) -> list[int]:
        """First members of the groups that had at least two values."""
        return [group[0] for group in self.groups if self.low[group[0]] < self.high[group[0]]]
