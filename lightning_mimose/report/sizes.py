"""Input sizes on one axis: which dimensions varied in the records, and their product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from lightning_mimose.report.record import StepRecord


@dataclass(frozen=True)
class SizeAxis:
    """One number for the size of a batch.

    Attributes:
        dims: The dimensions whose product it is: those that varied, or all where none did.

    Example:
        >>> axis = SizeAxis(("batch", "input_ids:1"))
        >>> axis.label, axis.value({"batch": 8, "input_ids:1": 57})
        ('batch x input_ids:1', 456)
    """

    dims: tuple[str, ...]

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> SizeAxis:
        """The axis for some records.

        The first records of a run name fewer dimensions than later ones, which know what varies, and batches of
        another layout have other names; the names that most records have in common decide.
        """
        sizes = [record.size for record in records]
        if not sizes:
            return cls(())
        names = Counter(tuple(size) for size in sizes).most_common(1)[0][0]
        alike = [size for size in sizes if size.keys() >= set(names)]
        varying = tuple(name for name in names if len({size[name] for size in alike}) > 1)
        return cls(varying or names)

    @property
    def label(self) -> str:
        """What to call it."""
        return " x ".join(self.dims) or "size"

    def value(self, size: dict[str, int]) -> int | None:
        """The product of the dimensions; None for a batch that does not name them all."""
        if not self.dims or any(name not in size for name in self.dims):
            return None
        return prod(size[name] for name in self.dims)

    def place(self, records: Sequence[StepRecord]) -> list[tuple[int, StepRecord]]:
        """(value, record) of the records that have one, smallest first."""
        placed = [(value, record) for record in records if (value := self.value(record.size)) is not None]
        return sorted(placed, key=lambda pair: pair[0])
