"""Exact: final weights and buffers with a budget, bit for bit those of the plain run, in every way people train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.models import WORKLOADS
from bench.running import budget_at, run
from lightning_mimose import MimoseCallback

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulate 3, clip 1.0": {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0},
}


def rows(names: list[str], steps: int = 30) -> Iterator[dict[str, Any]]:
    """One row per workload and way of training."""
    for name in names:
        workload = WORKLOADS[name]
        batches = workload.batches(steps, seed=7)
        for way, options in WAYS.items():
            plain = run(workload, batches, **options)
            done = run(workload, batches, MimoseCallback(budget=budget_at(plain, 0.5)), **options)
            assert done.callback is not None
            same = all(torch.equal(value, done.weights[key]) for key, value in plain.weights.items())
            yield {
                "model": name,
                "training": way,
                "steps": len(done.peaks),
                "units recomputed": sum(record.recomputed_units for record in done.callback.records),
                "bit-equal": "refused" if done.error else "yes" if same else "NO",
            }
