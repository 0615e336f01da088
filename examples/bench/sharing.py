"""Scenarios of the benchmark `shared`, each in a process tree that is counted: `python -m bench.sharing JSON`.

This process loads everything and computes nothing; it forks the trainings. What it found it prints as a line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.allocations import Board
from bench.trainee import Trainee, train
from lightning_mimose import BudgetInfeasibleError, SharedBudget
from lightning_mimose.shared.wire import Meeting

FORK = multiprocessing.get_context("fork")


def name_of(what: str) -> str:
    """A name that nobody else uses."""
    return f"bench-{what}-{os.getpid()}"


def apart(work: Callable[[], Any]) -> Any:
    """Run something in a process of its own; its result, or None if a budget could not be kept."""
    queue = FORK.SimpleQueue()

    def run() -> None:
        try:
            queue.put(work())
        except BudgetInfeasibleError:
            queue.put(None)

    process = FORK.Process(target=run)
    process.start()
    result = queue.get()
    process.join()
    Board().bury(process.pid or 0)
    return result


def solo(what: Trainee, budget: int, cores: int) -> dict[str, Any] | None:
    """One training alone."""

    def work() -> dict[str, Any]:
        torch.set_num_threads(cores)
        out = train(what, budget)
        rest = max(record.resident_bytes for record in out.records)
        peak = max(record.measured_peak_bytes or 0 for record in out.records)
        return {"digest": out.digest, "seconds": out.seconds, "peak": peak, "rest": rest}

    found: dict[str, Any] | None = apart(work)
    return found


def together(trainees: list[Trainee], budget: int, cores: int, *, threads: bool) -> dict[str, Any]:
    """Several at once, in threads of one process or in processes; and what all of them held at most, in truth."""
    board, name = Board(), name_of("together")
    queue, barrier = FORK.SimpleQueue(), FORK.Barrier(2 if threads else len(trainees) + 1)

    def one(i: int, shared: SharedBudget) -> None:
        try:
            with shared.job(f"job{i}"):
                out = train(trainees[i], shared)
            queue.put((i, out.digest, time.time(), sum(r.recomputed_units for r in out.records)))
        except BudgetInfeasibleError as error:
            queue.put((i, None, time.time(), str(error)))

    def in_threads() -> None:
        torch.set_num_threads(cores)
        shared = SharedBudget(budget, device="cpu")
        barrier.wait()
        jobs = [threading.Thread(target=one, args=(i, shared)) for i in range(len(trainees))]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        queue.put(shared.report().to_dict())

    def in_process(i: int) -> None:
        torch.set_num_threads(cores)
        shared = SharedBudget.connect(name, budget, device="cpu")
        barrier.wait()
        one(i, shared)

    if threads:
        processes = [FORK.Process(target=in_threads)]
    else:
        processes = [FORK.Process(target=in_process, args=(i,)) for i in range(len(trainees))]
    for process in processes:
        process.start()
    barrier.wait()
    before, began = board.live_bytes, time.time()
    board.reset()
    found = [queue.get() for _ in trainees]
    report = queue.get() if threads else None
    peak = board.peak_bytes - before
    for process in processes:
        process.join()
        board.bury(process.pid or 0)
    found.sort()
    return {
        "digests": [each[1] for each in found],
        "seconds": max(each[2] for each in found) - began,
        "true_peak": peak,
        "jobs": report["jobs"] if report else None,
        "said": [each[3] for each in found],
    }


def compare(given: dict[str, Any]) -> dict[str, Any]:
    """Several trainings together, against one after the other; the least of some times, taken in turns.

    One after the other each has all the memory it can use. `in_room` is what they take one after the other with no more
    than the others leave them: what is lost against that is lost by sharing, the rest by saving memory.
    """
    trainees = [Trainee(seed, given["steps"], given["rows"]) for seed in range(1, given["jobs"] + 1)]
    alone, rooms, shared = [], [], []
    peaks, same = [], True
    for _ in range(given["repeats"]):
        whole = _one_after_the_other(trainees, 1 << 33, given["cores"])
        assert whole
        rest = max(each["rest"] for each in whole)
        activations = max(each["peak"] for each in whole) - rest
        budget = int(len(trainees) * 1.05 * rest + given["share"] * activations)
        # Bits depend on the number of threads: what runs on one core is compared with itself.
        again = whole
        if given["cores_each"] != given["cores"]:
            again = _one_after_the_other(trainees, 1 << 33, given["cores_each"]) or []
        in_room = _one_after_the_other(trainees, budget - (len(trainees) - 1) * rest, given["cores"])
        found = together(trainees, budget, given["cores_each"], threads=given["threads"])
        same = same and found["digests"] == [each["digest"] for each in again]
        alone.append(sum(each["seconds"] for each in whole))
        rooms += [sum(each["seconds"] for each in in_room)] if in_room else []
        shared.append(found["seconds"])
        peaks.append(found["true_peak"] / budget)
    return {
        "peak": max(peaks),
        "bit_equal": same,
        "sequential": min(alone),
        "in_room": min(rooms, default=None),
        "together": min(shared),
    }


def _one_after_the_other(trainees: list[Trainee], budget: int, cores: int) -> list[dict[str, Any]] | None:
    """Some trainings, each alone; None if one of them cannot keep the budget."""
    found = [solo(what, budget, cores) for what in trainees]
    return [each for each in found if each] if all(found) else None


def largest(given: dict[str, Any]) -> dict[str, Any]:
    """The largest batch of two equal trainings in a budget, and of one alone in what the other one leaves."""
    shape = {"width": 64, "depth": 6, "tokens": 32, "vary": False}
    small = solo(Trainee(1, 6, 16, **shape), 1 << 33, 1)
    assert small
    per_row = 32 * 64 * 4
    model = small["rest"] - 16 * per_row
    budget = 2 * model + int(given["times"] * (small["peak"] - small["rest"]))

    def alone(rows: int) -> bool:
        return solo(Trainee(1, 6, rows, **shape), budget - model - rows * per_row, 1) is not None

    worst = 0

    def both(rows: int) -> bool:
        nonlocal worst
        found = together([Trainee(i, 6, rows, **shape) for i in (1, 2)], budget, 1, threads=given["threads"])
        if None not in found["digests"]:
            worst = max(worst, found["true_peak"])
        return None not in found["digests"]

    def search(fits: Callable[[int], bool], low: int, high: int) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    one = search(alone, 8, 128 * given["times"])
    # From there down: two that fit are expected to be as large, or a row or two smaller.
    two = next(rows for rows in range(one, 0, -1) if both(rows))
    return {"budget": budget, "alone": one, "each": two, "true_peak": worst}


def kills(given: dict[str, Any]) -> dict[str, Any]:
    """Trainings, and their coordinator, killed at random moments; one training survives them all."""
    lot, name = random.Random(given["seed"]), name_of("kills")
    meeting, board = Meeting(name), Board()
    shape = {"width": 32, "depth": 4, "tokens": 16, "rows": 16}
    steps = FORK.Array("q", 4096)
    ended = FORK.Value("b", 0)
    reference = solo(Trainee(0, 20, **shape), 1 << 33, 1)
    assert reference
    budget = int(5 * reference["rest"] + 1.2 * (reference["peak"] - reference["rest"]))
    queue = FORK.SimpleQueue()

    def work(i: int) -> None:
        torch.set_num_threads(1)
        shared = SharedBudget.connect(name, budget, device="cpu")

        def note(step: int) -> None:
            steps[i] = step + 1
            if i == 0 and ended.value:
                raise StopIteration(step + 1)

        try:
            with shared.job(f"job{i}"):
                train(Trainee(i, 1 << 30, **shape), shared, meanwhile=note)
        except StopIteration as stop:
            queue.put((stop.value, shared.report().highest_bytes))

    def start(i: int) -> Any:
        process = FORK.Process(target=work, args=(i,))
        process.start()
        return process

    alive, number, coordinators, stuck, began = {i: start(i) for i in range(3)}, 3, 0, 0, time.time()
    board.reset()
    highest = 0
    for _ in range(given["kills"]):
        time.sleep(lot.uniform(0.05, 0.4))
        before = list(steps)
        if lot.random() < 0.2 and meeting.lock.exists():
            try:
                os.kill(int(meeting.lock.read_text()), signal.SIGKILL)
                coordinators += 1
            except (OSError, ValueError):
                pass  # it is just being started
        victim = lot.choice([i for i in alive if i])
        process = alive.pop(victim)
        highest = max(highest, board.peak_bytes)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        board.bury(process.pid)
        board.reset()
        alive[number] = start(number)
        number += 1
        until = time.time() + 20
        while steps[0] <= before[0] and time.time() < until:
            time.sleep(0.005)
        stuck += steps[0] <= before[0]
    ended.value = 1
    survived, granted = queue.get()
    alive.pop(0).join()
    for process in alive.values():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    seconds = time.time() - began
    until = time.time() + 10
    while meeting.folder.exists() and time.time() < until:
        time.sleep(0.05)
    return {
        "kills": given["kills"],
        "coordinators": coordinators,
        "survivor_stuck": stuck,
        "survivor_steps": survived,
        "most_granted": granted,
        "budget": budget,
        "true_peak": highest,
        "left_behind": meeting.folder.exists(),
        "seconds": seconds,
    }


SCENARIOS = {"compare": compare, "largest": largest, "kills": kills}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(SCENARIOS[asked.pop("scenario")](asked)))
