"""One job's side of the talk with the coordinator."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.claim import Claim
from lightning_mimose.shared.connection import Connection
from lightning_mimose.shared.forks import in_child
from lightning_mimose.shared.wire import Meeting

CALM_SECONDS = 1.0
"""How long nobody must have waited before a job keeps, from step to step, what it was granted."""


class Link:
    """What one job asks of the coordinator and is told; its thread hears what comes, and finds another if that dies.

    While nobody waits, it is not told that a step has ended: it goes on counting what that was granted, and a step that
    needs no more begins without asking. When somebody waits, it is told at once what of that is still needed.

    Attributes:
        at: The stretch that the step is in, written by the job.
        wanted: Whether another job waits.
        waited: Whether one waits, or did so since the latest step of this job ended.

    Args:
        meeting: Where.
        job: The job's name.
        weight: Its weight.
        budget_bytes: The budget.
        device: The device, in words that are the same in all processes.
    """

    def __init__(self, meeting: Meeting, job: str, weight: float, budget_bytes: int, device: str) -> None:
        self._meeting, self.job = meeting, job
        self._budget_bytes = budget_bytes
        # Its lock lets the same thread through again: a signal's handler may report or close in the midst of anything.
        self._changed = threading.Condition()
        self._pending: dict[str, Any] | None = None
        """What was asked and neither answered nor, if the answer was to wait, granted."""
        self._answer: Any = None
        self._number = 0
        """Of what was asked last: an answer to what an earlier coordinator was asked is none to this."""
        self._asked: Claim | None = None
        """The step that was asked for."""
        self._answered = False
        """Whether there was an answer: another one to the same is that of another coordinator."""
        self._granted: int | None = None
        self._failed: SharedBudgetError | None = None
        # What another coordinator would have to know.
        self._rest_bytes = self._least_bytes = 0
        self._claim: Claim | None = None
        self.at = self._reach = 0
        self.alone = self.wanted = self.waited = False
        self._wanted_at = -CALM_SECONDS
        """When somebody was last heard to begin, or to cease, to wait."""
        self._kept: tuple[int, int] | None = None
        """What the coordinator counts on after the step that it was granted for: its peak, and what it rests on."""
        self._advanced = False
        """Whether it was told where the present step is, and so counts less than its peak."""
        self.plan: tuple[int, int] | None = None
        """What the next step may be planned with, and its room, as of the last answer."""
        self._alone_in_step = False
        self._grant = 0
        """Which of the times that it was told to be alone was the latest."""
        self._connection = Connection(meeting, job, weight, budget_bytes, device)
        _links.add(self)
        self._reader = threading.Thread(target=self._hear, name=f"mimose-{job}", daemon=True)
        self._reader.start()

    # --- asking -----------------------------------------------------------------------------------------------

    def request(self, claim: Claim | None = None, **message: Any) -> Any:
        """Ask, and return the answer.

        Args:
            claim: Of the step that is asked for.
            message: What is said.

        Raises:
            SharedBudgetError: There is no coordinator, and none could be started.
        """
        with self._changed:
            self._number += 1
            message["n"] = self._number
            if message["op"] in ("begin", "build", "settle"):  # whatever step there was has ended
                self._alone_in_step, self._kept = False, None
            self._granted, self._answer, self._pending = None, None, message
            self._asked, self._answered = claim, False
            self._connection.say(message)
            self._changed.wait_for(lambda: self._answer is not None or self._failed is not None)
            if self._failed is not None:
                raise self._failed
            answer, self._answer = self._answer, None
            return answer

    def tell(self, **message: Any) -> None:
        """Say something that has no answer."""
        with self._changed:
            self._connection.say(message)

    def needs_at_least(self, least_bytes: int) -> None:
        """A step of this job needs so much under any plan."""
        with self._changed:
            self._least_bytes = max(least_bytes, self._least_bytes)

    def resume(self, claim: Claim, rest_bytes: int) -> bool:
        """Begin a step without asking: alone, or on what an earlier one was granted; False if it must be asked for."""
        with self._changed:
            if self.alone:
                self._alone_in_step, self._rest_bytes, self.at = True, rest_bytes, 0
                return True
            if self._kept is None or claim.peak_bytes > self._kept[0] or rest_bytes > self._kept[1]:
                return False
            self._claim, self.at, self._reach = claim, 0, len(claim)
            return True

    def advance(self, at: int) -> None:
        """The step has come to a boundary."""
        with self._changed:
            self.at = at
            if self._claim is not None and self.wanted:
                self._send_place()

    def end(self) -> None:
        """The step is over."""
        with self._changed:
            self._pending = self._granted = None
            if self._alone_in_step:
                self._alone_in_step = False
                if not self.alone:  # it was recalled meanwhile
                    self._give_back()
            elif self._kept is not None or self._may_keep():
                assert self._claim is not None
                self._kept = self._kept or (self._claim.peak_bytes, self._rest_bytes)
                self._claim = None
            else:
                self._claim = None
                self._connection.say({"op": "end"})
            self.waited = self.wanted

    def wait(self) -> int:
        """Wait for what was asked for."""
        with self._changed:
            self._changed.wait_for(lambda: self._granted is not None or self._failed is not None)
            if self._failed is not None:
                raise self._failed
            granted, self._granted = self._granted, None
            assert granted is not None
            return granted

    def close(self) -> None:
        """Give everything back."""
        with self._changed:
            if self._connection.closed:
                return
            self._connection.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5.0)

    def leave_to_parent(self) -> None:
        """In a forked child: let go of what would keep the parent's lease alive, and of nothing else."""
        self._connection.leave_to_parent()
        self.alone, self._changed = False, threading.Condition()
        self._failed = SharedBudgetError(f"Job {self.job!r} is that of the process that this one was forked from.")

    # --- hearing ----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            self._connection.hear(self._heard, self._come_back)
        except Exception as error:  # whatever it is: the training waits, and nobody else would tell it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, SharedBudgetError):
            failed = SharedBudgetError(
                f"Job {self.job!r} has lost the coordinator of the shared budget {self._meeting.name!r}: "
                f"{type(error).__name__}: {error}. Start its training again from its last checkpoint."
            )
            failed.__cause__ = error
            error = failed
        with self._changed:
            self._failed = error
            self.alone = False  # it would never hear that it is not any more
            self._changed.notify_all()

    def _heard(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message.get("n", self._number) != self._number:
                return
            if "answer" in message and self._pending is not None:
                self._hear_answer(self._pending["op"], message["answer"])
            if "granted" in message and self._pending is not None:
                self._granted = int(message["granted"])
                self._take(self._granted)
            if "plan" in message:
                self.plan = (int(message["plan"][0]), int(message["plan"][1]))
            if "wanted" in message:
                self.wanted, self._wanted_at = bool(message["wanted"]), time.monotonic()
                self.waited = self.waited or self.wanted
                if self.wanted and not self._alone_in_step:
                    self._let_go()
            if "alone" in message:
                self.alone, self._grant = bool(message["alone"]), int(message["grant"])
                if not self.alone and not self._alone_in_step:
                    self._give_back()
            self._changed.notify_all()

    def _may_keep(self) -> bool:
        """Whether the step that ends may leave what it was granted to the next one."""
        whole = self._claim is not None and self._reach == len(self._claim) and not self._advanced
        return whole and not self.wanted and time.monotonic() - self._wanted_at >= CALM_SECONDS

    def _let_go(self) -> None:
        """Somebody waits: say what is needed no more."""
        kept, self._kept = self._kept, None
        if self._claim is None:
            if kept is not None:
                self._connection.say({"op": "end"})
            return
        if kept is not None:
            self._connection.say({"op": "still", "needs": list(self._claim.needs)})
        self._send_place()

    def _send_place(self) -> None:
        self._advanced = True
        self._connection.say({"op": "advance", "at": self.at})

    def _hear_answer(self, op: str, answer: Any) -> None:
        if op == "plan":
            self.plan = (int(answer[0]), int(answer[1]))
        again, self._answered = self._answered, True
        if not again:
            self._answer = answer
        if op not in ("begin", "ask", "settle", "build"):
            self._pending = None
            return
        reach, room_bytes, refused, _ = answer
        if op == "build":
            self._asked = Claim.of([room_bytes])
        if reach or refused:
            if again:  # the first answer was to wait
                self._granted = int(reach)
            self._take(int(reach))

    def _take(self, reach: int) -> None:
        """What was asked for is there: from now on another coordinator would have to know it."""
        asked, self._pending = self._pending, None
        if not reach or asked is None:
            return
        if asked["op"] == "ask":
            self._reach = reach
        else:
            self._claim, self._rest_bytes = self._asked, int(asked.get("rest", 0))
            self.at, self._reach, self._advanced = 0, reach, False

    def _give_back(self) -> None:
        back = {"op": "back", "grant": self._grant, "rest": self._rest_bytes, "least": self._least_bytes}
        self._connection.say(back)

    def _come_back(self) -> None:
        """The coordinator is gone: find or start another one, and say what this job holds."""
        with self._changed:
            if self._connection.closed:
                return
            if self._alone_in_step:  # to another coordinator that is a step like any other
                self._claim, self.at, self._reach = Claim.of([self._budget_bytes]), 0, 1
            self.alone = self.wanted = self._alone_in_step = False
            self.plan = self._kept = None
            self._advanced = True
            self._connection.renew(
                {
                    "rest": self._rest_bytes,
                    "least": self._least_bytes,
                    "needs": [] if self._claim is None else list(self._claim.needs),
                    "at": max(0, min(self.at, self._reach - 1)),
                    "reach": self._reach,
                }
            )
            if self._pending is not None and self._granted is None:
                self._connection.say(self._pending)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link.leave_to_parent()


in_child(_after_fork)
