"""The counter: a bank with a clock and a ledger, which says to whom something was granted meanwhile.

Jobs of one process share one in that process; those of several share one in the coordinator.
"""

from __future__ import annotations

import time

from .account import Verdict
from .bank import Bank
from .claim import Claim
from .ledger import Ledger


class Counter:
    """Serves requests, one at a time; callers see to that.

    Args:
        budget_bytes: What all jobs together may hold.

    Attributes:
        answers: Job -> how far it may run, for jobs that had to wait and need not any more (0: ask anew, for less).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.bank = Bank(budget_bytes)
        self.ledger = Ledger()
        self.answers: dict[str, int] = {}

    def join(self, job: str, weight: float = 1.0) -> None:
        """See `Bank.join`."""
        self.bank.join(job, weight)

    def settle(self, job: str, rest_bytes: int, least_bytes: int = 0, *, patient: bool = False) -> Verdict:
        """See `Bank.settle`."""
        self.answers.pop(job, None)
        verdict = self._noted(job, self.bank.settle(job, rest_bytes, least_bytes, patient=patient))
        self._serve()
        return verdict

    def build(self, job: str) -> Verdict:
        """See `Bank.build`."""
        self.answers.pop(job, None)
        return self._noted(job, self.bank.build(job, time.time()))

    def restore(self, job: str, rest_bytes: int, least_bytes: int, claim: Claim | None, at: int, reach: int) -> None:
        """Take over what another counter had granted."""
        account = self.bank.accounts[job]
        account.rest_bytes, account.least_bytes = rest_bytes, least_bytes
        account.claim, account.at, account.reach, account.began = claim, at, reach, time.time()
        self._note(time.time())

    def begin(self, job: str, claim: Claim, rest_bytes: int) -> Verdict:
        """See `Bank.begin`."""
        self.answers.pop(job, None)
        return self._noted(job, self.bank.begin(job, claim, rest_bytes, time.time()))

    def ask(self, job: str) -> Verdict:
        """See `Bank.ask`."""
        return self._noted(job, self.bank.ask(job, time.time()))

    def advance(self, job: str, at: int) -> None:
        """See `Bank.advance`."""
        self.bank.advance(job, at)
        if self.bank.waiting:  # nobody asks otherwise, and a step has many stops
            self._note(time.time())
            self._serve()

    def replace(self, job: str, claim: Claim) -> None:
        """See `Bank.replace`."""
        self.bank.replace(job, claim, time.time())
        self._serve()

    def count(self, job: str, *, charged: bool) -> None:
        """See `Bank.count`."""
        self.bank.count(job, time.time(), charged=charged)

    def end(self, job: str) -> None:
        """See `Bank.end`."""
        now = time.time()
        self.answers.pop(job, None)
        self.bank.end(job, now)
        self.ledger.waits_no_more(now, job)
        self._note(now)
        self._serve()

    def leave(self, job: str) -> None:
        """See `Bank.leave`."""
        self.answers.pop(job, None)
        self.bank.leave(job)
        self.ledger.gone(time.time(), job)
        self._serve()

    def wish(self, job: str, least_bytes: int, wants_bytes: int) -> None:
        """Say what a job's next step needs at least, and what it would take if it saved nothing."""
        account = self.bank.accounts[job]
        account.least_bytes = max(account.least_bytes, least_bytes)
        account.wants_bytes = wants_bytes

    def plan_bytes(self, job: str, *, together: bool) -> int:
        """What a job may plan its next step with.

        Args:
            job: The job.
            together: Whether jobs compute at the same time, so that waiting costs more than saving memory.
        """
        room = self.bank.room_bytes(job)
        return min(room, self.bank.share_bytes(job)) if together else room

    def give_all(self, job: str) -> bool:
        """Give the whole budget to a job that is alone, and between two steps; it then need not ask.

        Returns:
            Whether it has it.
        """
        account = self.bank.accounts[job]
        if not self.alone(job) or account.claim is not None or account.asks is not None or not account.rest_bytes:
            return False
        self.restore(job, account.rest_bytes, account.least_bytes, Claim.of([self.bank.budget_bytes]), 0, 1)
        return True

    def take_back(self, job: str, rest_bytes: int, least_bytes: int) -> None:
        """A job gives back what `give_all` gave it; what it holds at rest, and needs at least, may have grown."""
        account = self.bank.accounts[job]
        account.rest_bytes, account.least_bytes = rest_bytes, max(least_bytes, account.least_bytes)
        self.count(job, charged=False)  # or newcomers would be served first for as long as it was alone
        self.end(job)

    def others(self, job: str) -> dict[str, int]:
        """Other job -> bytes that it holds at rest."""
        return {name: account.rest_bytes for name, account in self.bank.accounts.items() if name != job}

    def alone(self, job: str) -> bool:
        """Whether there is no other job."""
        return len(self.bank.accounts) == 1 and job in self.bank.accounts

    def _noted(self, job: str, verdict: Verdict) -> Verdict:
        now = time.time()
        if verdict.reach:
            self._note(now)
        elif not verdict.refused:
            self.ledger.waits_from(now, job)
        return verdict

    def _note(self, now: float) -> None:
        # All of them: that a step gave something back on its way is only noted when it matters.
        self.ledger.note({job: account.state[0] for job, account in self.bank.accounts.items()}, now)

    def _serve(self) -> None:
        if not self.bank.waiting:
            return
        now = time.time()
        for job, reach in self.bank.poll(now).items():
            self.answers[job] = reach
            self.ledger.waits_no_more(now, job)
            self._note(now)
