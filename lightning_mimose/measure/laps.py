"""How long steps take on a device, told when it has come to their end: nobody waits for an accelerator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from lightning_mimose.measure.clock import Clock

T = TypeVar("T")
MOST_WAITING = 8
"""Steps that the host may be ahead; of those before nothing is told."""


class Laps(Generic[T]):
    """Times steps.

    Args:
        device: Where they run.

    Example:
        >>> laps: Laps[str] = Laps(torch.device("cpu"))
        >>> began = laps.now()
        >>> laps.end(began, "a step")
        >>> [(what, seconds >= 0, host_seconds >= 0) for what, seconds, host_seconds in laps.over()]
        [('a step', True, True)]
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._waiting: deque[tuple[Any, Any, float, T]] = deque(maxlen=MOST_WAITING)
        self._latest: Any = None

    def now(self) -> tuple[Any, float]:
        """This point of the device's time and of the host's, at which a step begins.

        No time of the host where the device is not done with the step before: what the host takes may be waiting. Nor
        where the host is the device.
        """
        waits = self._latest is not None and not self._clock.has_come(self._latest)
        return self._clock.now(), 0.0 if waits or self._clock.is_host else time.perf_counter()

    def end(self, began: tuple[Any, float], what: T) -> None:
        """A step is over.

        Args:
            began: What `now` was when it began.
            what: Given back with its time.
        """
        point, host = began
        self._latest = self._clock.now()
        self._waiting.append((point, self._latest, time.perf_counter() - host if host else 0.0, what))

    def forget(self) -> None:
        """Of those that were timed nothing is to be told."""
        self._waiting.clear()

    def over(self) -> Iterator[tuple[T, float, float]]:
        """The steps that the device is done with, their seconds there and on the host (0 if unknown), each once."""
        while self._waiting and self._clock.has_come(self._waiting[0][1]):
            began, ended, host_seconds, what = self._waiting.popleft()
            yield what, self._clock.seconds_between(began, ended), host_seconds
