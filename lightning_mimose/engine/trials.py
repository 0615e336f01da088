"""Which units a step may try an action on: nothing is planned that was not tried, and a trial takes memory."""

from __future__ import annotations

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.advise.room import room_to_try
from lightning_mimose.engine.step import Step
from lightning_mimose.sizes import BatchSize


class Trials:
    """Hands out trials to steps that have the room for them.

    Args:
        advisor: Knows the room, and what it may plan.
        session: Knows what was tried, and tries.
    """

    def __init__(self, advisor: Advisor, session: Session) -> None:
        self._advisor, self._session = advisor, session
        self._waiting: set[str] = set()
        self._looked: set[BatchSize] = set()
        self._last: tuple[set[str], int] = set(), 0

    def arm(self, step: Step) -> None:
        """Name the units that this step tries; of a step that is armed already."""
        advisor, session = self._advisor, self._session
        if session.news:  # what another rank refused for this very step
            self.limit_menu()
        waiting = self._waiting
        if session.tries or session.split_tries:
            session.tries, session.split_tries = set(), set()
        if not (waiting or session.unsplit) or step.retried or not self._is_news(step, waiting | session.unsplit):
            return
        if waiting:
            session.tries = waiting & room_to_try(advisor, step.size, step.resident, step.advice)
            session.armed = session.armed or bool(session.tries)
        if session.unsplit:
            room = room_to_try(advisor, step.size, step.resident, step.advice, split=True)
            session.split_tries = session.unsplit & advisor.shelter.keys() & room

    def _is_news(self, step: Step, waiting: set[str]) -> bool:
        """Whether the room was not looked at yet for a size, since the plans' choice or the budget last changed."""
        now = waiting, self._advisor.budget_bytes
        if now != self._last:
            self._last = now
            self._looked.clear()
        if step.advice.cache_hit and step.size in self._looked:
            return False
        self._looked.add(step.size)
        return True

    def disarm(self) -> None:
        """The step is over."""
        session = self._session
        if session.tries or session.split_tries:
            session.tries, session.split_tries = set(), set()
        if session.news:
            self.limit_menu()

    def limit_menu(self) -> None:
        """Plan no action that a unit was not tried with."""
        session, advisor = self._session, self._advisor
        session.news = False
        # Units that could be kept lean but for a trial: lean saves are surveyed in what the shelter recomputes.
        self._waiting = session.untried & advisor.shelter.keys()
        advisor.indivisible = session.indivisible
        advisor.limit(self._waiting, session.divisible)
