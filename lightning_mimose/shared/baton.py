"""The baton: which of the jobs in this process runs, and with it whose random generators are in force.

Torch has one generator per process and device, Python and NumPy have one per process. Two trainings in threads draw
from them in turns that no run repeats: with dropout they get other masks than alone, and a recomputed unit puts the
generator back under the other one's feet. So jobs of one process run one at a time. They hand over between
steps, and at unit boundaries in steps that notice their stops, never inside a unit that may draw; the generators change
with the owner.

What is lost is little: on a CPU one training uses all cores already (handing over takes about 0.1 ms, at most every
`SLICE_SECONDS` or when a job waits for memory), on an accelerator Python's part is done before the kernels are. To let
several trainings compute at once on a CPU, run them in processes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import torch

from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.fair import FairClock
from lightning_mimose.shared.forks import in_child
from lightning_mimose.shared.generators import Generators

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.2
"""How long a job on a CPU may run at least before another one's turn comes, unless it waits; caches are cold after."""
TELL_SECONDS = 60.0
"""How long a job waits for its turn before it says for whom."""


@dataclass(eq=False)
class Runner:
    """One job of this process.

    Attributes:
        name: Its name.
        device: Where it trains.
        weight: Its weight.
        thread: Its thread; a job whose thread has ended without leaving is taken for gone.
        generators: Its generators' state while it does not run; None before it first did.
    """

    name: str
    device: torch.device
    weight: float = 1.0
    thread: threading.Thread = field(default_factory=threading.current_thread)
    generators: Generators | None = None


class Baton:
    """Passes from job to job, fairly by weight.

    Attributes:
        queue: The jobs that wait for their turn.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all jobs."""
        self._changed = threading.Condition()
        self._clock = FairClock()
        self._owner: Runner | None = None
        self._latest: Runner | None = None
        self.queue: list[Runner] = []
        self._taken_at = 0.0

    @property
    def held_seconds(self) -> float:
        """How long the present owner has run."""
        return time.monotonic() - self._taken_at

    def enter(self, runner: Runner) -> None:
        """Let a job in, with the generators as they are now, and wait for its first turn."""
        runner.generators = Generators.now(runner.device)
        with self._changed:
            self._clock.join(_key(runner), runner.weight)
        self.take(runner)

    def take(self, runner: Runner) -> None:
        """Wait for a job's turn; returns at once if it has it."""
        with self._changed:
            if self._owner is runner:
                return
            if self._owner is not None and self._owner.thread is threading.current_thread():
                raise SharedBudgetError(
                    f"Job {runner.name!r} begins in a thread in which job {self._owner.name!r} has not ended, and "
                    "would wait for it for ever. Close that one first (mimose.close(), or leave its `with` block), or "
                    "train both as one: `with shared.job():` around them."
                )
            if self._owner is None:
                self._own(runner)
            else:
                self.queue.append(runner)
                try:
                    self._wait(runner)
                except BaseException:
                    if runner in self.queue:
                        self.queue.remove(runner)
                    if self._owner is runner:
                        self._pass_on()
                    raise
            if self._latest is not runner:
                # Put aside only now: a job that waits, and is next again, has nothing to pay.
                if self._latest is not None:
                    self._latest.generators = Generators.now(self._latest.device)
                if runner.generators is not None:
                    runner.generators.restore(runner.device)
                self._latest = runner

    def give(self, runner: Runner) -> None:
        """End a job's turn; does nothing if it has none."""
        with self._changed:
            if self._owner is runner:
                self._pass_on()

    def leave(self, runner: Runner) -> None:
        """A job is over."""
        with self._changed:
            if runner in self.queue:
                self.queue.remove(runner)
            if self._owner is runner:
                self._pass_on()
            if self._latest is runner:
                self._latest = None  # what its thread draws from now on is nobody's business
            self._clock.leave(_key(runner))

    def _own(self, runner: Runner) -> None:
        self._owner, self._taken_at = runner, time.monotonic()
        self._clock.serve(_key(runner))

    def _pass_on(self) -> None:
        assert self._owner is not None
        self._clock.charge(_key(self._owner), self.held_seconds)
        self._owner = None
        if self.queue:
            following = min(self.queue, key=lambda waiting: self._clock.tag(_key(waiting)))
            self.queue.remove(following)
            self._own(following)
            self._changed.notify_all()

    def _wait(self, runner: Runner) -> None:
        told = time.monotonic()
        while not self._changed.wait_for(lambda: self._owner is runner, timeout=1.0):
            owner = self._owner
            if owner is not None and not owner.thread.is_alive():
                log.warning("mimose: job %r ended without being closed; its turn passes on.", owner.name)
                self._pass_on()
            elif owner is not None and time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                log.warning(
                    "mimose: job %r has waited %.0f s for job %r, which runs in thread %r. If that one trains no more, "
                    "close it (mimose.close(), or leave its `with` block).",
                    runner.name,
                    TELL_SECONDS,
                    owner.name,
                    owner.thread.name,
                )


def _key(runner: Runner) -> str:
    return f"{runner.name}@{id(runner)}"


BATON = Baton()
"""One for the process, as the generators are."""
in_child(BATON.reset)
