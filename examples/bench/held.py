"""Held and predicted: the true peak of every step against the budget, and against what was predicted.

For every workload, order of sizes and budget: sheltered steps and the first optimizer step included. At "1.03x" the
budget is 1.03 times the smallest feasible that an earlier run named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.models import WORKLOADS, Order
from bench.running import Run, budget_at, run
from lightning_mimose import MimoseCallback

SHARES = (0.9, 0.7, 0.5, 0.35)


def rows(names: list[str], steps: int, epochs: int = 1, seed: int = 3) -> Iterator[dict[str, Any]]:
    """One row per workload, order and budget."""
    for name in names:
        workload = WORKLOADS[name]
        orders: tuple[Order, ...] = ("longest first", "longest last")
        for order in orders:
            batches = [b for e in range(epochs) for b in workload.batches(steps, seed=seed + e, order=order)]
            plain = run(workload, batches)
            smallest = 0
            for share in SHARES:
                done = run(workload, batches, MimoseCallback(budget=budget_at(plain, share)))
                if done.callback is not None and not smallest and done.error is None:
                    smallest = max(done.callback.smallest_feasible_bytes(batch) for batch in batches)
                yield _row(name, order, f"{share}", done)
            if smallest:
                yield _row(name, order, "1.03x", run(workload, batches, MimoseCallback(budget=int(1.03 * smallest))))


def _row(name: str, order: str, share: str, done: Run) -> dict[str, Any]:
    assert done.callback is not None
    records = done.callback.records
    budget = done.callback.budget_bytes or 0
    errors = sorted(
        abs(record.predicted_peak_bytes / peak - 1)
        for record, peak in zip(records, done.peaks, strict=False)
        if record.predicted_peak_bytes is not None
    )
    return {
        "model": name,
        "order": order,
        "budget share": share,
        "budget MB": round(budget / 1e6, 1),
        "true peak MB": round(max(done.peaks) / 1e6, 1),
        "steps over": sum(peak > budget for peak in done.peaks),
        "steps": len(done.peaks),
        "sheltered": sum(record.sheltered for record in records),
        "planned": len(errors),
        "off by > 1 %": sum(error > 0.01 for error in errors),
        "worst error %": round(100 * errors[-1], 3) if errors else 0.0,
        "refused": f"needs {done.error.smallest_feasible_bytes:,}" if done.error is not None else "",
    }
