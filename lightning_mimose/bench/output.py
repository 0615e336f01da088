"""What a race found, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_mimose.bench.entries import Raced
from lightning_mimose.bench.figures import Figures, Measured, Spread, figures
from lightning_mimose.budget import device_memory, format_bytes
from lightning_mimose.report.text import Table

HEADER = ("alternative", "time", "from-to", "peak", "over", "use", "flops", "plan", "error", "shel", "bits")
LEGEND = (
    "time, from-to: an epoch as a multiple of the plain run's, and that of the fastest and slowest repeat. peak: "
    "highest true peak / budget. over: steps of an epoch above the budget (worst epoch). use: peak / budget of the "
    "steps that had to save. flops: operations beyond the plain run's. plan: median time to find a new plan, or "
    "planning before training (*). error: worst error of a predicted peak. shel: sheltered steps. bits: gradients "
    "equal the plain run's bit for bit. No time of less than the difference between the two plain rows means anything."
)


def tables(raced: Raced, asks: Sequence[str]) -> Iterator[Table]:
    """One table for each budget, and the notes below the last."""
    for ask in asks:
        budget_bytes = raced.budgets_bytes[ask]
        notes: list[tuple[str, str]] = []
        found = [(measured, figures(measured, raced.plain, budget_bytes)) for measured in raced.under(ask)]
        rows = tuple(_row(*pair, notes) for pair in found)
        yield Table(f"{raced.work.name}, budget {ask} = {format_bytes(budget_bytes)}", rows, HEADER)
        yield Table(raced.work.description, tuple(notes))


def _row(measured: Measured, found: Figures, notes: list[tuple[str, str]]) -> tuple[str, ...]:
    """A row; what it cannot say is added to the notes, under its number."""
    told = [text for text in (measured.why, *measured.notes) if text]
    name = measured.title
    if told:
        name = f"{name} [{len(notes) + 1}]"
        notes.append((f"[{len(notes) + 1}] {measured.title}", " ".join(told)))
    if measured.status in ("not run", "failed", "refused"):
        return (name, measured.status, *("" for _ in HEADER[2:]))
    plan = found.cold_seconds.value if found.cold_seconds else found.ahead_seconds
    return (
        name,
        f"{found.time.value:.2f}" if found.time else "",
        f"{found.time.low:.2f}-{found.time.high:.2f}" if found.time else "",
        f"{found.worst_peak.high:.2f}" if found.worst_peak else "",
        _over(found.steps_over, len(measured.peaks_bytes[0]) if measured.peaks_bytes else 0),
        _percent(found.utilisation.value) if found.utilisation else "",
        _percent(found.added_operations, sign=True) if found.added_operations is not None else "",
        (_duration(plan) + ("" if found.cold_seconds else "*")) if plan is not None else "",
        f"{100 * found.prediction_error:.1f}%" if found.prediction_error is not None else "",
        str(found.sheltered_steps) if found.sheltered_steps is not None else "",
        "" if found.bit_equal is None else "yes" if found.bit_equal else "NO",
    )


def _over(steps: Spread | None, of: int) -> str:
    return f"{steps.high:.0f}/{of}" if steps is not None else ""


def _percent(share: float, sign: bool = False) -> str:
    return f"{100 * share:+.0f}%" if sign else f"{100 * share:.0f}%"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} us"
    )


def document(races: Sequence[Raced], options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Everything as plain data: date, hardware, versions, figures, and the raw peaks and seconds of every step."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "options": options,
        "works": [_work(raced) for raced in races],
    }


def _work(raced: Raced) -> dict[str, Any]:
    return {
        "name": raced.work.name,
        "description": raced.work.description,
        "resident_bytes": raced.resident_bytes,
        "budgets": [
            {
                "asked": ask,
                "budget_bytes": budget_bytes,
                "alternatives": [
                    {
                        **vars(measured),
                        "budget_known": next(e.alternative.budgeted for e in raced.entries if e.measured is measured),
                        "figures": figures(measured, raced.plain, budget_bytes).to_dict(),
                    }
                    for measured in raced.under(ask)
                ],
            }
            for ask, budget_bytes in raced.budgets_bytes.items()
        ],
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, as far as it bears on the figures."""
    return {
        "device": str(device),
        "cpu": _cpu(),
        "cores": torch.get_num_threads(),
        "memory_bytes": device_memory(torch.device("cpu")).total_bytes,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu() -> str:
    """The processor's name; `platform` does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    from lightning_mimose import __version__

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning-mimose": __version__,
    }
    try:
        import transformers
    except ImportError:
        return found
    return {**found, "transformers": transformers.__version__}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1)
    # Numbers of one list on one line: people read this file, too.
    text = re.sub(r"\[[\s\d.,e+-]+\]", lambda numbers: " ".join(numbers.group().split()), text)
    path.write_text(text + "\n", encoding="utf-8")
