"""The report of a shared budget: what its jobs held, stacked over time, and what each waited. Numbers only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_mimose.budget import format_bytes
from lightning_mimose.report.text import Table, plain, write_json


@dataclass(frozen=True)
class JobFacts:
    """One job's part.

    Attributes:
        job: Its name.
        seconds: From its joining to its end, or to the latest entry.
        highest_bytes: The most that it was granted.
        waits: How often it waited.
        waited_seconds: How long, in all.
    """

    job: str
    seconds: float
    highest_bytes: int
    waits: int
    waited_seconds: float


class SharedReport:
    """What happened in a shared budget: a snapshot of the newest entries.

    Args:
        budget_bytes: The budget; None before any job has joined.
        held: (seconds, job, bytes that it may hold from then on), in order.
        waits: (job, from, until) in seconds.

    Example:
        >>> report = SharedReport(100, [(0.0, "a", 60), (1.0, "b", 40), (2.0, "a", 10)], [("b", 0.5, 1.0)])
        >>> report.highest_bytes, report.stacked()[-1]
        (100, (2.0, {'a': 10, 'b': 40}))
    """

    def __init__(self, budget_bytes: int | None, held: Sequence[Sequence[Any]], waits: Sequence[Sequence[Any]]) -> None:
        self.budget_bytes = budget_bytes
        self.held = tuple((float(when), str(job), int(size)) for when, job, size in held)
        self.waits = tuple((str(job), float(since), float(until)) for job, since, until in waits)

    def stacked(self) -> list[tuple[float, dict[str, int]]]:
        """After every change: when, and what each job may hold, in the order in which they joined."""
        level: dict[str, int] = {}
        found = []
        for when, job, size in self.held:
            level[job] = size
            found.append((when, dict(level)))
        return found

    @cached_property
    def highest_bytes(self) -> int:
        """The most that all jobs together were granted at a moment."""
        total, highest, level = 0, 0, dict[str, int]()
        for _, job, size in self.held:
            total += size - level.get(job, 0)
            level[job] = size
            highest = max(highest, total)
        return highest

    @cached_property
    def jobs(self) -> tuple[JobFacts, ...]:
        """Every job, in the order in which they joined."""
        end = self.held[-1][0] if self.held else 0.0
        found = []
        for job in dict.fromkeys(job for _, job, _ in self.held):
            own = [(when, size) for when, name, size in self.held if name == job]
            until = own[-1][0] if own[-1][1] == 0 else end
            waits = [stop - since for name, since, stop in self.waits if name == job]
            found.append(JobFacts(job, until - own[0][0], max(size for _, size in own), len(waits), sum(waits)))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON. Sizes are bytes, times seconds."""
        return {
            "budget_bytes": self.budget_bytes,
            "highest_bytes": self.highest_bytes,
            "jobs": [vars(facts) for facts in self.jobs],
            "held": [list(entry) for entry in self.held],
            "waits": [list(entry) for entry in self.waits],
        }

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_dict` to a file; folders are made where missing.

        Returns:
            The path written.
        """
        return write_json(path, self.to_dict())

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw what the jobs held, stacked over time against the budget, and under it what each waited.

        Args:
            directory: Where shared.png goes; made where missing.

        Returns:
            The file written.

        Raises:
            MimoseError: matplotlib is not installed (`pip install "lightning-mimose[plots]"`).
        """
        from lightning_mimose.report.shared_plot import draw_shared

        return [draw_shared(self, Path(directory))]

    def __str__(self) -> str:
        if not self.held or self.budget_bytes is None:
            return plain([Table("shared budget", ())]) + "\nNo job has joined yet."
        share = f" ({100 * self.highest_bytes / self.budget_bytes:.1f} % of the budget)"
        head = Table(
            f"shared budget: {format_bytes(self.budget_bytes)}",
            (("most granted at once", format_bytes(self.highest_bytes) + share),),
        )
        rows = tuple(
            (
                facts.job,
                f"{facts.seconds:.1f} s",
                format_bytes(facts.highest_bytes),
                f"{facts.waits:,}",
                f"{facts.waited_seconds:.2f} s",
            )
            for facts in self.jobs
        )
        return plain([head, Table("Jobs", rows, ("job", "lasted", "most granted", "waits", "waited"))])
