"""Device: what each action adds on the host and on an accelerator, when every layer of BERT-base takes it.

Steps of all actions and plain ones run in turns, each waited for. "host" is how long a step is started for, "device"
how long the device computes or copies, "wall" the time until it is done; plans are charged for what of an action is
hidden behind neither. Without an accelerator a small BERT runs, and only wall times mean something.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification

from lightning_mimose import Mimose
from lightning_mimose.predict.timeline import Timeline

ACTIONS = ("keep", "lean", "lean+masks", "lean+expansions", "recompute", "offload")
SIZES = ((2, 16), (12, 320), (12, 512), (32, 128), (32, 512))
"""Rows and tokens; the first only waits for the host."""
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 256,
}
SMALL_SIZES = ((2, 16), (4, 64))
"""Without an accelerator."""
_LAYER = re.compile(r"encoder\.layer\.\d+$")


@dataclass
class Runner:
    """One training of the model.

    Attributes:
        step: Runs one.
        mimose: What plans it, if anything does.
        seconds: Host and wall seconds of steps, by size.
    """

    step: Callable[[Any], Any]
    mimose: Mimose | None = None
    seconds: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)


def rows(repeats: int) -> Iterator[dict[str, Any]]:
    """One row per size and action.

    Args:
        repeats: How often each step is timed.
    """
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator or torch.device("cpu")
    sizes = SIZES if accelerator else SMALL_SIZES
    runners = {name: _runner(device, None) for name in ("plain", "plain again")}
    runners["checkpointed"] = _runner(device, None, checkpoints=True)
    runners |= {action: _runner(device, action) for action in ACTIONS}
    batches = {size: _batch(device, *size) for size in sizes}
    for runner in runners.values():
        for batch in 3 * list(batches.values()):
            runner.step(batch)
    for size, batch in batches.items():
        for _ in range(repeats):
            for runner in runners.values():
                runner.seconds.setdefault(size, []).append(_timed(device, runner, batch))
    for size, batch in batches.items():
        plain = median(wall for _, wall in runners["plain"].seconds[size])
        for name, runner in runners.items():
            host, wall = (median(each) for each in zip(*runner.seconds[size], strict=True))
            row = {
                "rows x tokens": f"{size[0]} x {size[1]}",
                "action": name,
                "host ms": round(1e3 * host, 1),
                "wall ms": round(1e3 * wall, 1),
                "of plain": round(wall / plain, 3),
            }
            if accelerator:
                row["device ms"] = round(1e3 * _busy(runner, batch), 1)
            if runner.mimose is not None:
                row["charged ms"] = round(1e3 * runner.mimose.plan(batch).added_seconds, 1)
            yield row


def _runner(device: torch.device, action: str | None, *, checkpoints: bool = False) -> Runner:
    torch.manual_seed(0)
    size = SMALL if device.type == "cpu" else {}
    config = BertConfig(problem_type="single_label_classification", use_cache=False, **size)
    model = BertForSequenceClassification(config).to(device).train()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    def plain(batch: Any) -> None:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if action is None:
        return Runner(plain)

    def forced(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        having = {timeline.units[each.unit] for each in timeline.options if each.action == action}
        return {unit: action for unit in having if _LAYER.search(unit)}

    actions = ["offload"] if action == "offload" else None
    mimose = Mimose(model, budget=0.9, optimizer=optimizer, loss_fn=loss_of, actions=actions, planner=forced)
    return Runner(mimose.step, mimose)


def _batch(device: torch.device, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[-1, tokens // 2 :] = 0
    batch = {
        "input_ids": torch.randint(0, 1000, (rows, tokens), generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (rows,), generator=generator),
    }
    return {name: value.to(device) for name, value in batch.items()}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(device: torch.device, runner: Runner, batch: Any) -> tuple[float, float]:
    _wait(device)
    began = time.perf_counter()
    runner.step(batch)
    started = time.perf_counter() - began
    _wait(device)
    return started, time.perf_counter() - began


def _busy(runner: Runner, batch: Any) -> float:
    """Seconds in which the device did anything."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runner.step(batch)
        torch.accelerator.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return _covered(spans) / 1e6


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    covered, end = 0.0, float("-inf")
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
