"""What happened: one record per training batch, the newest of them kept, and aggregates of all."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, overload

MAX_RECORDS = 10_000
KNOWN_ACTIONS = 64
"""Actions of the latest plans that are remembered as they are packed."""


@dataclass(frozen=True)
class StepRecord:
    """One training batch, from `on_train_batch_start` to `on_train_batch_end`.

    Attributes:
        step: Number of training batches before it, in all fits of its callback; accumulation batches counted.
        batch_idx: Index of the batch in its epoch.
        epoch: Index of the epoch.
        size: Named dimensions of the batch.
        sheltered: Whether it ran under the most saving plan because nothing trustworthy was known.
        cache_hit: Whether its plan came from the cache.
        retried: Whether it ran out of memory and was run again.
        budget_bytes: The budget in force.
        resident_bytes: Parameters, buffers, gradients, optimizer state and batch at its start.
        predicted_peak_bytes: Predicted peak for its actual size, resident bytes included; None when sheltered, where no
            prediction is trusted, but the budget is ample or a plan leaner than the shelter is known, and where the
            step ran no backward, for a loss that was None or in an epoch that only updates statistics (SWA's last).
        measured_peak_bytes: Measured peak, resident bytes included; None where it was not measured.
        reserved_peak_bytes: Peak of what the accelerator's allocator reserved; None on CPU.
        actions: Unit -> action of the units that did something else than keep.
        planning_seconds: Time to find the plan, from the batch's size to the armed plan.
    """

    step: int
    batch_idx: int
    epoch: int
    size: dict[str, int]
    sheltered: bool
    cache_hit: bool
    retried: bool
    budget_bytes: int
    resident_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    reserved_peak_bytes: int | None
    actions: dict[str, str]
    planning_seconds: float

    @property
    def recomputed_units(self) -> int:
        """Number of units recomputed."""
        return self._counts.get("reco", 0)

    @property
    def lean_units(self) -> int:
        """Number of units that kept recipes instead of some of their tensors."""
        return self._counts.get("lean", 0)

    @property
    def split_units(self) -> int:
        """Number of units that ran a part of the batch at a time."""
        return self._counts.get("spli", 0)

    @property
    def offloaded_units(self) -> int:
        """Number of units whose saved tensors went to host memory."""
        return self._counts.get("offl", 0)

    @cached_property
    def _counts(self) -> dict[str, int]:
        """How an action's name begins -> units; counted once, because every step is asked for several of them."""
        counts: dict[str, int] = {}
        for action in self.actions.values():
            kind = action[:4]
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass
class Aggregates:
    """Sums and extremes over every record ever made, however many were kept."""

    steps: int = 0
    sheltered: int = 0
    cache_hits: int = 0
    retried: int = 0
    measured: int = 0
    over_budget: int = 0
    recomputed_units: int = 0
    lean_units: int = 0
    split_units: int = 0
    offloaded_units: int = 0
    planning_seconds: float = 0.0
    largest_peak_bytes: int = 0
    largest_share: float = 0.0
    largest_predicted_bytes: int = 0

    def add(self, record: StepRecord) -> None:
        """Take one record in."""
        self.steps += 1
        self.sheltered += record.sheltered
        self.cache_hits += record.cache_hit
        self.retried += record.retried
        if record.actions:
            self.recomputed_units += record.recomputed_units
            self.lean_units += record.lean_units
            self.split_units += record.split_units
            self.offloaded_units += record.offloaded_units
        self.planning_seconds += record.planning_seconds
        self.largest_predicted_bytes = max(self.largest_predicted_bytes, record.predicted_peak_bytes or 0)
        if record.measured_peak_bytes is not None:
            self.measured += 1
            self.largest_peak_bytes = max(self.largest_peak_bytes, record.measured_peak_bytes)
            self.largest_share = max(self.largest_share, record.measured_peak_bytes / record.budget_bytes)
            bound = record.measured_peak_bytes if record.reserved_peak_bytes is None else record.reserved_peak_bytes
            self.over_budget += bound > record.budget_bytes


class Records(Sequence[StepRecord]):
    """Records as they were when they were asked for; each is made when it is looked at."""

    def __init__(self, packed: Sequence[_Packed], choices: Sequence[tuple[str, str]], first: int) -> None:
        self._packed, self._choices, self._first = packed, choices, first

    def __len__(self) -> int:
        """How many there are."""
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        """One of them, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        try:
            place = range(len(self))[index]
        except IndexError:
            raise IndexError(f"record {index} was asked for, and there are {len(self)}") from None
        values, names, sizes, numbers = self._packed[place]
        acting = array("H", numbers) if isinstance(numbers, bytes) else numbers
        return StepRecord(
            step=self._first + place,
            **dict(zip(_VALUES, values, strict=True)),
            size=dict(zip(names, sizes, strict=True)),
            actions=dict([self._choices[number] for number in acting]),
        )

    def __eq__(self, other: object) -> bool:
        """As a list."""
        return list(self) == (list(other) if isinstance(other, Records) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As a list."""
        return repr(list(self))


class _Acting(NamedTuple):
    """Actions, held so that no other dictionary can have their identity, what they are packed as, and their kinds.

    A number stands for every (unit, action), of which a model has few.
    """

    actions: dict[str, str]
    numbers: bytes | tuple[int, ...]
    counts: dict[str, int]


class History:
    """The newest records and the aggregates of all.

    Records are kept as the numbers in which they differ, half a kilobyte each: with ten thousand sizes hardly two plans
    are the same.

    Attributes:
        aggregates: Of every record ever added.
    """

    def __init__(self) -> None:
        self.aggregates = Aggregates()
        self._packed: deque[_Packed] = deque(maxlen=MAX_RECORDS)
        self._choices: dict[tuple[str, str], int] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._latest: dict[int, _Acting] = {}

    def add(self, record: StepRecord) -> StepRecord:
        """Take one record in; returns it with its number."""
        if record.step != self.aggregates.steps:
            record = replace(record, step=self.aggregates.steps)
        numbers: bytes | tuple[int, ...] = b""
        if record.actions:
            acting = self._acting(record)
            numbers, vars(record)["_counts"] = acting.numbers, acting.counts
        self.aggregates.add(record)
        names = tuple(record.size)
        self._packed.append(
            (_values(record), self._names.setdefault(names, names), tuple(record.size.values()), numbers)
        )
        return record

    def _acting(self, record: StepRecord) -> _Acting:
        """What a record's actions are packed as: worked out once for all steps that share them."""
        acting = self._latest.get(id(record.actions))
        if acting is None or acting.actions is not record.actions:  # of an object before a copy was made
            known = self._choices
            numbers = [known.setdefault(choice, len(known)) for choice in record.actions.items()]
            packed = array("H", numbers).tobytes() if len(known) <= 1 << 16 else tuple(numbers)
            if len(self._latest) >= KNOWN_ACTIONS:
                self._latest.clear()
            acting = self._latest[id(record.actions)] = _Acting(record.actions, packed, record._counts)
        return acting

    @property
    def records(self) -> Records:
        """The newest records."""
        return Records(tuple(self._packed), tuple(self._choices), self.aggregates.steps - len(self._packed))


_VALUES = tuple(each.name for each in fields(StepRecord) if each.name not in ("step", "size", "actions"))
_values = attrgetter(*_VALUES)
_Packed = tuple[tuple[Any, ...], tuple[str, ...], tuple[int, ...], "bytes | tuple[int, ...]"]
