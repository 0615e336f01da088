"""What the jobs held and what they waited, over time: plain numbers for the report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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

    def note(self, levels: Mapping[str, int], now: float) -> None:
        """From now on jobs may hold so much, in bytes; what is given back comes before what is granted of it."""
        latest = self._latest
        changed = {job: size - latest.get(job, 0) for job, size in levels.items() if latest.get(job) != size}
        for job in sorted(changed, key=changed.__getitem__):
            latest[job] = levels[job]
            self.held.append((now, job, levels[job]))

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
        self.note({job: 0}, now)
        self._latest.pop(job, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"held": [list(entry) for entry in self.held], "waits": [list(entry) for entry in self.waits]}
