"""The broker for jobs in several processes: asks the coordinator."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.account import Verdict
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.link import Link
from lightning_mimose.shared.reach import ask_once, connect, raise_error
from lightning_mimose.shared.wire import VERSION, Meeting


class RemoteBroker:
    """For jobs in several processes.

    Args:
        meeting: Where they meet.
        budget_bytes: The budget; None for the one that is in force.
        device: The device, in words that are the same in all processes.

    Raises:
        SharedBudgetError: There is no such budget, it is another one, or the name is somebody else's.
    """

    together = True

    def __init__(self, meeting: Meeting, budget_bytes: int | None, device: str) -> None:
        self._meeting, self._device = meeting, device
        self._peek = {"version": VERSION, "budget": budget_bytes, "device": device}
        self.budget_bytes = int(self._ask_once("peek")["budget"])
        self._links: dict[str, Link] = {}
        self._wishes: dict[str, tuple[int, int]] = {}
        self._latest: dict[str, Any] = {"held": [], "waits": []}

    def join(self, job: str, weight: float) -> None:
        """Open an account."""
        self._links[job] = Link(self._meeting, job, weight, self.budget_bytes, self._device)

    def leave(self, job: str) -> None:
        """Close it."""
        link = self._links.pop(job, None)
        if link is None:
            return
        try:
            if not self._links:  # the coordinator, and what it knows, may be gone when a report is asked for
                with suppress(SharedBudgetError, OSError, subprocess.SubprocessError):
                    self._latest = self._ask_once("history")["history"]
        finally:
            link.close()

    def place(self, job: str) -> Link:
        """Where the job's steps are noted."""
        return self._links[job]

    def settle(self, job: str, rest_bytes: int, *, patient: bool = False) -> Verdict:
        """Say what the job holds between steps."""
        return Verdict(*self._links[job].request(op="settle", rest=rest_bytes, patient=patient))

    def build(self, job: str) -> Verdict:
        """Ask for all the room there is."""
        return Verdict(*self._links[job].request(op="build"))

    def resume(self, job: str, claim: Claim, rest_bytes: int) -> bool:
        """Begin a step on what an earlier one was granted, without asking; False if it must be asked for."""
        return self._links[job].resume(claim, rest_bytes)

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """Ask for a step."""
        link = self._links[job]
        verdict = Verdict(*link.request(claim, op="begin", needs=list(claim.needs), rest=rest_bytes))
        if verdict.refused:
            self._wishes.pop(job, None)  # what was said last is not true any more
        return verdict

    def ask(self, job: str) -> Verdict:
        """Ask for more of it."""
        return Verdict(*self._links[job].request(op="ask"))

    def wait(self, job: str) -> int:
        """Wait for what was asked for."""
        return self._links[job].wait()

    def advance(self, job: str, at: int) -> None:
        """The step has come to a boundary."""
        self._links[job].advance(at)

    def end(self, job: str) -> None:
        """The step is over."""
        self._links[job].end()

    def alone(self, job: str) -> bool:
        """Whether there is no other job, as far as was heard."""
        return self._links[job].alone

    def plan_bytes(self, job: str, least_bytes: int = 0, wants_bytes: int = 0) -> int:
        """What the job may plan its next step with."""
        link = self._links[job]
        link.needs_at_least(least_bytes)
        if link.alone:
            return self.budget_bytes
        told, wants = self._wishes.get(job, (0, 0)), wants_bytes or self.budget_bytes
        plan = link.plan
        # Others plan for the largest of its batches: a smaller one has nothing to say, and what it may have is heard
        # whenever it changes.
        if plan is None or least_bytes > min(told[0], plan[0]) or wants > told[1]:
            told = self._wishes[job] = (max(least_bytes, told[0]), max(wants, told[1]))
            found = link.request(op="plan", least=told[0], wants=told[1])
            plan = (int(found[0]), int(found[1]))
        return plan[0]

    def room_bytes(self, job: str) -> int:
        """What a step of the job may take at most."""
        if self._links[job].alone:
            return self.budget_bytes
        self._wishes.pop(job, None)
        return int(self._links[job].request(op="plan", least=0, wants=0)[1])

    def others(self, job: str) -> dict[str, int]:
        """Other job -> bytes that it holds at rest."""
        found: dict[str, int] = self._links[job].request(op="others")
        return found

    def history(self) -> dict[str, Any]:
        """The ledger, as plain data."""
        return dict(self._ask_once("history")["history"]) if self._links else self._latest

    def _ask_once(self, op: str) -> dict[str, Any]:
        """Ask over a connection of its own: those of the jobs are in use, one of them may be waiting."""
        while True:
            with connect(self._meeting) as connection:
                try:
                    said = ask_once(connection, {"op": op, **self._peek})
                except OSError:  # it was about to end
                    continue
            raise_error(said, self._meeting, self._peek)
            return said
