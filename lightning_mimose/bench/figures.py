"""From what was measured to what is shown. Pure: no torch, no clock, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Literal

Status = Literal["ran", "simulated", "refused", "not run", "failed"]


@dataclass(frozen=True)
class Spread:
    """A median and what lies around it.

    Attributes:
        value: The figure itself.
        low: The lowest of the repeats.
        high: The highest of the repeats.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of some repeats; None of none.

        Example:
            >>> Spread.of([3, 1, 2])
            Spread(value=2, low=1, high=3)
        """
        return cls(median(values), min(values), max(values)) if values else None


@dataclass
class Measured:
    """What one alternative did under one budget. A pass is one epoch of the same batches in the same order.

    Attributes:
        name: The alternative.
        title: What tables call it.
        status: Whether it ran; if not, `why` says more.
        why: One line.
        peaks_bytes: Passes x steps, the first pass being its first epoch: true peaks.
        seconds: Repeats x steps.
        operations: Floating-point operations of one epoch; None where they cannot be counted.
        gradients: Digest of the gradients after each step of the first epoch, then of the last metered one.
        cold_seconds: Finding each new plan.
        cached_seconds: Finding each plan that was known.
        ahead_seconds: Planning before training.
        sheltered_steps: Steps of all metered passes that ran under the most saving plan, nothing being known.
        predictions: (predicted, true) peak in bytes, of the metered steps that were planned.
        notes: What a reader must know.
    """

    name: str
    title: str
    status: Status = "ran"
    why: str = ""
    peaks_bytes: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    operations: int | None = None
    gradients: list[str] = field(default_factory=list)
    cold_seconds: list[float] = field(default_factory=list)
    cached_seconds: list[float] = field(default_factory=list)
    ahead_seconds: float | None = None
    sheltered_steps: int | None = None
    predictions: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """What a table shows of one alternative under one budget; None where there is nothing to say.

    Attributes:
        worst_peak: Highest true peak of an epoch, as a share of the budget.
        steps_over: Steps of an epoch whose true peak is above the budget.
        first_steps_over: The same for the very first epoch, in which everything is new.
        utilisation: Mean of peak / budget over the steps that had to save.
        time: Seconds of an epoch as a multiple of the plain run's.
        added_operations: Floating-point operations beyond the plain run's, as a share of those.
        cold_seconds: Finding a new plan.
        cached_seconds: Finding a known plan.
        ahead_seconds: Planning before training.
        sheltered_steps: Steps that ran under the most saving plan, nothing being known.
        prediction_error: Worst |predicted / true - 1| of the planned steps.
        bit_equal: Whether the gradients of every step of the first and of the last metered epoch equal the plain run's.
    """

    worst_peak: Spread | None = None
    steps_over: Spread | None = None
    first_steps_over: int | None = None
    utilisation: Spread | None = None
    time: Spread | None = None
    added_operations: float | None = None
    cold_seconds: Spread | None = None
    cached_seconds: Spread | None = None
    ahead_seconds: float | None = None
    sheltered_steps: int | None = None
    prediction_error: float | None = None
    bit_equal: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def figures(measured: Measured, plain: Measured, budget_bytes: int) -> Figures:
    """The figures of one alternative; none of one that did not get to its end.

    Args:
        measured: What it did.
        plain: What the plain run did, in the same turns.
        budget_bytes: What it is held against, whether it knew it or not.

    Example:
        >>> plain = Measured("plain", "plain", peaks_bytes=[[80, 120]], seconds=[[1.0, 2.0], [1.0, 2.0]], operations=10)
        >>> saving = Measured("x", "x", peaks_bytes=[[80, 90]], seconds=[[1.0, 2.6], [1.0, 2.9]], operations=12)
        >>> found = figures(saving, plain, 100)
        >>> found.time.value, found.steps_over.value, found.utilisation.value, round(found.added_operations, 3)
        (1.25, 0, 0.9, 0.2)
    """
    if measured.status not in ("ran", "simulated"):
        return Figures()
    peaks = measured.peaks_bytes
    had_to_save = [index for index, peak in enumerate(plain.peaks_bytes[-1]) if peak > budget_bytes]
    over = [sum(peak > budget_bytes for peak in epoch) for epoch in peaks]
    return Figures(
        worst_peak=Spread.of([max(epoch) / budget_bytes for epoch in peaks]),
        steps_over=Spread.of(over),
        first_steps_over=over[0] if over else None,
        utilisation=Spread.of([fmean(epoch[i] / budget_bytes for i in had_to_save) for epoch in peaks])
        if had_to_save
        else None,
        time=relative_time(measured.seconds, plain.seconds),
        added_operations=measured.operations / plain.operations - 1
        if measured.operations is not None and plain.operations
        else None,
        cold_seconds=Spread.of(measured.cold_seconds),
        cached_seconds=Spread.of(measured.cached_seconds),
        ahead_seconds=measured.ahead_seconds,
        sheltered_steps=measured.sheltered_steps,
        prediction_error=max((abs(said / true - 1) for said, true in measured.predictions), default=None),
        bit_equal=measured.gradients == plain.gradients if measured.gradients and plain.gradients else None,
    )


def relative_time(seconds: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> Spread | None:
    """Time of an epoch against the plain run's.

    The value is the ratio of the sums of each step's median over all repeats; the spread is that of the single repeats,
    each against the plain run in the same one (all of them, where the numbers of repeats differ).

    Args:
        seconds: Repeats x steps.
        plain: The same of the plain run.
    """
    if not seconds or not plain:
        return None
    value = _epoch(seconds) / _epoch(plain)
    against = plain if len(plain) == len(seconds) else [[_epoch(plain)]] * len(seconds)
    single = [sum(own) / sum(other) for own, other in zip(seconds, against, strict=True)]
    return Spread(value, min(value, *single), max(value, *single))


def _epoch(seconds: Sequence[Sequence[float]]) -> float:
    return float(sum(median(step) for step in zip(*seconds, strict=True)))
