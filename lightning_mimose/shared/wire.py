"""What the coordinator and its jobs say to each other, and where they meet.

They meet in a folder of the machine's folder for temporary files, which is the user's own (0700): a socket (0600), the
coordinator's lock, and one locked file for every job, so that it can be told who is alive. They speak JSON, a line at a
time. Nothing that comes in is ever run.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

VERSION = 1
"""Of what is spoken; both sides have to speak the same."""
MOST_BYTES = 1 << 20
"""Of one line: a claim of tens of thousands of stretches."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TakenError(Exception):
    """The folder belongs to somebody else."""


class Meeting:
    """The places that belong to one name.

    Args:
        name: Letters, digits, dots, dashes and underscores, at most 64.
        base: The folder for temporary files; None for the machine's.

    Raises:
        ValueError: It is no such name, or the socket's path is longer than the system allows.
    """

    def __init__(self, name: str, base: str | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError("it is made of up to 64 letters, digits, dots, dashes and underscores")
        self.name, self.base = name, base or tempfile.gettempdir()
        self.folder = Path(self.base) / f"lightning-mimose-{name}"
        self.socket, self.lock, self.jobs = self.folder / "socket", self.folder / "lock", self.folder / "jobs"
        if len(os.fsencode(self.socket)) > 100:
            raise ValueError(f"the path of its socket, {self.socket}, is longer than the system allows (100 bytes)")

    def make(self) -> None:
        """Make the folder.

        Raises:
            TakenError: It is there, and is not this user's own.
        """
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.lstat()
        if found.st_uid != os.getuid() or (found.st_mode & 0o170077) != 0o040000:
            raise TakenError(f"{self.folder} belongs to user {found.st_uid} (mode {found.st_mode & 0o777:o})")
        with suppress(FileExistsError):
            self.jobs.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove what is empty."""
        for path in (self.jobs, self.folder):
            with suppress(OSError):
                path.rmdir()

    def file_of(self, job: str) -> Path:
        """The file that a job keeps locked while it lives."""
        return self.jobs / quote(job, safe="")


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Make and lock a file; the lock ends with the process, however that ends.

    Returns:
        Its descriptor; None if another process has it, and `wait` is false.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever had it before may have removed the file: a lock on what nobody can find is worth nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a file is there and somebody keeps it locked; one that nobody does is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            path.unlink()
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end; where the system does not tell, this one, for nobody else can open the folder."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return os.getuid()
    found: tuple[int, int, int] = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, 12))
    return found[1]


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Puts lines together from what comes in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with this.

        Raises:
            ValueError: It is no JSON object, or a line without end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError(f"a line of more than {MOST_BYTES} bytes")
        found = []
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a line that is no object")
            found.append(message)
        return found
