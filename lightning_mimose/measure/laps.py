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
        >>> began = laps.now()
        >>> laps.end(began, "a step")
        >>> [(what, seconds >= 0) for what, seconds in laps.over()]
        [('a step', True)]
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._waiting: deque[tuple[Any, Any, T]] = deque(maxlen=MOST_WAITING)

    def now(self) -> Any:
        """This point of the device's time, at which a step begins."""
        return self._clock.now()

    def end(self, began: Any, what: T) -> None:
        """A step is over.

        Args:
            began: What `now` was when it began.
            what: Given back with its time.
        """
        self._waiting.append((began, self._clock.now(), what))

    def forget(self) -> None:
        """Of those that were timed nothing is to be told."""
        self._waiting.clear()

    def over(self) -> Iterator[tuple[T, float]]:
        """The steps that the device is done with, and their seconds, each once."""
        while self._waiting and self._clock.has_come(self._waiting[0][1]):
            began, ended, what = self._waiting.popleft()
            yield what, self._clock.seconds_between(began, ended)
