"""What the bank knows about one job, and what it answers it."""

from __future__ import annotations

from dataclasses import dataclass

from .claim import Claim
from .safety import State, state_of


@dataclass
class Account:
    """One job.

    Attributes:
        rest_bytes: What it holds between steps.
        weight: Its weight.
        least_bytes: The smallest peak that its largest batch can be brought down to, as far as is known.
        wants_bytes: The peak that it would have if it saved nothing, as far as is known.
        claim: What the step under way needs; None between steps.
        at: The stretch it is in.
        reach: The first stretch that was not granted.
        asks: What it waits for: a claim and the rest that goes with it; for more of its present claim, that.
        began: When its step began, in seconds.
        patient: Whether it waits for others to leave, if need be.
        builds: Whether it builds its model, so that nobody knows what it will hold at rest.
    """

    rest_bytes: int
    weight: float = 1.0
    least_bytes: int = 0
    wants_bytes: int = 0
    claim: Claim | None = None
    at: int = 0
    reach: int = 0
    asks: tuple[Claim | None, int] | None = None
    began: float = 0.0
    patient: bool = False
    builds: bool = False

    @property
    def state(self) -> State:
        """What it may hold at this moment, what it may come to hold before its step ends, and its rest, in bytes."""
        return state_of(self.claim, self.at, self.reach, self.rest_bytes)


@dataclass(frozen=True)
class Verdict:
    """An answer of the bank.

    Attributes:
        reach: The first stretch that is not granted; 0 where the job has to wait.
        room_bytes: What a step of the job may need at most, given what the others hold at rest.
        refused: Whether the claim, or the rest, exceeds that room, so that waiting would be in vain.
        full: Whether it has to wait until another job leaves, for all of them do not fit beside each other.
    """

    reach: int
    room_bytes: int
    refused: bool = False
    full: bool = False
