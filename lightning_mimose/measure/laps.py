"""How long steps take on an accelerator, told when it has come to their end: nobody waits for it."""

from __future__ import annotations

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
        >>> laps.start()
        >>> laps.stop("a step")
        >>> [(what, seconds >= 0) for what, seconds in laps.over()]
        [('a step', True)]
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._began: Any = None
        self._waiting: deque[tuple[Any, Any, T]] = deque(maxlen=MOST_WAITING)

    def start(self) -> None:
        """A step begins."""
        self._began = self._clock.now()

    def stop(self, what: T) -> None:
        """The step that began last is over, and its time is wanted.

        Args:
            what: Given back with it.
        """
        if self._began is not None:
            self._waiting.append((self._began, self._clock.now(), what))
            self._began = None

    def over(self) -> Iterator[tuple[T, float]]:
        """The steps that the device is done with, and their seconds, each once."""
        while self._waiting and self._clock.has_come(self._waiting[0][1]):
            began, ended, what = self._waiting.popleft()
            yield what, self._clock.seconds_between(began, ended)
