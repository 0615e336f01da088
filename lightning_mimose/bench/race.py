"""Runs every alternative on the same batches, in turns.

Peaks and times are taken in passes of their own, so that no meter runs while time is taken. In a timed pass every step
runs twice in a row and the second is timed: the first pays for memory that the alternative before it gave back. The
order is shuffled for every batch of every repeat, and dropout has the same seed for everyone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_mimose.bench.alternatives import PLAIN, Alternative
from lightning_mimose.bench.digest import digest
from lightning_mimose.bench.entries import Ask, Entry, Raced
from lightning_mimose.bench.figures import Measured
from lightning_mimose.bench.meter import meter_of
from lightning_mimose.bench.progress import Progress
from lightning_mimose.bench.runner import Case, MimoseRunner, NotRun, Runner, synchronize
from lightning_mimose.bench.simulation import dtr_of, recordings
from lightning_mimose.bench.work import Work
from lightning_mimose.errors import BudgetError, BudgetInfeasibleError, MimoseError
from lightning_mimose.explain.samples import say


def race(
    work: Work,
    device: torch.device,
    asks: Sequence[Ask],
    alternatives: Sequence[Alternative],
    *,
    repeats: int,
    progress: Progress,
) -> Raced:
    """Run one work under every alternative and budget.

    Args:
        work: What is trained.
        device: Where its batches are.
        asks: Budgets.
        alternatives: What to compare; plain among them.
        repeats: How often peaks and times are taken.
        progress: Told about every step.

    Raises:
        BudgetError: A budget in bytes that not even the model fits in.
        MimoseError: The plain run fails, so that there is nothing to compare with.
    """
    progress.tell(f"{work.name}: a plain run, to know what the budgets are")
    peaks, resident_bytes = _plain_peaks(work, device)
    raced = Raced(work, {ask.text: ask.resolve(resident_bytes, max(peaks)) for ask in asks}, resident_bytes)
    for text, budget_bytes in raced.budgets_bytes.items():
        if budget_bytes <= resident_bytes:
            raise BudgetError(
                f"The budget {text} is {budget_bytes:,} bytes, but {work.name} has {resident_bytes:,} bytes resident "
                "before a step begins."
            )
    largest, shared = work.batches[peaks.index(max(peaks))], dict[str, Any]()
    for alternative in alternatives:
        for group in [(ask,) for ask in asks] if alternative.budgeted else [tuple(asks)]:
            raced.entries.append(
                Entry(
                    alternative,
                    group,
                    raced.budgets_bytes[group[0].text],
                    Measured(alternative.name, alternative.title, "simulated" if alternative.simulated else "ran"),
                )
            )
    try:
        _run(raced, Case(work, device, 0, largest, resident_bytes, shared, progress.tell), repeats, progress)
    finally:
        for entry in raced.entries:
            _close(entry)
    return raced


def _run(raced: Raced, case: Case, repeats: int, progress: Progress) -> None:
    """Everybody's first epoch, the passes in turns, and what is counted or simulated at the end."""
    work = raced.work
    running = [entry for entry in raced.entries if not entry.alternative.simulated]
    progress.begin(work.name, len(running) * len(work.batches) * (3 * repeats + 1))
    for entry in running:
        progress.tell(f"{work.name}: {entry.alternative.title}, first epoch")
        _attempt(work, entry, _start, entry, replace(case, budget_bytes=entry.budget_bytes), progress)
    order = random.Random(0)
    for repeat in range(repeats):
        progress.tell(f"{work.name}: repeat {repeat + 1} of {repeats}")
        if repeat:
            _pass(raced, partial(_peaks, is_last=repeat == repeats - 1), order, progress)
        _pass(raced, _seconds, order, progress)
    for entry in running:
        progress.tell(f"{work.name}: {entry.alternative.title}, counting operations")
        _attempt(work, entry, _count, entry, work, progress)
        _attempt(work, entry, _finish, entry)
    for entry in raced.entries:
        if entry.alternative.simulated:
            progress.tell(f"{work.name}: {entry.alternative.title}")
            _attempt(work, entry, _simulate, entry, raced, case)


def _attempt(work: Work, entry: Entry, act: Callable[..., None], *args: Any) -> None:
    """Do something to an alternative that is still in; where it fails, its row says why and the others go on.

    Raises:
        MimoseError: It was the plain run that failed: the others have nothing to be compared with.
    """
    measured = entry.measured
    if measured.status not in ("ran", "simulated"):
        return
    try:
        act(*args)
        return
    except NotRun as reason:
        measured.status, measured.why = "not run", str(reason)
    except BudgetInfeasibleError as error:
        needs = f"{(error.smallest_feasible_bytes or 0) / 1e6:,.1f} MB"
        measured.status, measured.why = "refused", f"refused by its planner: a batch needs {needs}"
    except Exception as error:
        measured.status, measured.why = "failed", say(error)[:300]
        if entry.alternative.name == PLAIN:
            raise _no_plain_run(work, error) from error
    _drop_unfinished(measured, len(work.batches))
    _close(entry)


def _drop_unfinished(measured: Measured, steps: int) -> None:
    """Only whole epochs are left of what was measured."""
    measured.peaks_bytes = [epoch for epoch in measured.peaks_bytes if len(epoch) == steps]
    measured.seconds = [epoch for epoch in measured.seconds if len(epoch) == steps]
    del measured.gradients[len(measured.gradients) // steps * steps :]


def _no_plain_run(work: Work, error: Exception) -> MimoseError:
    """What to say where the work cannot be trained at all."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in str(error).lower():
        change = "It ran out of memory: use smaller sizes (--size), fewer batches (--steps) or fewer --alternatives."
    else:
        change = "It must train without any saving first: check the model and its loss, --size, --init and --batch."
    return MimoseError(f"A plain training step of {work.name} failed: {say(error)[:300].rstrip('.')}. {change}")


def _start(entry: Entry, case: Case, progress: Progress) -> None:
    """Make the runner and run its first epoch on the meter."""
    assert entry.alternative.make is not None
    torch.manual_seed(0)
    runner = entry.runner = entry.alternative.make(case)
    epoch: list[int] = []
    with runner.present():
        for index, batch in enumerate(case.work.batches):
            epoch.append(_metered(runner, batch, index, entry.measured))
            entry.measured.gradients.append(digest(runner.model))
            progress.advance()
    entry.measured.peaks_bytes.append(epoch)


def _pass(raced: Raced, take: Callable[[Entry, Any, int], None], order: random.Random, progress: Progress) -> None:
    """One epoch of everybody who is still in, batch by batch in another order each time."""
    ran = [entry for entry in raced.entries if entry.runner is not None]
    for entry in ran:
        (entry.measured.seconds if take is _seconds else entry.measured.peaks_bytes).append([])
    for index, batch in enumerate(raced.work.batches):
        for entry in order.sample(ran, len(ran)):
            _attempt(raced.work, entry, take, entry, batch, index)
            progress.advance(2 if take is _seconds else 1)


def _peaks(entry: Entry, batch: Any, seed: int, *, is_last: bool) -> None:
    """In the last epoch the gradients are looked at once more: by now whoever plans has planned."""
    assert entry.runner is not None
    with entry.runner.present():
        entry.measured.peaks_bytes[-1].append(_metered(entry.runner, batch, seed, entry.measured))
        if is_last:
            entry.measured.gradients.append(digest(entry.runner.model))


def _seconds(entry: Entry, batch: Any, seed: int) -> None:
    runner = entry.runner
    assert runner is not None
    with runner.present():
        for timed in (False, True):
            torch.manual_seed(seed)
            synchronize(runner.case.device)
            began = time.perf_counter()
            runner.step(batch)
            synchronize(runner.case.device)
            if timed:
                entry.measured.seconds[-1].append(time.perf_counter() - began)


def _metered(runner: Runner, batch: Any, seed: int, measured: Measured) -> int:
    """The true peak of one step; what the package predicted for it is noted beside it."""
    torch.manual_seed(seed)
    with meter_of(runner.case.device, runner.model, runner.optimizer, batch) as meter:
        runner.step(batch)
    if isinstance(runner, MimoseRunner):
        last = runner.mimose.records[-1]
        measured.sheltered_steps = (measured.sheltered_steps or 0) + last.sheltered
        # The meter sees the attempt that failed, too, of which nothing was predicted.
        if last.predicted_peak_bytes is not None and not last.retried:
            # On an accelerator the package counts what lies there besides, and the meter does not.
            besides = last.resident_bytes - meter.resident_bytes if runner.case.device.type != "cpu" else 0
            measured.predictions.append((last.predicted_peak_bytes - besides, meter.peak_bytes))
    return meter.peak_bytes


def _count(entry: Entry, work: Work, progress: Progress) -> None:
    """Count the operations of one more epoch."""
    runner = entry.runner
    if runner is None or not runner.counts_flops:
        return
    total = 0
    for index, batch in enumerate(work.batches):
        torch.manual_seed(index)
        try:
            with runner.present(capped=False), FlopCounterMode(display=False) as counter:
                runner.step(batch)
        except Exception as error:  # counting runs other kernels than training: what they need refuses nobody
            runner.notes.append(f"Its operations were not counted: {say(error)[:200]}")
            return
        total += int(counter.get_total_flops())
        progress.advance()
    entry.measured.operations = total


def _simulate(entry: Entry, raced: Raced, case: Case) -> None:
    """What is not run but worked out; plain steps are recorded for it once."""
    if "traces" not in case.shared:
        case.shared["traces"] = recordings(case.work, case.device)
    dtr_of(entry.measured, case.shared["traces"], entry.budget_bytes, raced.resident_bytes, raced.plain)


def _finish(entry: Entry) -> None:
    """Take what the runner knows about itself, and let go of it."""
    runner, measured = entry.runner, entry.measured
    if runner is None:
        return
    measured.notes, measured.ahead_seconds = list(runner.remarks()), runner.planning_seconds
    if isinstance(runner, MimoseRunner):
        planned = [record for record in runner.mimose.records if not record.sheltered]
        measured.cold_seconds = [record.planning_seconds for record in planned if not record.cache_hit]
        measured.cached_seconds = [record.planning_seconds for record in planned if record.cache_hit]
    _close(entry)


def _close(entry: Entry) -> None:
    runner, entry.runner = entry.runner, None
    if runner is not None:
        runner.close()


def _plain_peaks(work: Work, device: torch.device) -> tuple[list[int], int]:
    """Peaks of an epoch after a step that makes the optimizer's state, and what was resident.

    Raises:
        MimoseError: A step fails.
    """
    peaks, resident_bytes = [], 0
    try:
        runner = Runner(Case(work, device, 0, None, 0))
        runner.step(work.batches[0])
        for index, batch in enumerate(work.batches):
            torch.manual_seed(index)
            with meter_of(device, runner.model, runner.optimizer, batch) as meter:
                runner.step(batch)
            peaks.append(meter.peak_bytes)
            resident_bytes = max(resident_bytes, meter.resident_bytes)
    except MimoseError:
        raise
    except Exception as error:
        raise _no_plain_run(work, error) from error
    return peaks, resident_bytes
