"""Who a job asks for memory: the counter of its own process, or the coordinator of several."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from lightning_mimose.shared.bank import Verdict
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.counter import Counter


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

    def settle(self, job: str, rest_bytes: int, *, patient: bool = False) -> Verdict:
        """Say what the job holds between steps."""

    def build(self, job: str) -> Verdict:
        """Ask for all the room there is, until `settle`."""

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


class LocalBroker:
    """For jobs in the threads of one process.

    Args:
        budget_bytes: What all jobs together may hold.
    """

    together = False

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._counter = Counter(budget_bytes)
        self._changed = threading.Condition()
        self._places: dict[str, int] = {}
        """Job -> the stretch that its step is in; the counter is told when somebody wants to know."""

    def join(self, job: str, weight: float) -> None:
        """Open an account."""
        with self._changed:
            self._counter.join(job, weight)

    def leave(self, job: str) -> None:
        """Close it."""
        with self._changed:
            self._places.pop(job, None)
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
            return self._counter.build(job)

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """Ask for a step."""
        with self._changed:
            self._catch_up()
            self._places[job] = 0
            return self._counter.begin(job, claim, rest_bytes)

    def ask(self, job: str) -> Verdict:
        """Ask for more of it."""
        with self._changed:
            self._catch_up()
            return self._counter.ask(job)

    def wait(self, job: str) -> int:
        """Wait for what was asked for."""
        with self._changed:
            self._changed.wait_for(lambda: job in self._counter.answers)
            return self._counter.answers.pop(job)

    def advance(self, job: str, at: int) -> None:
        """The step has come to a boundary."""
        self._places[job] = at
        if self._counter.bank.waiting:
            with self._changed:
                self._catch_up()

    def end(self, job: str) -> None:
        """The step is over."""
        with self._changed:
            self._places.pop(job, None)
            self._counter.end(job)
            self._tell()

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
            return self._counter.ledger.to_dict()

    def _catch_up(self) -> None:
        for job, at in self._places.items():
            self._counter.advance(job, at)
        self._tell()

    def _tell(self) -> None:
        if self._counter.answers:
            self._changed.notify_all()
