"""What DTR would have done: its simulator, run on recorded operations of plain steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from lightning_mimose.bench.dtr import simulate
from lightning_mimose.bench.figures import Measured
from lightning_mimose.bench.runner import Case, Runner, synchronize
from lightning_mimose.bench.trace import Trace, record
from lightning_mimose.bench.work import Work

RECORDINGS = 3
"""How often every step is recorded: the times of its operations differ."""

NOTE = (
    "Simulated on recorded operations of plain steps: nothing of it ran. Its search for what to evict, kernels' "
    "scratch memory and the optimizer's update are left out, in its favour."
)


def recordings(work: Work, device: torch.device) -> tuple[list[list[Trace]], int]:
    """Recordings x steps: forward and backward of a plain model; and the bytes of its gradients."""
    runner = Runner(Case(work, device, 0, None, 0))
    found: list[list[Trace]] = []
    for recording in range(RECORDINGS + 1):
        epoch = []
        for seed, batch in enumerate(work.batches):
            runner.optimizer.zero_grad()
            torch.manual_seed(seed)
            epoch.append(record(lambda batch=batch: runner.loss(batch).backward(), partial(synchronize, device)))  # type: ignore[misc]
        if recording:  # the first pays for what torch sets up once
            found.append(epoch)
    return found, sum(p.nbytes for p in runner.model.parameters() if p.requires_grad)


def dtr_of(
    measured: Measured,
    recorded: tuple[Sequence[Sequence[Trace]], int],
    budget_bytes: int,
    resident_bytes: int,
    plain: Measured,
) -> None:
    """Fill in peaks, and times as multiples of the plain run's.

    Args:
        measured: What to fill in.
        recorded: From `recordings`.
        budget_bytes: What a step may reach.
        resident_bytes: What a plain step finds resident, old gradients among it; a step of DTR's begins without those.
        plain: The plain run.
    """
    epochs, gradient_bytes = recorded
    there_bytes = resident_bytes - gradient_bytes
    plain_seconds = [median(step) for step in zip(*plain.seconds, strict=True)]
    too_large = set()
    for epoch in epochs:
        done = [simulate(trace, budget_bytes - there_bytes) for trace in epoch]
        too_large |= {index for index, step in enumerate(done) if not step.fits}
        measured.peaks_bytes.append([there_bytes + step.peak_bytes for step in done])
        measured.seconds.append(
            [
                seconds * (1 + step.added_seconds / trace.seconds)
                for seconds, step, trace in zip(plain_seconds, done, epoch, strict=True)
            ]
        )
    measured.notes = [NOTE]
    if too_large:
        measured.status = "refused"
        measured.why = f"{len(too_large)} of {len(epochs[0])} batches do not fit, whatever it evicts."
