"""The bank: who may hold how much, so that no order of grants deadlocks or exceeds the budget.

Every job says before a step what it will need in each stretch of it (`Claim`). The bank grants stretches, as far ahead
as is *safe*: there must be an order in which every step under way can be run to its end, each with what is free by
then (the banker's algorithm, for one resource). A step that is past its peak has a smaller remaining claim, and what
that frees lets others rise: their peaks interleave.

What a job holds between its steps is its *rest*: parameters, gradients, optimizer state, batch. It never goes away, so
a step may need at most the budget without the rests of the others: the job's *room*.

Waiting jobs are served in the order of `FairClock`. No step begins before that of a job that stands before it and has
to wait; steps under way go on. They end, then, and the first in the row is served: nobody starves.
"""

from __future__ import annotations

from dataclasses import replace

from .account import Account, Verdict
from .claim import Claim
from .fair import FairClock
from .safety import furthest, is_safe, state_of
from .shares import Wish, fair_shares


class Bank:
    """Grants bytes to jobs.

    Args:
        budget_bytes: What all of them together may hold.

    Example:
        >>> bank = Bank(100)
        >>> for job in ("a", "b"):
        ...     bank.join(job)
        ...     assert bank.settle(job, rest_bytes=10).reach
        >>> bank.begin("a", Claim.of([40, 80, 30]), 10, now=0.0).reach
        3
        >>> bank.begin("b", Claim.of([20, 80, 30]), 10, now=0.0).reach  # 80 and 20 fit, 80 and 80 do not
        1
        >>> bank.advance("a", 2)  # a is past its peak
        >>> bank.ask("b", now=1.0).reach, bank.poll(now=1.0)
        (0, {})
        >>> bank.end("a", now=2.0)
        >>> bank.poll(now=2.0)
        {'b': 3}
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.accounts: dict[str, Account] = {}
        self._clock = FairClock()
        self._waiting: list[str] = []

    # --- coming and going -------------------------------------------------------------------------------------

    def join(self, job: str, weight: float = 1.0) -> None:
        """Open an account with nothing in it.

        Raises:
            ValueError: There is one of that name, or the weight is not a positive number.
        """
        if job in self.accounts:
            raise ValueError(f"There is a job {job!r} already.")
        self._clock.join(job, weight)
        self.accounts[job] = Account(0, weight)

    def leave(self, job: str) -> None:
        """Close an account, whatever is in it; all it held is free at once."""
        self.accounts.pop(job, None)
        self._clock.leave(job)
        self._stop_waiting(job)

    def settle(self, job: str, rest_bytes: int, least_bytes: int = 0, *, patient: bool = False) -> Verdict:
        """Say what a job holds between steps, outside of any; a step under way ends with it.

        Args:
            job: The job.
            rest_bytes: What it holds from now on.
            least_bytes: The least that one of its steps needs, where that is known.
            patient: Whether it waits for others to leave, where not all fit beside each other.

        Returns:
            Refused if it exceeds the budget alone; `reach` 0 if it has to wait until others have left or finished.
        """
        account = self.accounts[job]
        room = self.room_bytes(job)
        if max(rest_bytes, least_bytes) > self.budget_bytes:
            return Verdict(0, room, refused=True)
        account.least_bytes = max(least_bytes, account.least_bytes)
        # What it built is there, whether it may stay or not: no other step is under way, and none waits for this one.
        account.claim, account.builds, account.patient = None, False, patient
        full = not self._floors_fit(job, rest_bytes)
        return replace(self._answer(job, (None, rest_bytes)), full=full)

    def build(self, job: str, now: float) -> Verdict:
        """Ask for all the room there is, to build a model of unknown size; `settle` ends it.

        No other step runs meanwhile: none could be sure of its room.
        """
        account = self.accounts[job]
        account.builds, account.began = True, now
        return self._answer(job, (Claim.of([self.room_bytes(job)]), 0))

    # --- one step ---------------------------------------------------------------------------------------------

    def begin(self, job: str, claim: Claim, rest_bytes: int, now: float) -> Verdict:
        """Ask for a step.

        Args:
            job: The job.
            claim: What the step needs.
            rest_bytes: What the job will hold when it has ended.
            now: The time in seconds.

        Returns:
            How far it may run; `reach` 0 if it has to wait, refused if it can never run beside what others hold.
        """
        account = self.accounts[job]
        if max(claim.peak_bytes, rest_bytes) > self.room_bytes(job):
            return Verdict(0, self.room_bytes(job), refused=True)
        account.began = now
        return self._answer(job, (claim, rest_bytes))

    def ask(self, job: str, now: float) -> Verdict:
        """Ask for more of a step that has come to the end of what was granted."""
        account = self.accounts[job]
        return self._answer(job, (account.claim, account.rest_bytes))

    def advance(self, job: str, at: int) -> None:
        """A step has come to a boundary; what lies behind it is no longer held."""
        account = self.accounts[job]
        account.at = max(account.at, min(at, account.reach - 1))

    def whole_step(self, job: str) -> tuple[int, int] | None:
        """The peak of a job's step and its rest, if it was granted all of it and is counted as holding all of it."""
        account = self.accounts[job]
        claim = account.claim
        if claim is None or account.at > 0 or account.reach < len(claim):
            return None
        return claim.peak_bytes, account.rest_bytes

    def replace(self, job: str, claim: Claim, now: float) -> None:
        """Another step of a job has begun on what it was granted for an earlier one.

        Raises:
            ValueError: It needs more than that one did.
        """
        account, granted = self.accounts[job], self.whole_step(job)
        if granted is None or claim.peak_bytes > granted[0]:
            raise ValueError(f"{job!r} was not granted {claim.peak_bytes} bytes")
        self.count(job, now, charged=True)
        self._clock.serve(job)
        account.claim, account.reach = claim, len(claim)

    def count(self, job: str, now: float, *, charged: bool) -> None:
        """Count the time of a job's step anew from here.

        Args:
            job: The job.
            now: The time in seconds.
            charged: Whether its time until now is charged; not if nobody waited, for then it was at nobody's cost.
        """
        account = self.accounts[job]
        if charged and account.claim is not None:
            self._clock.charge(job, now - account.began)
        account.began = now

    def end(self, job: str, now: float) -> None:
        """A step is over, or given up."""
        account = self.accounts[job]
        if account.claim is not None:
            self._clock.charge(job, now - account.began)
        account.claim, account.at, account.reach, account.builds = None, 0, 0, False
        self._stop_waiting(job)

    def poll(self, now: float) -> dict[str, int]:
        """Grant what waiting jobs can have by now; call it after anything was given back.

        Returns:
            Job -> how far it may run, for those that need not wait any more; 0 for one that must ask anew, since its
            claim has become larger than its room, or it does not fit beside the others any more.
        """
        granted: dict[str, int] = {}
        barred = False
        for job in sorted(self._waiting, key=self._clock.tag):
            account = self.accounts[job]
            beginning = account.claim is None
            if account.asks is None or (barred and beginning):
                continue
            claim, rest_bytes = account.asks
            reach = self._grant(job, claim, rest_bytes)
            if claim is None:
                outgrown = not account.patient and not self._floors_fit(job, rest_bytes)
            else:
                outgrown = beginning and max(claim.peak_bytes, rest_bytes) > self.room_bytes(job)
            if reach or outgrown:
                granted[job] = reach
                account.began = now if beginning else account.began
            else:
                barred = barred or self._bars(job)
        for job in granted:
            self._stop_waiting(job)
        return granted

    # --- asking -----------------------------------------------------------------------------------------------

    def room_bytes(self, job: str) -> int:
        """What a step of a job may need at most."""
        return self.budget_bytes - sum(a.rest_bytes for name, a in self.accounts.items() if name != job)

    def share_bytes(self, job: str) -> int:
        """What a job may plan with so that nobody has to wait; its room where there is no such share.

        See `shares.fair_shares`.
        """
        names = list(self.accounts)
        wishes = [Wish(a.rest_bytes, a.least_bytes, a.wants_bytes, a.weight) for a in self.accounts.values()]
        shares = fair_shares(self.budget_bytes, wishes)
        return self.room_bytes(job) if shares is None else shares[names.index(job)]

    @property
    def held_bytes(self) -> int:
        """What all jobs together may hold at this moment."""
        return sum(account.state[0] for account in self.accounts.values())

    @property
    def waiting(self) -> tuple[str, ...]:
        """The jobs that wait, in the order in which they are served."""
        return tuple(sorted(self._waiting, key=self._clock.tag)) if self._waiting else ()

    def is_safe(self) -> bool:
        """Whether every step under way can be run to its end, in some order."""
        return is_safe(self.budget_bytes, (account.state for account in self.accounts.values()))

    # --- deciding ---------------------------------------------------------------------------------------------

    def _answer(self, job: str, asks: tuple[Claim | None, int]) -> Verdict:
        account = self.accounts[job]
        mine = self._clock.tag(job)
        barred = account.claim is None and any(
            other != job and self._clock.tag(other) <= mine and self._bars(other) for other in self._waiting
        )
        reach = 0 if barred else self._grant(job, *asks)
        if reach:
            self._stop_waiting(job)
        else:
            account.asks = asks
            if job not in self._waiting:
                self._waiting.append(job)
        return Verdict(reach, self.room_bytes(job))

    def _bars(self, job: str) -> bool:
        """Whether no step may begin before a waiting job is served; not if it waits for another job to leave."""
        account = self.accounts[job]
        claim, rest_bytes = account.asks or (None, account.rest_bytes)
        return claim is not None or self._floors_fit(job, rest_bytes)

    def _floors_fit(self, job: str, rest_bytes: int) -> bool:
        """Whether every job's smallest step fits beside what the others hold at rest, this one's being as given."""
        resting, most = rest_bytes, max(0, self.accounts[job].least_bytes - rest_bytes)
        for name, account in self.accounts.items():
            if name != job:
                resting += account.rest_bytes
                most = max(most, account.least_bytes - account.rest_bytes)
        return resting + most <= self.budget_bytes

    def _stop_waiting(self, job: str) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self.accounts:
            self.accounts[job].asks = None

    def _grant(self, job: str, claim: Claim | None, rest_bytes: int) -> int:
        """Grant as much as is safe, and at least one stretch; 0 if that is not."""
        account = self.accounts[job]
        others = [a.state for name, a in self.accounts.items() if name != job]
        if claim is None:
            if not self._floors_fit(job, rest_bytes) or not is_safe(
                self.budget_bytes, [*others, state_of(None, 0, 0, rest_bytes)]
            ):
                return 0
            account.claim, account.at, account.reach, account.rest_bytes = None, 0, 0, rest_bytes
            return 1
        beginning = account.claim is None
        if beginning and any(
            (a.claim is not None) if account.builds else (a.builds and a.claim is not None)
            for name, a in self.accounts.items()
            if name != job
        ):
            return 0
        at, before = (0, 0) if beginning else (account.at, account.reach)
        granted = furthest(self.budget_bytes, others, claim, at, before, rest_bytes)
        if granted == before < len(claim):
            return 0
        if beginning:
            self._clock.serve(job)
        account.claim, account.at, account.reach, account.rest_bytes = claim, at, granted, rest_bytes
        return granted
