"""Reaching the coordinator of a name: finding it, starting one where there is none, understanding what it refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_mimose.budget import format_bytes
from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.wire import VERSION, Lines, Meeting, TakenError, encode, lock_file, peer_uid

START_SECONDS = 20.0
"""How long a coordinator may take to be reached."""

# The coordinator must not import torch: its modules are found from inside the package, as a package of their own.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from shared.coordinator import main; main(*sys.argv[2:])"


def connect(meeting: Meeting) -> socket.socket:
    """A connection to the coordinator, which is started if there is none.

    Raises:
        SharedBudgetError: The name is another user's, or no coordinator could be reached.
    """
    until = time.monotonic() + START_SECONDS
    said = ""
    while time.monotonic() < until:
        with suppress(OSError):
            connection = _reach(meeting)
            if peer_uid(connection) == os.getuid():
                return connection
            connection.close()
            raise SharedBudgetError(f"The socket {meeting.socket} is another user's. Take another name.")
        said = _start(meeting) or said
        time.sleep(0.02)
    raise SharedBudgetError(
        f"No coordinator of the shared budget {meeting.name!r} could be reached at {meeting.socket} within "
        f"{START_SECONDS:.0f} s. {said or 'It holds its lock but does not answer: end the process that has it.'}"
    )


def _reach(meeting: Meeting) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(START_SECONDS)
        connection.connect(str(meeting.socket))
    except BaseException:
        connection.close()
        raise
    return connection


def _start(meeting: Meeting) -> str:
    """Start a coordinator; what it said, if it failed."""
    try:
        meeting.make()
    except TakenError as error:
        raise SharedBudgetError(
            f"The name {meeting.name!r} is taken: {error}. Take another name for this shared budget."
        ) from error
    folder = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BOOT, folder, meeting.name, meeting.base],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        timeout=START_SECONDS,
    )
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2]


def ask_once(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    """Say the first thing on a connection, and return what is said to it.

    Raises:
        OSError: It broke.
    """
    connection.sendall(encode(message))
    lines = Lines()
    while True:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the coordinator has closed the connection")
        for said in lines.feed(data):
            if "later" not in said:  # nothing else is said before this is answered
                return said
            connection.settimeout(None)  # it is there, and waits for others; if it dies this ends, too


def raise_error(said: dict[str, Any], meeting: Meeting, asked: dict[str, Any]) -> None:
    """Raise what the coordinator has against a job.

    Raises:
        SharedBudgetError: It has.
    """
    kind = said.get("error")
    if kind is None:
        return
    name = f"The shared budget {meeting.name!r}"
    if kind == "contradicts":
        mine = "" if asked["budget"] is None else f" of {format_bytes(asked['budget'])} ({asked['budget']:,} bytes)"
        raise SharedBudgetError(
            f"{name} is {format_bytes(said['budget'])} ({said['budget']:,} bytes) on {said['device']}, and one{mine} "
            f"on {asked['device']} was asked for. Ask for the same, leave the budget out to join it, or take another "
            "name."
        )
    if kind == "unknown":
        raise SharedBudgetError(
            f"{name} does not exist yet. Whoever comes first says how much it is: "
            f'SharedBudget.connect({meeting.name!r}, "16GB").'
        )
    if kind == "name":
        raise SharedBudgetError(f"{name} has a job {asked['job']!r} already. Give this one another name.")
    if kind == "version":
        raise SharedBudgetError(
            f"{name} is kept by another version of lightning-mimose (it speaks {said['text']}, this one {VERSION}). "
            "Use one version, or another name."
        )
    raise SharedBudgetError(f"{name} does not understand this job: {said.get('text', kind)}")


def own_file(meeting: Meeting, job: str) -> int:
    """The job's file, locked: as long as this process lives, a new coordinator waits for it."""
    while True:
        try:
            meeting.make()
            descriptor = lock_file(meeting.file_of(job))
        except TakenError as error:
            raise SharedBudgetError(f"The name {meeting.name!r} is taken: {error}. Take another name.") from error
        except FileNotFoundError:  # the last coordinator removed the folder just now
            continue
        if descriptor is None:
            raise SharedBudgetError(
                f"The shared budget {meeting.name!r} has a job {job!r} already. Give this one another name."
            )
        return descriptor
