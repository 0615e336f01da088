"""Whose turn it is: start-time fair queueing, by weight."""

from __future__ import annotations


class FairClock:
    """Counts the time that each job was served, divided by its weight; who was served least comes first.

    A job that was away gets no credit for it: on coming back it stands where the one served last began
    (Goyal, Vin, Cheng: Start-time Fair Queueing, 1996).

    Example:
        >>> clock = FairClock()
        >>> clock.join("a", weight=2.0); clock.join("b")
        >>> clock.serve("a"); clock.charge("a", seconds=1.0)
        >>> clock.serve("b"); clock.charge("b", seconds=1.0)
        >>> sorted(["a", "b"], key=clock.tag)
        ['a', 'b']
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._now = 0.0

    def join(self, job: str, weight: float = 1.0) -> None:
        """Let a job in.

        Raises:
            ValueError: The weight is not a positive number.
        """
        if not 0 < weight < float("inf"):
            raise ValueError(f"The weight of a job must be a positive number, not {weight!r}.")
        self._weights[job] = weight
        self._served[job] = self._now

    def leave(self, job: str) -> None:
        """Forget a job."""
        self._served.pop(job, None)
        self._weights.pop(job, None)

    def tag(self, job: str) -> float:
        """Where a job stands; the smallest comes first."""
        return max(self._served[job], self._now)

    def serve(self, job: str) -> None:
        """A job's turn begins."""
        self._served[job] = self._now = self.tag(job)

    def charge(self, job: str, seconds: float) -> None:
        """A job's turn has ended, or goes on: it took some seconds."""
        self._served[job] += max(0.0, seconds) / self._weights[job]
