"""One job's lease: its turn to run, and what it may hold."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Literal, cast
from weakref import WeakSet

import torch

from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.baton import BATON, SLICE_SECONDS, Runner
from lightning_mimose.shared.broker import Broker
from lightning_mimose.shared.forks import in_child
from lightning_mimose.shared.refusals import no_room_error
from lightning_mimose.shared.stops import Route

IN_STEP_SLICES = 4
"""A step is only interrupted for another job's turn after so many slices: two steps half-way hold more than one."""
LONG_SECONDS = 0.2
"""Steps that take so long are worth interrupting: those after one notice their stops, whoever waits or does not."""
WATCHED_STEPS = 32
"""So many training steps notice their stops after a wait, after a long one and at first; else stops do not pay."""


class Lease:
    """What one job has of a shared budget, from joining to closing.

    Args:
        broker: Whom to ask.
        job: The job's name, one of its own.
        device: Where it trains.
        weight: Its weight.
        own_generators: Whether jobs of this process take turns, each with its own random generators.
        when_full: What to do where all jobs do not fit beside each other: wait until one leaves, or raise.

    Attributes:
        rest_bytes: What the job holds between its steps, as it said last.
        parts: What each of the job's models holds between its steps, in bytes; one that trains no more is taken out.
    """

    def __init__(
        self,
        broker: Broker,
        job: str,
        device: torch.device,
        *,
        weight: float,
        own_generators: bool,
        when_full: Literal["raise", "wait"],
    ) -> None:
        self.job, self.device = job, device
        self._broker, self._when_full = broker, when_full
        self._runner = Runner(job, device, weight) if own_generators else None
        self.rest_bytes = 0
        self.parts: dict[object, int] = {}
        self._reach = self._last = 0
        self._stepping = False
        self._watched = WATCHED_STEPS
        """How many more training steps notice their stops."""
        self._waited = False
        """Whether this or another job waited since the latest training step, as far as is known."""
        self._trains, self._began = True, 0.0
        """Whether the step is one of training, and when it began."""
        self._closing = threading.RLock()  # a signal's handler may close as well
        self._closed = False
        self.is_the_parents = False
        """Whether it came along when this process was forked, and so is none of this process."""
        _leases.add(self)
        try:
            broker.join(job, weight)
        except ValueError as error:
            raise SharedBudgetError(f"{error} Give this one another name.") from error
        self._place = broker.place(job)
        try:
            if self._runner is not None:
                BATON.enter(self._runner)
        except BaseException:
            self.close()
            raise

    @property
    def budget_bytes(self) -> int:
        """What all jobs together may hold."""
        return self._broker.budget_bytes

    @property
    def alone(self) -> bool:
        """Whether there is no other job."""
        return self._broker.alone(self.job)

    def close(self) -> None:
        """Give everything back; may be called twice, from any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._broker.leave(self.job)
        finally:
            if self._runner is not None:
                BATON.leave(self._runner)

    def leave_to_parent(self) -> None:
        """In a forked child: never touch what the parent goes on with."""
        self.is_the_parents = self._closed = True
        self._closing = threading.RLock()
        self._stepping, self._runner = False, None
        self._broker = cast("Broker", _Elsewhere(self.job))

    # --- between steps ----------------------------------------------------------------------------------------

    def build(self) -> None:
        """Wait for all the room there is: a model of unknown size is built."""
        if not self._broker.build(self.job).reach:
            while not self._wait():
                if self._broker.build(self.job).reach:
                    return

    def settle(self, rest_bytes: int) -> None:
        """Say what the job holds between steps; waits for steps of others that cannot go on beside it.

        Raises:
            SharedBudgetError: It does not fit beside the others, or not at all.
        """
        self._stepping = False
        granted = 0
        while not granted:
            verdict = self._broker.settle(self.job, rest_bytes)
            if verdict.refused or (verdict.full and self._when_full == "raise"):
                others = {} if verdict.refused else self._broker.others(self.job)
                raise no_room_error(self.job, rest_bytes, self.budget_bytes, others)
            if verdict.full:
                verdict = self._broker.settle(self.job, rest_bytes, patient=True)
            granted = verdict.reach or self._wait()
        self.rest_bytes = rest_bytes

    def plan_bytes(self, least_bytes: int = 0, wants_bytes: int = 0) -> int:
        """What the next step may be planned with; see `Counter.plan_bytes`."""
        return self._broker.plan_bytes(self.job, least_bytes, wants_bytes)

    def room_bytes(self) -> int:
        """What a step may take at most, while the others are at rest."""
        return self._broker.room_bytes(self.job)

    def aside(self, part: object) -> int:
        """What the job's other models hold between their steps, in bytes."""
        return sum(tuple(self.parts.values())) - self.parts.get(part, 0)

    def turn(self, slices: int = 1) -> None:
        """Let another job run, if one waits and this one has had so many slices."""
        if BATON.queue and self._runner is not None and BATON.held_seconds >= self._least_seconds(slices):
            BATON.give(self._runner)
            BATON.take(self._runner)

    def _least_seconds(self, slices: int) -> float:
        """How long this job keeps its turn at least."""
        # On an accelerator what was launched runs on while another job launches.
        return slices * SLICE_SECONDS if self.device.type == "cpu" else 0.0

    # --- a step -----------------------------------------------------------------------------------------------

    def begin(self, route: Route, rest_bytes: int, *, trains: bool = True) -> bool:
        """Wait until a step may begin.

        Args:
            route: Where it may stop, and what it needs.
            rest_bytes: What the job holds when it has ended.
            trains: Whether it is a training step; an evaluation batch says nothing about how long those take.

        Returns:
            False if there is no such room any more: plan anew, with `plan_bytes`.
        """
        self.turn()
        claim = route.claim
        if self._broker.resume(self.job, claim, rest_bytes):
            self._reach = len(claim)
        else:
            verdict = self._broker.begin(self.job, claim, rest_bytes)
            if verdict.refused:
                return False
            self._waited = self._waited or verdict.reach < len(claim)
            self._reach = verdict.reach or self._wait()
        self._last = len(claim) - 1
        self._stepping = self._reach > 0
        if self._stepping:
            self.rest_bytes = rest_bytes
            self._trains, self._began = trains, time.monotonic()
        return self._stepping

    @property
    def watches(self) -> bool:
        """Whether the step that begins is to notice its stops: there was a wait lately, or a step that took long.

        One that does not was granted all of itself, and others wait for its end at most.
        """
        # On an accelerator threads hand over at every stop.
        eager = self._runner is not None and self.device.type != "cpu"
        return eager or self._watched > 0 or self._waited or self._others_waited

    @property
    def _others_waited(self) -> bool:
        """Whether another job waits, for memory or its turn, or did so for memory since the latest step."""
        return self._place.waited or (self._runner is not None and bool(BATON.queue))

    def arrive(self, stretch: int, *, wait: bool = True) -> None:
        """Come to the beginning of a stretch; waits until it is granted.

        Args:
            stretch: Its number; earlier ones than the present are left alone.
            wait: Whether this thread may wait here.
        """
        place = self._place
        if not self._stepping or stretch <= place.at:
            return
        if stretch > self._last:
            stretch = self._last
        place.at = stretch
        if place.wanted or self._reach <= stretch:
            while self._reach <= stretch and wait:
                self._broker.advance(self.job, stretch)
                self._reach = self._broker.ask(self.job).reach or self._wait() or self._reach
            self._broker.advance(self.job, stretch)
        if BATON.queue and wait:
            self.turn(IN_STEP_SLICES)

    def all_ahead(self) -> None:
        """Wait until the whole rest of the step is granted, for it cannot stop any more."""
        while self._stepping and self._reach <= self._last:
            self._reach = self._broker.ask(self.job).reach or self._wait() or self._reach

    def update(self) -> None:
        """Backward is done."""
        self.arrive(self._last)

    def end(self) -> None:
        """The step is over, or given up."""
        if self._stepping:
            self._stepping = False
            self._waited = self._waited or self._others_waited
            if self._trains:
                watch = self._waited or time.monotonic() - self._began >= LONG_SECONDS
                self._watched = WATCHED_STEPS if watch else max(0, self._watched - 1)
                self._waited = False
            self._broker.end(self.job)

    def beside(self) -> str:
        """What other jobs hold, in words; empty if there are none."""
        others = self._broker.others(self.job)
        if not others:
            return ""
        return (
            f" (of the {format_bytes(self.budget_bytes)} that {len(others) + 1} jobs share, the others hold "
            f"{format_bytes(sum(others.values()))} between their steps)"
        )

    def _wait(self) -> int:
        """Let others run until what was asked for is granted."""
        if self._runner is not None:
            BATON.give(self._runner)
        try:
            return self._broker.wait(self.job)
        except BaseException:
            self._broker.end(self.job)
            self._stepping = False
            raise
        finally:
            if self._runner is not None:
                BATON.take(self._runner)


class _Elsewhere:
    """In place of the broker of a job that lives in another process."""

    def __init__(self, job: str) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        raise SharedBudgetError(
            f"Job {self._job!r} is that of the process that process {os.getpid()} was forked from; it cannot train in "
            'both. Begin the training in the child: SharedBudget.connect("name", "16GB") there, and a job of its own.'
        )


_leases: WeakSet[Lease] = WeakSet()


def _after_fork() -> None:
    for lease in list(_leases):
        lease.leave_to_parent()


in_child(_after_fork)
