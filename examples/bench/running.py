"""Runs workloads with and without a budget, on the independent meter, and prints tables."""

from __future__ import annotations

import json
import logging
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.models import Batch, Task, Workload, fit
from lightning_mimose import BudgetInfeasibleError, MimoseCallback
from meter import MeterCallback


@dataclass
class Run:
    """One fit on the meter.

    Attributes:
        peaks: True peak of every batch, in bytes.
        residents: What was resident when each batch began, in bytes.
        callback: The callback; None for a run without a budget.
        error: The budget's refusal, if there was one.
        weights: Final weights.
    """

    peaks: list[int]
    residents: list[int]
    callback: MimoseCallback | None
    error: BudgetInfeasibleError | None
    weights: dict[str, torch.Tensor]


def run(workload: Workload, batches: Sequence[Batch], callback: MimoseCallback | None = None, **options: Any) -> Run:
    """Trains one epoch on the meter."""
    meter, task = MeterCallback(), Task(workload)
    error = None
    try:
        fit(task, batches, meter, *([callback] if callback is not None else []), **options)
    except BudgetInfeasibleError as refused:
        error = refused
    return Run(meter.peaks, meter.residents, callback, error, task.state_dict())


def budget_at(plain: Run, share: float) -> int:
    """Resident bytes + a share of the largest activation memory."""
    resident = max(plain.residents)
    return int(resident + share * (max(plain.peaks) - resident))


def quiet() -> None:
    """No chatter between the rows of a table."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_mimose", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def show(title: str, rows: Sequence[dict[str, Any]], path: Path | None, console: Console | None = None) -> None:
    """Prints rows as a table, and adds them to a JSON file with date, machine and versions."""
    console = console or Console()
    table = Table(title=title)
    columns = {column: value for row in reversed(rows) for column, value in row.items()}
    for column in dict.fromkeys(column for row in rows for column in row):
        table.add_column(column, justify="left" if isinstance(columns[column], str) else "right")
    for row in rows:
        table.add_row(*(_text(row.get(column.header, "")) for column in table.columns))
    console.print(table)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        known["machine"] = {
            "date": date.today().isoformat(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        known[title] = list(rows)
        path.write_text(json.dumps(known, indent=1) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def figure(what: str, value: float, unit: str, bar: str) -> dict[str, Any]:
    """The row of one figure that has a bar."""
    return {"what": what, "measured": round(value, 3), "unit": unit, "bar": bar}
