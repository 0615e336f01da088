"""What happened: one record per training batch, the newest of them kept, and aggregates of all."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MAX_RECORDS = 10_000


@dataclass(frozen=True)
class StepRecord:
    """One training batch, from `on_train_batch_start` to `on_train_batch_end`.

    Attributes:
        step: Number of training batches before it in this fit, accumulation batches counted.
        batch_idx: Index of the batch in its epoch.
        epoch: Index of the epoch.
        size: Named dimensions of the batch.
        sheltered: Whether it ran under the most saving plan because nothing trustworthy was known.
        cache_hit: Whether its plan came from the cache.
        retried: Whether it ran out of memory and was run again.
        budget_bytes: The budget in force.
        resident_bytes: Parameters, buffers, gradients, optimizer state and batch at its start.
        predicted_peak_bytes: Predicted peak for its actual size, resident bytes included; None when sheltered.
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
        return sum(action.startswith("recompute") for action in self.actions.values())

    @property
    def lean_units(self) -> int:
        """Number of units that kept recipes instead of some of their tensors."""
        return sum(action.startswith("lean") for action in self.actions.values())

    @property
    def split_units(self) -> int:
        """Number of units that ran a part of the batch at a time."""
        return sum(action.startswith("split") for action in self.actions.values())

    @property
    def offloaded_units(self) -> int:
        """Number of units whose saved tensors went to host memory."""
        return sum(action == "offload" for action in self.actions.values())

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
    largest_predicted_bytes: int = 0

    def add(self, record: StepRecord) -> None:
        """Take one record in."""
        self.steps += 1
        self.sheltered += record.sheltered
        self.cache_hits += record.cache_hit
        self.retried += record.retried
        self.recomputed_units += record.recomputed_units
        self.lean_units += record.lean_units
        self.split_units += record.split_units
        self.offloaded_units += record.offloaded_units
        self.planning_seconds += record.planning_seconds
        self.largest_predicted_bytes = max(self.largest_predicted_bytes, record.predicted_peak_bytes or 0)
        if record.measured_peak_bytes is not None:
            self.measured += 1
            self.largest_peak_bytes = max(self.largest_peak_bytes, record.measured_peak_bytes)
            bound = record.measured_peak_bytes if record.reserved_peak_bytes is None else record.reserved_peak_bytes
            self.over_budget += bound > record.budget_bytes


@dataclass
class History:
    """The newest records and the aggregates of all."""

    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    aggregates: Aggregates = field(default_factory=Aggregates)

    def add(self, record: StepRecord) -> StepRecord:
        """Take one record in; returns it with its number."""
        record = replace(record, step=self.aggregates.steps)
        self.records.append(record)
        self.aggregates.add(record)
        return record
