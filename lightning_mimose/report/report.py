"""The report: what a run's records add up to, as text, JSON and plots. Numbers only; it outlives everything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_mimose.budget import format_bytes
from lightning_mimose.report.record import History, StepRecord
from lightning_mimose.report.sizes import SizeAxis
from lightning_mimose.report.text import Table, plain, rich_tables, write_json

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_GROUPS = 4
_MOST = 5


@dataclass(frozen=True)
class PredictionError:
    """How far measured peaks were from predicted ones, over the planned steps that were measured.

    Attributes:
        steps: Number of such steps.
        median: Median of |measured - predicted| as a share of the measured peak.
        percentile_95: What 95 % of the steps stay within.
        largest: The worst.
    """

    steps: int
    median: float
    percentile_95: float
    largest: float


@dataclass(frozen=True)
class SizeGroup:
    """Planned steps of similar size.

    Attributes:
        smallest: Smallest size among them, on the report's size axis.
        largest: Largest size among them.
        steps: How many there were.
        recomputed_units: Mean number of units recomputed.
        lean_units: Mean number of units that kept recipes instead of some of their tensors.
        predicted_peak_bytes: Largest predicted peak.
    """

    smallest: int
    largest: int
    steps: int
    recomputed_units: float
    lean_units: float
    predicted_peak_bytes: int | None


class Report:
    """What happened in a run: a snapshot that later steps do not change.

    `str(report)` is plain text of at most 80 columns; `rich.print(report)` shows the same in colour. Totals are over
    all steps ever made; medians, sizes and units over the newest 10,000, which are the ones that are kept.

    Args:
        history: The records and their aggregates; copied.
        units: Qualified names of the units, in forward order.
        budget_bytes: The budget in force, in bytes; None if no run has started.
        evaluation_peaks: Stage -> largest peak in bytes outside training steps.
        guarded: Unit -> what is never done with it, and why.
        hints: Advice on operators that would lower the peak.

    Example:
        >>> print(Report(History(), (), None))
        lightning-mimose
        ----------------
        No training step was recorded in this process. Call report() after some steps.
    """

    def __init__(
        self,
        history: History,
        units: tuple[str, ...],
        budget_bytes: int | None,
        evaluation_peaks: Mapping[str, int] | None = None,
        guarded: Mapping[str, str] | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        self.records: tuple[StepRecord, ...] = tuple(history.records)
        self.aggregates = copy(history.aggregates)
        self.units = tuple(units)
        self.budget_bytes = budget_bytes
        self.evaluation_peaks = dict(evaluation_peaks or {})
        self.guarded = dict(guarded or {})
        self.hints = tuple(hints)

    # --- numbers ----------------------------------------------------------------------------------------------

    @cached_property
    def planned(self) -> tuple[StepRecord, ...]:
        """The kept records of planned (not sheltered) steps."""
        return tuple(record for record in self.records if not record.sheltered)

    @cached_property
    def axis(self) -> SizeAxis:
        """What sizes are compared by."""
        return SizeAxis.of(self.planned or self.records)

    @cached_property
    def prediction_error(self) -> PredictionError | None:
        """How good the predictions were; None before a planned step was measured."""
        errors = [
            abs(record.measured_peak_bytes - record.predicted_peak_bytes) / record.measured_peak_bytes
            for record in self.planned
            if record.measured_peak_bytes and record.predicted_peak_bytes is not None
        ]
        if not errors:
            return None
        median, percentile_95, largest = np.percentile(errors, [50, 95, 100]).tolist()
        return PredictionError(len(errors), median, percentile_95, largest)

    @cached_property
    def size_groups(self) -> tuple[SizeGroup, ...]:
        """Planned steps in up to four groups of about equal number, smallest sizes first; one size is in one group."""
        placed = self.axis.place(self.planned)
        values = [value for value, _ in placed]
        if not values:
            return ()
        quarters = (values[len(values) * i // _GROUPS] for i in range(_GROUPS))
        cuts = sorted({*(int(np.searchsorted(values, value)) for value in quarters), len(values)})
        return tuple(_group(placed[low:high]) for low, high in pairwise(cuts))

    @cached_property
    def most_recomputed(self) -> tuple[tuple[str, int], ...]:
        """The units recomputed most often in planned steps, with the number of steps."""
        actions = (item for record in self.planned for item in record.actions.items())
        return tuple(Counter(unit for unit, action in actions if action.startswith("recompute")).most_common(_MOST))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON, all kept records included. Sizes are bytes, times seconds."""
        seconds = [record.planning_seconds for record in self.records]
        error = self.prediction_error
        return {
            "budget_bytes": self.budget_bytes,
            "units": list(self.units),
            "aggregates": asdict(self.aggregates),
            "prediction_error": asdict(error) if error is not None else None,
            "planning_seconds": {"median": float(np.median(seconds)), "max": max(seconds)} if seconds else None,
            "evaluation_peak_bytes": dict(self.evaluation_peaks),
            "guarded": dict(self.guarded),
            "hints": list(self.hints),
            "size_axis": list(self.axis.dims),
            "size_groups": [asdict(group) for group in self.size_groups],
            "most_recomputed": [{"unit": unit, "steps": steps} for unit, steps in self.most_recomputed],
            "records": [record.to_dict() for record in self.records],
        }

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_dict` to a file; folders are made where missing.

        Returns:
            The path written.
        """
        return write_json(path, self.to_dict())

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw the run: peaks against the budget, plans by input size, predicted against measured.

        Args:
            directory: Where the PNG files go; made where missing.

        Returns:
            The files written.

        Raises:
            MimoseError: matplotlib is not installed (`pip install "lightning-mimose[plots]"`).
        """
        from lightning_mimose.report.plots import draw

        return draw(self, Path(directory))

    # --- text -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        if not self.aggregates.steps:
            none = "No training step was recorded in this process. Call report() after some steps."
            return f"{plain([self._title(())])}\n{none}"
        return plain(self._tables())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[RichTable | str]:
        """What `rich.print` shows."""
        if not self.aggregates.steps:
            yield str(self)
        else:
            yield from rich_tables(self._tables())

    def _title(self, rows: tuple[tuple[str, ...], ...]) -> Table:
        budget = "" if self.budget_bytes is None else f": budget {format_bytes(self.budget_bytes)}"
        return Table(f"lightning-mimose{budget}", rows)

    def _tables(self) -> list[Table]:
        tables = [self._title((*self._peak_facts(), *self._step_facts()))]
        if self.size_groups:
            tables.append(_size_table(self.axis, self.size_groups))
        if self.most_recomputed:
            steps = len(self.planned)
            rows = tuple((unit, f"{count:,}", _percent(count / steps)) for unit, count in self.most_recomputed)
            tables.append(Table("Most often recomputed", rows, ("unit", "steps", "of planned")))
        if self.guarded:
            tables.append(Table("Left as they are", tuple(self.guarded.items())))
        for hint in self.hints:
            tables.append(Table("Advice", (), note=hint))
        return tables

    def _peak_facts(self) -> Iterator[tuple[str, str]]:
        total = self.aggregates
        if total.measured:
            share = self._share(total.largest_peak_bytes, total.largest_share)
            yield "largest measured peak", format_bytes(total.largest_peak_bytes) + share
        else:
            yield "largest measured peak", "no step was measured"
        shares = [((r.reserved_peak_bytes or 0), (r.reserved_peak_bytes or 0) / r.budget_bytes) for r in self.records]
        reserved = max((size for size, _ in shares), default=0)
        if reserved:
            share = self._share(reserved, max(share for _, share in shares))
            yield "largest reserved peak", format_bytes(reserved) + share
        if total.largest_predicted_bytes:
            yield "largest predicted peak", format_bytes(total.largest_predicted_bytes)
        yield "steps over budget", f"{total.over_budget:,} of {total.measured:,} measured"
        error = self.prediction_error
        if error is not None:
            yield (
                f"prediction error, {error.steps:,} steps",
                f"median {_percent(error.median, 2)}, 95 % within {_percent(error.percentile_95, 2)}, "
                f"max {_percent(error.largest, 2)}",
            )
        for stage, peak in self.evaluation_peaks.items():
            yield f"{stage} peak", f"{format_bytes(peak)} (outside the budget's promise)"

    def _share(self, largest_bytes: int, most: float) -> str:
        """What it is of the budget; where there were others, the most that a step took of the one in force."""
        if not self.budget_bytes:
            return ""
        if most == largest_bytes / self.budget_bytes:
            return f" ({_percent(most)} of the budget)"
        return f" (at most {_percent(most)} of the budget in force)"

    def _step_facts(self) -> Iterator[tuple[str, str]]:
        total = self.aggregates
        steps = f"{total.steps:,} ({total.steps - total.sheltered:,} planned, {total.sheltered:,} sheltered)"
        yield "steps", steps + (f", {total.retried:,} retried" if total.retried else "")
        yield "plans from the cache", f"{total.cache_hits:,}"
        mean = f"{total.recomputed_units / total.steps:.1f}"
        yield "recomputed units per step", f"{mean} of {len(self.units):,} on average"
        for kind, count in (("lean", total.lean_units), ("split", total.split_units)):
            if count:
                yield f"{kind} units per step", f"{count / total.steps:.1f} of {len(self.units):,} on average"
        if total.offloaded_units:
            mean = f"{total.offloaded_units / total.steps:.1f}"
            yield "offloaded units per step", f"{mean} of {len(self.units):,} on average"
        seconds = [record.planning_seconds for record in self.records]
        yield "planning time per step", f"median {_duration(float(np.median(seconds)))}, max {_duration(max(seconds))}"


def _group(placed: Sequence[tuple[int, StepRecord]]) -> SizeGroup:
    records = [record for _, record in placed]
    predicted = [record.predicted_peak_bytes for record in records if record.predicted_peak_bytes is not None]
    return SizeGroup(
        smallest=placed[0][0],
        largest=placed[-1][0],
        steps=len(records),
        recomputed_units=sum(record.recomputed_units for record in records) / len(records),
        lean_units=sum(record.lean_units for record in records) / len(records),
        predicted_peak_bytes=max(predicted, default=None),
    )


def _size_table(axis: SizeAxis, groups: Sequence[SizeGroup]) -> Table:
    rows = tuple(
        (
            f"{group.smallest:,}" if group.smallest == group.largest else f"{group.smallest:,} to {group.largest:,}",
            f"{group.steps:,}",
            f"{group.recomputed_units:.1f}",
            f"{group.lean_units:.1f}",
            "-" if group.predicted_peak_bytes is None else format_bytes(group.predicted_peak_bytes),
        )
        for group in groups
    )
    return Table("Planned steps by input size", rows, (axis.label, "steps", "recomputed", "lean", "predicted peak"))


def _percent(share: float, places: int = 1) -> str:
    return f"{100 * share:.{places}f} %"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
