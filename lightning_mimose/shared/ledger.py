"""What the jobs held and what they waited, over time: plain numbers for the report."""

from __future__ import annotations

from collections import deque
from typing import Any

MOST = 50_000
"""Entries that are kept, the newest."""


class Ledger:
    """Notes what every job may hold whenever that changes, and every wait.

    Attributes:
        held: (seconds, job, bytes), in order.
        waits: (job, from, until) in seconds.
    """

    def __init__(self) -> None:
        self.held: deque[tuple[float, str, int]] = deque(maxlen=MOST)
        self.waits: deque[tuple[str, float, float]] = deque(maxlen=MOST)
        self._latest: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def note(self, now: float, job: str, held_bytes: int) -> None:
        """A job may hold so much from now on."""
        if self._latest.get(job) != held_bytes:
            self._latest[job] = held_bytes
            self.held.append((now, job, held_bytes))

    def waits_from(self, now: float, job: str) -> None:
        """A job begins to wait."""
        self._since.setdefault(job, now)

    def waits_no_more(self, now: float, job: str) -> None:
        """A job has got what it waited for, or has given up."""
        since = self._since.pop(job, None)
        if since is not None:
            self.waits.append((job, since, now))

    def gone(self, now: float, job: str) -> None:
        """A job has left."""
        self.waits_no_more(now, job)
        self.note(now, job, 0)
        self._latest.pop(job, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"held": [list(entry) for entry in self.held], "waits": [list(entry) for entry in self.waits]}
