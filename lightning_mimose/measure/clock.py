"""How long something ran: by the host's clock on CPU, by events in the stream on an accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_mimose.measure import counters


class Clock:
    """Takes times that are told apart later: an accelerator has not come to them yet.

    Args:
        device: Where things run.

    Example:
        >>> clock = Clock(torch.device("cpu"))
        >>> began = clock.now()
        >>> clock.seconds_between(began, clock.now()) >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if counters.exist(device) else None

    @property
    def is_host(self) -> bool:
        """Whether it is the host's own."""
        return self._device is None

    def now(self) -> Any:
        """This point of time, or of the device's current stream."""
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def has_come(self, point: Any) -> bool:
        """Whether the device has come to a point of time: who asks for seconds before that waits."""
        return self._device is None or bool(point.query())

    def seconds_between(self, began: Any, ended: Any) -> float:
        """Seconds between two of them; waits until the device has come to the second."""
        if self._device is None:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
