"""What the jobs held and what they waited, over time: plain numbers for the report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

MOST = 1_500
"""Entries of each kind that are kept: all of them together are one line of what a coordinator says (`wire`)."""

Moment: TypeAlias = tuple[float, dict[str, int]]
"""(seconds, what changed: job -> bytes)."""


class Ledger:
    """Notes what every job may hold whenever that changes, and every wait.

    When there are too many entries, moments at which less was held than just before or after are left out. What is
    left was held at that time, and the most that was held, by each job and by all together, is never left out.

    Attributes:
        held: (seconds, job, bytes), in order.
        waits: (job, from, until) in seconds; the newest.

    Example:
        >>> ledger = Ledger()
        >>> ledger.note({"a": 10, "b": 20}, now=1.0)
        >>> ledger.to_dict()["held"]
        [[1.0, 'a', 10], [1.0, 'b', 20]]
    """

    def __init__(self) -> None:
        self.held: list[tuple[float, str, int]] = []
        self.waits: deque[tuple[str, float, float]] = deque(maxlen=MOST)
        self._latest: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def note(self, levels: Mapping[str, int], now: float) -> None:
        """From now on jobs may hold so much, in bytes; what is given back comes before what is granted of it."""
        self.held += _entries(levels, self._latest, now)
        self._latest.update(levels)
        if len(self.held) > MOST:
            self.held = _thinned(self.held)

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


def _entries(levels: Mapping[str, int], before: Mapping[str, int], now: float) -> list[tuple[float, str, int]]:
    """What has changed, what was given back first."""
    changed = {job: size - before.get(job, 0) for job, size in levels.items() if before.get(job) != size}
    return [(now, job, levels[job]) for job in sorted(changed, key=changed.__getitem__)]


def _thinned(held: list[tuple[float, str, int]]) -> list[tuple[float, str, int]]:
    """About half of the entries; the newest of them where there are more jobs than that."""
    moments = [(now, {job: size for _, job, size in of}) for now, of in groupby(held, key=itemgetter(0))]
    while sum(len(changes) for _, changes in moments) > MOST // 2:
        fewer = _halved(moments)
        if len(fewer) == len(moments):
            break
        moments = fewer
    found, level = [], dict[str, int]()
    for now, changes in moments:
        found += _entries(changes, level, now)
        level |= changes
    return found[-MOST // 2 :]


def _halved(moments: list[Moment]) -> list[Moment]:
    """Of every two moments, the one at which more was held, with what had changed since the last one that is kept."""
    totals, highest, level = [], dict[str, tuple[int, int]](), dict[str, int]()
    for i, (_, changes) in enumerate(moments):
        level |= changes
        totals.append(sum(level.values()))
        for job, size in changes.items():
            highest[job] = max(highest.get(job, (-1, 0)), (size, -i))  # the first time that it had its most
    kept = {-first for _, first in highest.values()} | {len(moments) - 1}
    kept |= {max(range(i, min(i + 2, len(moments))), key=totals.__getitem__) for i in range(0, len(moments), 2)}
    found, pending = [], dict[str, int]()
    for i, (now, changes) in enumerate(moments):
        pending |= changes
        if i in kept:
            found.append((now, pending))
            pending = {}
    return found
