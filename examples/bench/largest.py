"""Largest: how large a batch trains in the memory that a smaller one takes without the package, and at which speed.

The budget is the true peak of the plain step at the base batch. Batches grow, by halving the gap between the largest
that trained and the smallest that was refused; peaks are read off an independent meter. Speed is time per sample
against the plain step's, of steps that run in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.frontier import Runner, laps
from bench.large import LARGE
from bench.models import Batch, Workload

BASE_SAMPLES = 8
MOST = 4
"""Times the base batch; no larger one is tried."""
STATED = (2, 2.5)
"""Times the base batch at which speed is stated, besides the largest."""


def rows(names: Sequence[str], repeats: int, menus: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows per workload and menu: one for each batch whose speed is stated."""
    for name in names:
        workload = LARGE[name]
        plain = Runner(workload, None, None, torch.optim.SGD)
        base = _batch(workload, BASE_SAMPLES)
        plain.peaks([base])  # the gradients come with the first step
        (peak,), resident = plain.peaks([base])
        for menu in menus:
            runner = Runner(workload, peak, menu, torch.optim.SGD)
            largest, highest = _largest(workload, runner)
            for samples in sorted({int(times * BASE_SAMPLES) for times in STATED} | {largest}):
                if samples > largest:
                    continue
                row: dict[str, Any] = {"model": name, "menu": menu, "budget MB": round(peak / 1e6, 1)}
                row |= {"resident MB": round(resident / 1e6, 1), "batch": samples, "times": samples / BASE_SAMPLES}
                added = _per_sample(plain, runner, base, _batch(workload, samples), repeats) - 1
                row |= {"added time per sample": round(added, 4), "is largest": "yes" if samples == largest else ""}
                yield row | {"highest peak": round(highest / peak, 4), "steps over": int(highest > peak)}


def _batch(workload: Workload, samples: int) -> Batch:
    return workload.batch(torch.Generator().manual_seed(0), samples)


def _largest(workload: Workload, runner: Runner) -> tuple[int, int]:
    """The most samples that train in the budget, and the highest true peak of all that did."""
    for samples in (2, 3, 4, 6):  # learning
        runner.step(_batch(workload, samples), 0)
    low, high, highest = 6, MOST * BASE_SAMPLES + 1, 0
    while high - low > 1:
        samples = (low + high) // 2
        batch, before = _batch(workload, samples), runner.error
        for _ in range(3):  # measured sheltered, planned, and planned with what was learnt
            peaks, _ = runner.peaks([batch])
            if runner.error is not before:
                break
            highest = max(highest, *peaks)
        if runner.error is before:
            low = samples
        else:
            high, runner.error = samples, None
    return low, highest


def _per_sample(plain: Runner, runner: Runner, base: Batch, large: Batch, repeats: int) -> float:
    """Time per sample, as a ratio of medians."""
    found: list[list[float]] = [[], []]
    for _ in range(repeats):
        for times, who, batch in zip(found, (plain, runner), (base, large), strict=True):
            times += [seconds / len(next(iter(batch.values()))) for seconds, _ in laps(who, batch, 0)]
    return statistics.median(found[1]) / statistics.median(found[0])
