"""Who a job asks for memory: the counter of its own process, or the coordinator of several."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_mimose.shared.bank import Verdict
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.counter import Counter


class Place(Protocol):
    """Where a job's step is; the job writes it at every stop, and asks nobody.

    Attributes:
        at: The stretch that it is in.
        wanted: Whether another job waits, so that `Broker.advance` has to be told.
    """

    at: int
    wanted: bool


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
class _Stretch:
    at: int = 0
    wanted: bool = False


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
        self._places: dict[str, _Stretch] = {}
        """Of each job; the counter is told where they are when somebody wants to know."""
        self._kept: set[str] = set()
        """Jobs whose step has ended; the counter is told, too, when somebody wants to know."""

    def join(self, job: str, weight: float) -> None:
        """Open an account."""
        with self._changed:
            self._counter.join(job, weight)
            self._places[job] = _Stretch()

    def place(self, job: str) -> Place:
        """Where the job's steps are noted."""
        return self._places[job]

    def leave(self, job: str) -> None:
        """Close it."""
        with self._changed:
            self._places.pop(job, None)
            self._kept.discard(job)
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

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """Ask for a step."""
        with self._changed:
            self._places[job].at = 0
            if job in self._kept and self._counter.bank.covers(job, claim, rest_bytes):
                self._kept.discard(job)
                self._counter.count(job, charged=False)  # it kept what nobody waited for
                self._counter.replace(job, claim)
                return Verdict(len(claim), self.budget_bytes)
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
            self._places[job].at = at
            self._catch_up()
            self._tell()

    def end(self, job: str) -> None:
        """The step is over."""
        with self._changed:
            place = self._places.get(job)
            if place is not None:
                place.at = 0
                if not place.wanted and self._counter.bank.has_whole_step(job):
                    self._counter.count(job, charged=True)
                    self._kept.add(job)
                    return
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
            self._catch_up()
            self._tell()
            return self._counter.ledger.to_dict()

    def _catch_up(self) -> None:
        while self._kept:
            job = self._kept.pop()
            self._counter.count(job, charged=False)
            self._counter.end(job)
        for job, place in self._places.items():
            self._counter.advance(job, place.at)

    def _tell(self) -> None:
        waits = bool(self._counter.bank.waiting)
        for place in self._places.values():
            place.wanted = waits
        if self._counter.answers:
            self._changed.notify_all()
