"""Used: what plans recompute, against the best of all plans at 0.99 of the budget, in counted operations.

The units are the blocks, so that every plan can be tried: for each planned step all subsets are evaluated on the step's
own timeline, and the operations that each unit's recomputation runs are counted by torch's `FlopCounterMode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.models import WORKLOADS, Batch, Workload
from bench.running import budget_at, run
from lightning_mimose import MimoseCallback
from lightning_mimose.actions.caches import CacheSwitch
from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.predict.timeline import Timeline
from lightning_mimose.units import find_units

UNITS = {
    "bert": ["*.embeddings", "BertLayer"],
    "gpt2": ["GPT2Block"],
    "llama": ["LlamaDecoderLayer"],
    "t5": ["T5LayerSelfAttention", "T5LayerCrossAttention", "T5LayerFF"],
    "resnet": ["ResNetEmbeddings", "ResNetBasicLayer"],
    "vit": ["ViTLayer"],
    "swin": ["SwinLayer"],
}


def rows(names: list[str], steps: int, seed: int = 5) -> Iterator[dict[str, Any]]:
    """One row per workload and budget."""
    for name in names:
        workload, units = WORKLOADS[name], UNITS[name]
        batches = workload.batches(steps, seed=seed, order="longest first")
        plain = run(workload, batches)
        flops: dict[int, dict[str, int]] = {}
        before = None
        for share in (0.35, 0.5, 0.7, 0.9):
            budget = budget_at(plain, share)
            done = run(
                workload, batches, MimoseCallback(budget=budget, units=units, planner="exact", actions=["recompute"])
            )
            assert done.callback is not None
            ours = best = planned = 0
            for index, record in enumerate(done.callback.records):
                if record.predicted_peak_bytes is None:
                    continue
                if index not in flops:
                    flops[index] = unit_flops(workload, batches[index], units)
                timeline, _ = done.callback._known().timeline(batches[index])
                planned += 1
                ours += sum(flops[index][unit] for unit in record.actions)
                best += cheapest(
                    timeline.only(lambda _, action: action == "recompute"), int(0.99 * budget), flops[index]
                )
            yield {
                "model": name,
                "budget share": f"{share}",
                "units": len(flops[next(iter(flops))]) if flops else 0,
                "planned steps": planned,
                "recomputed MFLOP": round(ours / 1e6, 1),
                "best possible": round(best / 1e6, 1),
                "ratio": round(ours / best, 4) if best else (1.0 if not ours else float("inf")),
                "no more than at less": "yes" if before is None or ours <= before or done.error else "NO",
                "refused": f"needs {done.error.smallest_feasible_bytes:,}" if done.error is not None else "",
            }
            before = ours if done.error is None else None


def unit_flops(workload: Workload, batch: Batch, patterns: list[str]) -> dict[str, int]:
    """Operations that each unit's recomputation adds to a step, counted by running the step with it and without."""
    model, session, caches = workload.make(), Session(proves=False), CacheSwitch()
    caches.off(model)  # as in training: a block that is given a cache is not recomputed
    units = [unit for unit in find_units(model, patterns) if unit.shelter]
    for unit in units:
        patch_unit(unit, session)
    try:
        plain = _count(workload, model, batch, session, {})
        return {
            f"model.{u.name}": _count(workload, model, batch, session, {u.name: "recompute"}) - plain for u in units
        }
    finally:
        for unit in units:
            unpatch(unit.module)


def _count(
    workload: Workload, model: torch.nn.Module, batch: Batch, session: Session, actions: Mapping[str, str]
) -> int:
    session.arm(actions, None)
    with FlopCounterMode(display=False) as counter:
        workload.loss(model, batch).backward()
    session.disarm()
    model.zero_grad()
    return int(counter.get_total_flops())


def cheapest(timeline: Timeline, budget_bytes: int, flops: Mapping[str, int]) -> int:
    """Operations of the cheapest of all plans that fit."""
    names = [timeline.units[option.unit] for option in timeline.options]
    least = None
    for taken in product((False, True), repeat=len(names)):
        cost = sum(flops[name] for name, take in zip(names, taken, strict=True) if take)
        if (least is None or cost < least) and (int(timeline.level_bytes(np.flatnonzero(taken)).max()) <= budget_bytes):
            least = cost
    return least if least is not None else sum(flops.values())
