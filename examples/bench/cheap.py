"""Cheap: what planning and the callback cost in time. Ratios of interleaved medians; microseconds of single calls."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import added
from bench.added import Block
from bench.running import figure
from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.loop import Mimose
from lightning_mimose.plan import Planner
from lightning_mimose.units import Unit, find_units


def stack(depth: int, width: int) -> nn.Sequential:
    """`depth` blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar."""
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def interleaved(first: Callable[[], Any], second: Callable[[], Any], repeats: int = 25) -> tuple[float, float]:
    """Median seconds of each, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 3):
        for which in (0, 1) if repeat % 2 else (1, 0):
            began = time.perf_counter()
            (first, second)[which]()
            if repeat >= 3:
                times[which].append(time.perf_counter() - began)
    return median(times[0]), median(times[1])


def rows() -> Iterator[dict[str, Any]]:
    """One row per bar."""
    yield from added.rows()
    yield from _planning()
    yield from _fitting()
    yield _sheltered()


def _planning() -> Iterator[dict[str, Any]]:
    for depth, bar in ((50, "< 10 ms"), (500, "< 100 ms")):
        model = stack(depth, 16)
        with Mimose(model, budget="4GB", loss_fn=loss) as mimose:
            for rows_ in (40, 60, 50, 80, 70):
                mimose.step(torch.randn(rows_, 16))
            advisor = mimose._advisor
            size = advisor.tracker.look(torch.randn(64, 16))
            timeline, _ = advisor.timeline(torch.randn(64, 16))
            peak, least = timeline.peak_bytes({}), advisor.sure_bytes(timeline)
            cold, hit = [], []
            for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
                advisor.budget_bytes = int(least + share * (peak - least))
                # For the exact answer to the question before, which takes the other core.
                advisor.planner.scheduler.wait()
                advisor.planner.scheduler.close()
                advisor.planner = Planner()  # which knows no plan to start from
                began = time.perf_counter()
                advisor.advise(size, advisor.resident, 0)
                cold.append(time.perf_counter() - began)
                for _ in range(20):
                    began = time.perf_counter()
                    advisor.advise(size, advisor.resident, 0)
                    hit.append(time.perf_counter() - began)
        yield figure(f"a new plan, {depth} units (median)", 1e3 * median(cold), "ms", bar)
        yield figure(f"a new plan, {depth} units (worst)", 1e3 * max(cold), "ms", bar)
        yield figure(f"plan lookup, {depth} units (median)", 1e6 * median(hit), "us", "< 100 us")


def _fitting() -> Iterator[dict[str, Any]]:
    """Whole steps against each other, beside what two equal ones differ by; and the engine's own calls, timed inside.

    The machine's noise between two steps is larger than what is looked for, so the sum of the engine's calls counts.
    """
    for depth, width, tokens in ((12, 256, 1024), (48, 64, 64)):
        models = [stack(depth, width) for _ in range(3)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
        batch = torch.randn(tokens, width)

        def step(model: nn.Module, optimizer: Any, batch: torch.Tensor = batch) -> None:
            value = loss(model, batch)
            model.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()

        first, second = (partial(step, m, o) for m, o in zip(models[:2], optimizers[:2], strict=True))
        repeats = 31 if depth < 20 else 101
        with Mimose(models[2], budget="8GB", optimizer=optimizers[2], loss_fn=loss) as mimose:
            mimose.step(batch)
            while mimose.records[-1].measured_peak_bytes is not None:
                mimose.step(batch)
            without, with_ = interleaved(first, partial(mimose.step, batch), repeats)
            inside = _inside(mimose, batch, repeats)
        same, again = interleaved(first, second, repeats)
        bar, which = f"< {max(100.0, 1e4 * without):.0f} us", f"a step that fits, {depth} units, {1e3 * without:.1f} ms"
        yield figure(f"{which}: spent in the engine", 1e6 * inside, "us", bar)
        yield figure(f"{which}: added to the whole step", 1e6 * (with_ - without), "us", bar)
        yield figure(f"{which}: the same between two plain ones", 1e6 * (again - same), "us", "(noise)")


def _inside(mimose: Mimose, batch: torch.Tensor, repeats: int) -> float:
    """Median seconds that a step spends in the engine, patched forwards included."""
    engine, times = mimose._engine, []
    assert engine is not None
    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            result = call(*args, **kwargs)
            spent += time.perf_counter() - began
            return result

        return run

    names = ("begin_step", "begin_forward", "begin_backward", "before_update", "end_step")
    for name in names:
        setattr(engine, name, timed(getattr(engine, name)))
    for _ in range(repeats):
        spent = 0.0
        mimose.step(batch)
        times.append(spent)
    for name in names:
        delattr(engine, name)
    return median(times) + len(engine.units) * _forward_seconds()


def _forward_seconds() -> float:
    """Seconds that patching adds to one call of a unit that is kept."""

    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    plain, patched, x = Identity(), Identity(), torch.zeros(1)
    patch_unit(Unit("identity", patched, -1, 1, True), Session(proves=False))
    seconds = [min(timeit.repeat(partial(m, x), number=2000, repeat=9)) / 2000 for m in (plain, patched)]
    unpatch(patched)
    return seconds[1] - seconds[0]


def _sheltered() -> dict[str, Any]:
    depth, width, tokens = 12, 256, 1024
    ours, hand = stack(depth, width), stack(depth, width)
    batch = torch.randn(tokens, width)
    session = Session(proves=False)
    units = [unit for unit in find_units(ours) if unit.shelter]
    for unit in units:
        patch_unit(unit, session)

    def sheltered() -> None:
        session.arm({unit.name: "recompute" for unit in units}, None)
        loss(ours, batch).backward()
        session.disarm()
        ours.zero_grad()

    def by_hand() -> None:
        x = batch
        for block in hand:
            x = checkpoint(block, x, use_reentrant=False)
        x.pow(2).mean().backward()
        hand.zero_grad()

    first, second = interleaved(by_hand, sheltered)
    for unit in units:
        unpatch(unit.module)
    return figure("a sheltered step, meter off / checkpointed by hand", second / first, "x", "<= 1.05x")
