"""The coordinator: the counter for jobs of several processes, behind a socket.

It runs in a bare Python process of its own, so that no training's interpreter has to be free for another one to go on,
and its death is nobody's else. Whoever finds none starts one; it ends when its last job has left. A connection is a
lease: when it breaks, all that its job held is free.

If it dies, the first job that notices starts another one. That grants nothing before every job that is alive, which
their locked files tell, has come back and said what it holds. Those say what the budget is, too: a newcomer is heard
when one of them has come back.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

from .account import Verdict
from .claim import Claim
from .counter import Counter
from .ledger import Ledger
from .switchboard import Caller, Switchboard
from .wire import VERSION, Meeting, is_locked, lock_file

LINGER_SECONDS = 1.0
"""How long it stays when there is no job."""
LOOK_SECONDS = 0.2
"""How often it looks whether jobs that have not come back yet are alive."""


class Coordinator:
    """Serves the jobs of one name.

    Args:
        meeting: Where.
        listener: The socket, listening.
    """

    def __init__(self, meeting: Meeting, listener: socket.socket) -> None:
        self._meeting = meeting
        self._board = Switchboard(listener, self._heard, self._gone)
        self._counter: Counter | None = None
        self._device = ""
        self._callers: dict[str, Caller] = {}
        self._missing = {path for path in meeting.jobs.glob("*") if is_locked(path)}
        """Files of jobs that an earlier coordinator served, and that have not come back yet."""
        self._asked_early: list[tuple[Caller, dict[str, Any]]] = []
        """What cannot be answered before they have."""
        self._planned_for: list[tuple[Any, ...]] = []
        """What everybody has and wants, as of the last time that plans were told."""

    def run(self) -> None:
        """Serve until there has been no job for a while."""
        empty_since = time.monotonic()
        while True:
            self._board.serve(LOOK_SECONDS)
            if self._missing or self._asked_early:
                self._look_for_missing()
            now = time.monotonic()
            if self._missing or not self._board.is_empty:
                empty_since = now
            elif now - empty_since > LINGER_SECONDS:
                return

    def _heard(self, caller: Caller, message: dict[str, Any]) -> None:
        op = message["op"]
        if caller.job is None:
            self._greet(caller, op, message)
        elif self._missing and op not in ("advance", "end", "still", "back"):
            self._asked_early.append((caller, message))
        else:
            self._serve(caller, caller.job, message)
        self._tell()

    def _gone(self, caller: Caller) -> None:
        """What a caller's job held is free."""
        if caller.job is not None and self._callers.get(caller.job) is caller:
            del self._callers[caller.job]
            assert self._counter is not None
            self._counter.leave(caller.job)
            with suppress(OSError):
                self._meeting.file_of(caller.job).unlink()
            self._tell()

    def _greet(self, caller: Caller, op: str, message: dict[str, Any]) -> None:
        """The first that a caller says: a job's hello, or a question by somebody who does not stay."""
        state = message.get("state")
        if op not in ("peek", "history"):
            self._missing.discard(self._meeting.file_of(str(message["job"])))
        if self._counter is None and self._missing:
            if op == "history":  # who leaves asks for it, and may be the one that is missing
                self._board.say(caller, {"history": Ledger().to_dict()})
                return
            if state is None:  # nobody who was there has said yet what the budget is
                self._asked_early.append((caller, message))
                self._board.say(caller, {"later": True})
                return
        if self._agreed(caller, message):
            counter = self._counter
            assert counter is not None
            if op == "peek":
                self._board.say(caller, {"budget": counter.bank.budget_bytes})
            elif op == "history":
                self._board.say(caller, {"history": counter.ledger.to_dict()})
            else:
                self._welcome(caller, message, counter)

    def _agreed(self, caller: Caller, message: dict[str, Any]) -> bool:
        """Whether somebody means the same budget; says so if not. Nobody is bound by what earlier jobs had."""
        budget, device = message.get("budget"), str(message["device"])
        if message.get("version") != VERSION:
            self._board.say(caller, {"error": "version", "text": str(VERSION)})
            return False
        if budget is not None and not self._callers and (not self._missing or self._counter is None):
            same = self._counter is not None and self._counter.bank.budget_bytes == int(budget)
            self._counter = self._counter if same else Counter(int(budget))
            self._device = device
        counter = self._counter
        if counter is None:
            self._board.say(caller, {"error": "unknown"})
            return False
        if (budget is not None and int(budget) != counter.bank.budget_bytes) or device != self._device:
            self._board.say(
                caller,
                {"error": "contradicts", "budget": counter.bank.budget_bytes, "device": self._device},
            )
            return False
        return True

    def _welcome(self, caller: Caller, message: dict[str, Any], counter: Counter) -> None:
        job = str(message["job"])
        if job in self._callers:
            self._board.say(caller, {"error": "name"})
            return
        counter.join(job, float(message["weight"]))
        caller.job, self._callers[job] = job, caller
        state = message.get("state")
        if state is not None:
            claim = Claim.of([int(need) for need in state["needs"]]) if state["needs"] else None
            counter.restore(job, int(state["rest"]), int(state["least"]), claim, int(state["at"]), int(state["reach"]))
        self._board.say(caller, {"budget": counter.bank.budget_bytes})

    def _serve(self, caller: Caller, job: str, message: dict[str, Any]) -> None:
        counter, op = self._counter, message["op"]
        assert counter is not None
        if caller.standing and op in ("begin", "build", "settle"):
            caller.standing = caller.alone = False  # it has not heard yet, or holds something else from now on
            self._end(caller, job)
            self._board.say(caller, {"alone": False, "grant": caller.grant})
        if op in ("begin", "build") and counter.bank.accounts[job].claim is not None:
            self._end(caller, job)  # of an earlier step, that it kept
        if op == "back":
            if caller.standing and message["grant"] == caller.grant:
                caller.standing = False
                counter.take_back(job, int(message["rest"]), int(message["least"]))
        elif op == "begin":
            claim = Claim.of([int(need) for need in message["needs"]])
            verdict = counter.begin(job, claim, int(message["rest"]))
            self._verdict(caller, message, verdict)
        elif op == "ask":
            self._verdict(caller, message, counter.ask(job))
        elif op == "advance":
            counter.advance(job, int(message["at"]))
        elif op == "still":
            counter.replace(job, Claim.of([int(need) for need in message["needs"]]))
        elif op == "end":
            self._end(caller, job)
        elif op == "settle":
            self._verdict(caller, message, counter.settle(job, int(message["rest"]), patient=bool(message["patient"])))
        elif op == "build":
            self._verdict(caller, message, counter.build(job))
        elif op == "plan":
            least, wants = int(message["least"]), int(message["wants"])
            counter.wish(job, least, wants)
            caller.plan = self._plan(job)
            self._board.say(caller, {"n": message["n"], "answer": caller.plan})
        elif op == "others":
            self._board.say(caller, {"n": message["n"], "answer": counter.others(job)})
        else:
            raise ValueError(f"there is no {op!r}")

    def _end(self, caller: Caller, job: str) -> None:
        assert self._counter is not None
        self._counter.count(job, charged=caller.wanted)
        self._counter.end(job)

    def _plan(self, job: str) -> list[int]:
        assert self._counter is not None
        return [self._counter.plan_bytes(job, together=True), self._counter.bank.room_bytes(job)]

    def _verdict(self, caller: Caller, message: dict[str, Any], verdict: Verdict) -> None:
        answer = [verdict.reach, verdict.room_bytes, verdict.refused, verdict.full]
        self._board.say(caller, {"n": message["n"], "answer": answer})

    def _tell(self) -> None:
        """Say what has changed for others meanwhile."""
        counter = self._counter
        if counter is None or self._missing:
            return
        while counter.answers:
            job, reach = counter.answers.popitem()
            caller = self._callers.get(job)
            if caller is not None:
                with suppress(OSError):  # it is dropped when it is read from next
                    self._board.say(caller, {"granted": reach})
        waiting = counter.bank.waiting
        for job, caller in self._callers.items():
            keeps = counter.alone(job) and not caller.standing and counter.bank.accounts[job].claim is not None
            wanted = keeps or (bool(waiting) and waiting != (job,))
            if wanted != caller.wanted:
                caller.wanted = wanted
                counter.count(job, charged=not wanted)
                with suppress(OSError):
                    self._board.say(caller, {"wanted": wanted})
            if caller.alone and not counter.alone(job):
                caller.alone = False
                with suppress(OSError):
                    self._board.say(caller, {"alone": False, "grant": caller.grant})
            elif not caller.alone and not caller.standing and counter.give_all(job):
                caller.alone = caller.standing = True
                caller.grant += 1
                with suppress(OSError):
                    self._board.say(caller, {"alone": True, "grant": caller.grant})

        self._tell_plans(counter)

    def _tell_plans(self, counter: Counter) -> None:
        accounts = counter.bank.accounts.items()
        now = [(job, each.rest_bytes, each.least_bytes, each.wants_bytes) for job, each in accounts]
        if now != self._planned_for:
            self._planned_for = now
            for job, caller in self._callers.items():
                plan = self._plan(job)
                if plan != caller.plan:
                    caller.plan = plan
                    with suppress(OSError):
                        self._board.say(caller, {"plan": plan})

    def _look_for_missing(self) -> None:
        self._missing = {path for path in self._missing if is_locked(path)}
        if self._missing and self._counter is None:
            return
        asked, self._asked_early = self._asked_early, []
        for caller, message in asked:
            if caller.connection.fileno() >= 0:  # it may have broken off meanwhile
                try:
                    self._heard(caller, message)
                except Exception as error:
                    self._board.shut_out(caller, error)
        self._tell()


def main(name: str, base: str) -> None:
    """Become the coordinator of a name, unless there is one; returns in the caller as soon as it can be reached."""
    meeting = Meeting(name, base)
    meeting.make()
    lock = lock_file(meeting.lock)
    if lock is None:
        return
    with suppress(FileNotFoundError):
        meeting.socket.unlink()  # the lock says that nobody listens there
    os.umask(0o177)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(meeting.socket))
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.pwrite(lock, f"{os.getpid():<10}\n".encode(), 0)  # for people who look for it
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir("/")
    try:
        Coordinator(meeting, listener).run()
    finally:
        for path in meeting.jobs.glob("*"):
            is_locked(path)  # a job that was killed leaves its file
        for path in (meeting.socket, meeting.lock):
            with suppress(OSError):
                path.unlink()
        meeting.remove()
