"""What ties a job to whichever coordinator there is: a socket that is made anew, and a file that tells it is alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.reach import ask_once, connect, own_file, raise_error
from lightning_mimose.shared.wire import VERSION, Lines, Meeting, encode

MOST_ATTEMPTS = 20
"""Coordinators that may die in a row on being spoken to."""


class Connection:
    """One job's connection, over the lives of as many coordinators as there are. Callers see to locks.

    Attributes:
        closed: Whether the job is done with it.

    Args:
        meeting: Where.
        job: The job's name.
        weight: Its weight.
        budget_bytes: The budget.
        device: The device, in words that are the same in all processes.

    Raises:
        SharedBudgetError: The coordinator will not have the job, or there is none and none could be started.
    """

    def __init__(self, meeting: Meeting, job: str, weight: float, budget_bytes: int, device: str) -> None:
        self._meeting, self.job, self.closed = meeting, job, False
        self._hello = {"op": "hello", "version": VERSION, "job": job, "weight": weight}
        self._hello |= {"budget": budget_bytes, "device": device}
        self._file = own_file(meeting, job)
        try:
            self._socket = self._connect()
        except BaseException:
            self._forget_file()
            raise

    def say(self, message: dict[str, Any]) -> None:
        """Say something; it is lost where the coordinator is."""
        with suppress(OSError):  # the thread that hears will notice, and say everything anew
            self._socket.sendall(encode(message))

    def hear(self, heard: Callable[[dict[str, Any]], None], lost: Callable[[], None]) -> None:
        """Hear what comes until this is closed.

        Args:
            heard: Given every message.
            lost: Called when the coordinator is gone; has to call `renew`, unless this was closed meanwhile.

        Raises:
            SharedBudgetError: The coordinator has something against the job.
            ValueError: It talks nonsense.
        """
        lines = Lines()
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ConnectionError
            except OSError:
                lines = Lines()
                lost()
            else:
                for message in lines.feed(data):
                    raise_error(message, self._meeting, self._hello)
                    heard(message)

    def renew(self, state: dict[str, Any]) -> None:
        """Find or start another coordinator.

        Args:
            state: What the job holds, which that one has to know.

        Raises:
            SharedBudgetError: There is none, and none could be started.
        """
        self._socket.close()
        self._socket = self._connect(state)

    def close(self) -> None:
        """Break it: whatever the job held is free."""
        self.closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._forget_file()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of what would keep the parent's lease alive, and of nothing else."""
        if self.closed:
            return  # these numbers are those of other files by now
        for descriptor in (self._socket.detach(), self._file):
            with suppress(OSError):
                os.close(descriptor)
        # From now on these numbers are those of other files, and the name of the file is still the parent's.
        self.closed = True

    def _connect(self, state: dict[str, Any] | None = None) -> socket.socket:
        for _ in range(MOST_ATTEMPTS):
            connection = connect(self._meeting)
            try:
                said = ask_once(connection, {**self._hello, "state": state})
                raise_error(said, self._meeting, self._hello)
            except OSError:  # that one died as well, or was about to end
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                connection.settimeout(None)
                return connection
        raise SharedBudgetError(
            f"{MOST_ATTEMPTS} coordinators of the shared budget {self._meeting.name!r} died, one after the other, when "
            f"job {self.job!r} spoke to them. Look for what ends them: a limit of memory or processes."
        )

    def _forget_file(self) -> None:
        with suppress(OSError):
            self._meeting.file_of(self.job).unlink()
        with suppress(OSError):
            os.close(self._file)
        self._meeting.remove()
