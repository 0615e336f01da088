"""Shared: several trainings in one budget. Their true memory together, bits, time, largest batches, kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.allocations import counted
from bench.trainee import Trainee, loss
from lightning_mimose import Mimose, SharedBudget
from lightning_mimose.shared.lease import WATCHED_STEPS
from lightning_mimose.shared.remote import RemoteBroker
from lightning_mimose.shared.stops import Stops
from lightning_mimose.shared.wire import Meeting

CORES = os.cpu_count() or 1
REPEATS = 3
"""How often trainings are timed, together and one after the other in turns: single times differ by tens of percent."""


def rows(parts: str = "schedules,cost,compare,largest,kills", kills: int = 200) -> Iterator[dict[str, Any]]:
    """One row per bar."""
    makers = {"schedules": _schedules, "cost": _cost, "compare": _compare, "largest": _largest}
    for part in parts.split(","):
        yield from _kills(kills) if part == "kills" else makers[part]()


def _row(what: str, measured: Any, bar: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "measured": measured, "bar": bar, **more}


def _scenario(**asked: Any) -> dict[str, Any]:
    with counted() as environment:
        done = subprocess.run(
            [sys.executable, "-m", "bench.sharing", json.dumps(asked)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment},
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _schedules() -> Iterator[dict[str, Any]]:
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.helpers.schedules import simulate

    began, highest = time.perf_counter(), 0.0
    for seed in range(10_000):
        outcome = simulate(random.Random(seed), 1 + seed % 6)  # raises at a deadlock, starvation or excess
        highest = max(highest, outcome.highest_bytes / outcome.budget_bytes)
    what = f"10,000 schedules at random, {time.perf_counter() - began:.0f} s: deadlocks, starvations, excesses"
    yield _row(what, 0, "0", **{"peak / budget": round(highest, 4)})


def _compare() -> Iterator[dict[str, Any]]:
    for jobs, threads, share in (
        (2, True, 2.2),
        (2, True, 1.0),
        (2, True, 0.5),
        (3, True, 1.0),
        (2, False, 2.2),
        (2, False, 1.0),
        (2, False, 0.5),
        (3, False, 1.0),
    ):
        each = CORES if threads else max(1, CORES // jobs)
        found = _scenario(
            scenario="compare",
            jobs=jobs,
            steps=24,
            rows=16,
            share=share,
            threads=threads,
            cores=CORES,
            cores_each=each,
            repeats=REPEATS,
        )
        where = "threads" if threads else "processes"
        in_room = found["in_room"]
        yield _row(
            f"{jobs} {where}, {share} x one's activations: one after the other / together",
            round(found["sequential"] / found["together"], 3),
            ">= 1.0",
            **{
                "the same, with no more than its room": in_room and round(in_room / found["together"], 3),
                "true peak / budget": round(found["peak"], 4),
                "steps over": int(found["peak"] > 1),
                "bit-equal": "yes" if found["bit_equal"] else "NO",
            },
        )


def _largest() -> Iterator[dict[str, Any]]:
    for threads in (True, False):
        found = _scenario(scenario="largest", times=1, threads=threads)
        where = "threads" if threads else "processes"
        peak = found["true_peak"] / found["budget"]
        each, alone = found["each"], found["alone"]
        yield _row(
            f"2 {where}: largest batch of each, {each} rows / alone in what the other leaves, {alone}",
            round(each / alone, 4),
            ">= 0.97",
            **{"true peak / budget": round(peak, 4), "steps over": int(peak > 1)},
        )


def _kills(kills: int) -> Iterator[dict[str, Any]]:
    found = _scenario(scenario="kills", kills=kills, seed=1)
    what = (
        f"{kills} trainings killed (-9), {found['coordinators']} coordinators too, in {found['seconds']:.0f} s: times "
        f"the survivor ({found['survivor_steps']:,} steps) did not go on within 20 s"
    )
    peak = found["true_peak"] / found["budget"]
    yield _row(
        what,
        found["survivor_stuck"],
        "0",
        **{
            "true peak / budget": round(peak, 4),
            "steps over": int(peak > 1),
            "left behind": "YES" if found["left_behind"] else "no",
        },
    )


def _cost() -> Iterator[dict[str, Any]]:
    name = f"bench-cost-{os.getpid()}"
    shared = SharedBudget("8GB", device="cpu")
    connected = SharedBudget.connect(name, "8GB", device="cpu")
    yield _row("a job alone, threads: added to a step, us", _added(shared), "< 100")
    yield _row("a job alone, processes: added to a step, us", _added(connected), "< 100")
    other = RemoteBroker(Meeting(name), 8 * 10**9, "cpu")
    other.join("other", 1.0)
    if not other.settle("other", 1000).reach:
        other.wait("other")
    yield _row("another process beside it, no need to wait: added to a step, us", _added(connected), "< 100")
    lately = _added(connected, waited=True)
    yield _row("the same, but somebody waited lately, so that it notices its stops", lately, "none")
    other.leave("other")
    other = shared.open(torch.device("cpu"), "other")[0]  # type: ignore[assignment]
    other.settle(1000)  # type: ignore[call-arg, arg-type]
    from lightning_mimose.shared.baton import BATON

    BATON.give(other._runner)  # type: ignore[attr-defined]
    yield _row("another thread beside it, no need to wait: added to a step, us", _added(shared), "< 100")
    lately = _added(shared, waited=True)
    yield _row("the same, but somebody waited lately, so that it notices its stops", lately, "none")
    other.close()  # type: ignore[attr-defined]


def _added(budget: SharedBudget, *, waited: bool = False) -> float:
    """Median microseconds that a step spends on sharing: all calls of the tenancy and all that stops do, summed.

    Args:
        budget: The job's.
        waited: Whether it is to believe, at every step, that somebody waited in the one before.
    """
    what = Trainee(1, 0, rows=4, width=32, depth=12, tokens=16)
    model = what.model()
    spent = 0.0
    times = []

    def timed(call: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        result = call(*args, **kwargs)
        spent += time.perf_counter() - began
        return result

    stop = Stops.call

    def around(stops: Stops, name: str, run: Any, *given: Any) -> Any:
        """What a stop takes without the unit, in which there may be other stops."""
        nonlocal spent
        inside = 0.0

        def unit(*given: Any) -> Any:
            nonlocal inside
            began, counted = time.perf_counter(), spent
            out = run(*given)
            inside = time.perf_counter() - began - (spent - counted)
            return out

        began, counted = time.perf_counter(), spent
        out = stop(stops, name, unit, *given)
        spent = counted + time.perf_counter() - began - inside
        return out

    with Mimose(model, budget=budget, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn=loss) as mimose:
        batch = what.batches(0)
        while len(mimose.records) < WATCHED_STEPS + 8 or mimose.records[-1].measured_peak_bytes is not None:
            mimose.step(batch)
        assert mimose._engine is not None
        tenancy = mimose._engine.tenancy
        assert tenancy is not None
        for name in ("allow", "begin", "begin_forward", "begin_backward", "update", "end", "turn", "_arrive"):
            setattr(tenancy, name, partial(timed, getattr(tenancy, name)))
        Stops.call = around  # type: ignore[assignment, method-assign]
        try:
            for _ in range(200):
                spent = 0.0
                tenancy._lease._watched = WATCHED_STEPS if waited else tenancy._lease._watched
                mimose.step(batch)
                times.append(1e6 * spent)
        finally:
            Stops.call = stop  # type: ignore[assignment, method-assign]
    return round(median(times), 1)
