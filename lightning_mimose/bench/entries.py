"""What enters a race, under which budgets, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_mimose.bench.alternatives import PLAIN, Alternative
from lightning_mimose.bench.figures import Measured
from lightning_mimose.bench.runner import Runner
from lightning_mimose.bench.work import Work
from lightning_mimose.budget import Budget


@dataclass(frozen=True)
class Ask:
    """A budget as it was asked for: a share of the plain run's activation memory, or bytes."""

    text: str
    budget: Budget

    def resolve(self, resident_bytes: int, peak_bytes: int) -> int:
        """In bytes, for a work whose plain run finds that much resident and reaches that peak."""
        if self.budget.kind == "bytes":
            return int(self.budget.amount)
        return int(resident_bytes + self.budget.amount * (peak_bytes - resident_bytes))


@dataclass
class Entry:
    """One alternative under one budget, or under all where it knows none.

    Attributes:
        alternative: Which.
        asks: The budgets that it stands for.
        budget_bytes: What it is told.
        measured: What it did.
        runner: While it runs.
    """

    alternative: Alternative
    asks: tuple[Ask, ...]
    budget_bytes: int
    measured: Measured
    runner: Runner | None = None


@dataclass
class Raced:
    """What a race over one work found.

    Attributes:
        work: The work.
        budgets_bytes: Ask's text -> bytes.
        resident_bytes: What a plain step found resident.
        entries: Every alternative, under each budget or under all.
    """

    work: Work
    budgets_bytes: dict[str, int]
    resident_bytes: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def plain(self) -> Measured:
        """The plain run."""
        return next(entry.measured for entry in self.entries if entry.alternative.name == PLAIN)

    def under(self, ask: str) -> list[Measured]:
        """Every alternative under one budget, in the table's order."""
        return [entry.measured for entry in self.entries if ask in [each.text for each in entry.asks]]
