"""Who a job asks for memory: the counter of its own process, or the coordinator of several."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_mimose.shared.account import Verdict
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.counter import Counter


class Place(Protocol):
    """Where a job's step is; the job writes it at every stop, and asks nobody.

    Attributes:
        at: The stretch that it is in.
        wanted: Whether another job waits, so that `Broker.advance` has to be told.
        waited: Whether one waits, or did so since the latest step of this job ended.
    """

    at: int
    wanted: bool
    waited: bool


class Broker(Protocol):
    """What a job asks. Every answer comes at once; a job that is told to wait calls `wait`.

    Attributes:
        budget_bytes: What all jobs together may hold.
        together: Whether the jobs compute at the same time.
    """

    budget_bytes: int
    together: bool

    def join(self, job: str, weight: float) -> None:
        """Open an account."""

    def leave(self, job: str) -> None:
        """Close it; may be called twice."""

    def place(self, job: str) -> Place:
        """Where the job's steps are noted."""

    def settle(self, job: str, rest_bytes: int, *, patient: bool = False) -> Verdict:
        """Say what the job holds between steps."""

    def build(self, job: str) -> Verdict:
        """Ask for all the room there is, until `settle`."""

    def resume(self, job: str, claim: Claim, rest_bytes: int) -> bool:
        """Begin a step on what an earlier one was granted, without asking; False if it must be asked for."""

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """Ask for a step."""

    def ask(self, job: str) -> Verdict:
        """Ask for more of it."""

    def wait(self, job: str) -> int:
        """Wait for what was asked for; how far the job may run, 0 if it must ask anew, for less."""

    def advance(self, job: str, at: int) -> None:
        """The step has come to a boundary."""

    def end(self, job: str) -> None:
        """The step is over."""

    def alone(self, job: str) -> bool:
        """Whether there is no other job."""

    def plan_bytes(self, job: str, least_bytes: int = 0, wants_bytes: int = 0) -> int:
        """What the job may plan its next step with."""

    def room_bytes(self, job: str) -> int:
        """What a step of the job may take at most."""

    def others(self, job: str) -> dict[str, int]:
        """Other job -> bytes that it holds at rest."""

    def history(self) -> dict[str, Any]:
        """The ledger, as plain data."""


@dataclass
class _Step:
    """Where a job's step is, and on what it runs; the counter is told when somebody else wants to know.

    Attributes:
        at: See `Place`.
        wanted: See `Place`.
        waited: See `Place`.
        kept: What the counter goes on counting after the step that it was granted for: its peak, and what it rests on.
        claim: The step that runs on that; None between two.
    """

    at: int = 0
    wanted: bool = False
    waited: bool = False
    kept: tuple[int, int] | None = None
    claim: Claim | None = None


class LocalBroker:
    """For jobs in the threads of one process.

    Args:
        budget_bytes: What all jobs together may hold.
    """

    together = False

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._counter = Counter(budget_bytes)
        # Its lock lets the same thread through again: a signal's handler may report or close in the midst of anything.
        self._changed = threading.Condition()
        self._steps: dict[str, _Step] = {}

    def join(self, job: str, weight: float) -> None:
        """Open an account."""
        with self._changed:
            self._counter.join(job, weight)
            self._steps[job] = _Step()

    def place(self, job: str) -> Place:
        """Where the job's steps are noted."""
        return self._steps[job]

    def leave(self, job: str) -> None:
        """Close it."""
        with self._changed:
            self._steps.pop(job, None)
            self._counter.leave(job)
            self._tell()

    def settle(self, job: str, rest_bytes: int, *, patient: bool = False) -> Verdict:
        """Say what the job holds between steps."""
        with self._changed:
            self._catch_up()
            verdict = self._counter.settle(job, rest_bytes, patient=patient)
            self._tell()
            return verdict

    def build(self, job: str) -> Verdict:
        """Ask for all the room there is."""
        with self._changed:
            self._catch_up()
            verdict = self._counter.build(job)
            self._tell()
            return verdict

    def resume(self, job: str, claim: Claim, rest_bytes: int) -> bool:
        """Begin a step on what an earlier one was granted, without asking; False if it must be asked for."""
        with self._changed:
            step = self._steps[job]
            kept = step.kept
            if kept is None or claim.peak_bytes > kept[0] or rest_bytes > kept[1]:
                return False
            step.at, step.claim = 0, claim
            return True

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """Ask for a step."""
        with self._changed:
            self._steps[job].at = 0
            self._catch_up()
            verdict = self._counter.begin(job, claim, rest_bytes)
            self._tell()
            return verdict

    def ask(self, job: str) -> Verdict:
        """Ask for more of it."""
        with self._changed:
            self._catch_up()
            verdict = self._counter.ask(job)
            self._tell()
            return verdict

    def wait(self, job: str) -> int:
        """Wait for what was asked for."""
        with self._changed:
            self._changed.wait_for(lambda: job in self._counter.answers)
            return self._counter.answers.pop(job)

    def advance(self, job: str, at: int) -> None:
        """The step has come to a boundary."""
        with self._changed:
            self._steps[job].at = at
            self._catch_up()
            self._tell()

    def end(self, job: str) -> None:
        """The step is over."""
        with self._changed:
            step = self._steps.get(job)
            if step is None:
                return
            step.at, step.claim = 0, None
            if step.kept is None and not step.wanted:
                step.kept = self._counter.bank.whole_step(job)
            if step.kept is None:
                self._counter.count(job, charged=step.wanted)
                self._counter.end(job)
                self._tell()
            step.waited = step.wanted

    def alone(self, job: str) -> bool:
        """Whether there is no other job."""
        return self._counter.alone(job)

    def plan_bytes(self, job: str, least_bytes: int = 0, wants_bytes: int = 0) -> int:
        """What the job may plan its next step with."""
        with self._changed:
            self._counter.wish(job, least_bytes, wants_bytes)
            return self._counter.plan_bytes(job, together=self.together)

    def room_bytes(self, job: str) -> int:
        """What a step of the job may take at most."""
        with self._changed:
            return self._counter.bank.room_bytes(job)

    def others(self, job: str) -> dict[str, int]:
        """Other job -> bytes that it holds at rest."""
        with self._changed:
            return self._counter.others(job)

    def history(self) -> dict[str, Any]:
        """The ledger, as plain data."""
        with self._changed:
            self._catch_up()
            self._tell()
            return self._counter.ledger.to_dict()

    def _catch_up(self) -> None:
        """Tell the counter where everybody is: somebody asks, and what is needed no more is for others."""
        for job, step in self._steps.items():
            if step.kept is not None:
                step.kept = None
                self._counter.count(job, charged=False)  # until now it was at nobody's cost
                if step.claim is None:
                    self._counter.end(job)
                else:
                    self._counter.replace(job, step.claim)
            self._counter.advance(job, step.at)

    def _tell(self) -> None:
        waits = bool(self._counter.bank.waiting)
        for job, step in self._steps.items():
            if step.wanted != waits:
                step.wanted = waits
                step.waited = step.waited or waits
                self._counter.count(job, charged=not waits)
        if self._counter.answers:
            self._changed.notify_all()
