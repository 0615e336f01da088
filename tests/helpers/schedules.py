"""Schedules at random: jobs that come, train and go over one bank, with whoever may run chosen by lot."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lightning_mimose.shared.bank import Bank
from lightning_mimose.shared.claim import Claim


@dataclass
class Training:
    """One job of a schedule."""

    name: str
    rest_bytes: int
    steps: int
    needs: list[int] = field(default_factory=list)
    at: int = 0
    reach: int = 0
    present: bool = False
    stepping: bool = False
    waiting: bool = False
    kept: bool = False
    waited: int = 0

    @property
    def true_bytes(self) -> int:
        """What it really holds now."""
        return (self.needs[self.at] if self.stepping else self.rest_bytes) if self.present else 0


@dataclass(frozen=True)
class Outcome:
    """What happened in a schedule."""

    budget_bytes: int
    highest_bytes: int
    jobs: int
    finished: int
    longest_wait: int


def simulate(lot: random.Random, jobs: int, most_steps: int = 5) -> Outcome:
    """Run one schedule to its end.

    Raises:
        AssertionError: Nobody can run though some are not done (a deadlock), somebody waits for ever, or the bank's
            state is not safe.
    """
    budget = lot.randint(50, 1000)
    bank = Bank(budget)
    trainings = [
        Training(f"job{i}", lot.randint(0, budget // (jobs + 1)), lot.randint(1, most_steps)) for i in range(jobs)
    ]
    highest = longest = ticks = finished = 0
    most = max(1, jobs) * most_steps * 80
    while finished < jobs:
        ticks += 1
        assert ticks < most * jobs, "the schedule does not come to an end"
        runnable = [t for t in trainings if t.steps and not t.waiting]
        assert runnable, "deadlock: everybody waits"
        training = lot.choice(runnable)
        _move(bank, training, lot, float(ticks))
        if not training.steps:
            finished += 1
        for name, reach in bank.poll(float(ticks)).items():
            _grant(next(t for t in trainings if t.name == name), reach)
        assert bank.is_safe()
        assert bank.held_bytes <= budget
        true = sum(t.true_bytes for t in trainings)
        assert true <= bank.held_bytes
        highest = max(highest, true)
        for other in trainings:
            other.waited = other.waited + 1 if other.waiting else 0
            longest = max(longest, other.waited)
        # While one waits each other one makes at most the step that it is in, and its turns by weight before.
        assert longest < most, "somebody waits for ever"
    return Outcome(budget, highest, jobs, finished, longest)


def _move(bank: Bank, training: Training, lot: random.Random, now: float) -> None:
    if not training.present:
        if training.name not in bank.accounts:
            bank.join(training.name, lot.choice((0.5, 1.0, 4.0)))
        verdict = bank.settle(training.name, training.rest_bytes)
        assert not verdict.refused
        training.present, training.waiting = bool(verdict.reach), not verdict.reach
    elif not training.stepping:
        if lot.random() < 0.2:  # another batch size: what it holds between steps changes with it
            training.rest_bytes = max(0, min(training.rest_bytes, training.rest_bytes - lot.randint(0, 5)))
        room = bank.room_bytes(training.name)
        low = training.rest_bytes
        training.needs = [lot.randint(low, room) for _ in range(lot.randint(1, 12))]
        claim = Claim.of(training.needs)
        if training.kept:  # what an earlier step was granted
            training.kept = False
            granted = bank.whole_step(training.name)
            covered = granted is not None and claim.peak_bytes <= granted[0] and training.rest_bytes <= granted[1]
            if not bank.waiting and covered:
                bank.replace(training.name, claim, now)
                _grant(training, len(claim))
                return
            bank.end(training.name, now)
        verdict = bank.begin(training.name, claim, training.rest_bytes, now)
        assert not verdict.refused
        training.waiting = not verdict.reach
        if verdict.reach:
            _grant(training, verdict.reach)
    elif lot.random() < 0.03:  # killed, in the middle of it
        bank.leave(training.name)
        training.present, training.steps = False, 0
    elif training.at + 1 == len(training.needs):
        training.stepping, training.at, training.reach = False, 0, 0
        training.steps -= 1
        training.kept = training.steps > 0 and not bank.waiting and bank.whole_step(training.name) is not None
        if not training.kept:
            bank.end(training.name, now)
        if not training.steps:
            bank.leave(training.name)
            training.present = False
    elif training.at + 1 < training.reach:
        training.at += 1
        if bank.waiting or lot.random() < 0.1:  # nobody is told who does not wait
            bank.advance(training.name, training.at)
    else:
        verdict = bank.ask(training.name, now)
        training.waiting = not verdict.reach
        if verdict.reach:
            training.reach = verdict.reach


def _grant(training: Training, reach: int) -> None:
    training.waiting = False
    if not reach:
        return  # it has to ask again, for less
    if training.present and not training.stepping and training.needs:
        training.stepping, training.at = True, 0
    elif not training.present:
        training.present = True
        return
    training.reach = reach
