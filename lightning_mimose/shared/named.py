"""A shared budget of a name: kept by a coordinator, for trainings in several processes."""

from __future__ import annotations

import os
import threading
from typing import Any, Literal

import torch

from lightning_mimose.budget import device_memory
from lightning_mimose.errors import SharedBudgetError
from lightning_mimose.shared.broker import Broker
from lightning_mimose.shared.budget import SharedBudget
from lightning_mimose.shared.remote import RemoteBroker
from lightning_mimose.shared.wire import Meeting


class NamedBudget(SharedBudget):
    """What `SharedBudget.connect` returns. Other processes, forked ones too, reach the same budget by its name.

    Args:
        name: See `SharedBudget.connect`.
        budget: The budget; None to join one that is there.
        own_generators: See `SharedBudget`.
        when_full: See `SharedBudget`.
        device: See `SharedBudget`.

    Raises:
        SharedBudgetError: The name is another user's, or stands for another budget or device, or nothing.
    """

    def __init__(
        self,
        name: str,
        budget: str | int | float | None,
        *,
        own_generators: bool,
        when_full: Literal["raise", "wait"],
        device: torch.device | str | None,
    ) -> None:
        if budget == "auto":
            raise SharedBudgetError("budget='auto' is another number in every process. Name one, or None to join.")
        super().__init__(
            "auto" if budget is None else budget, own_generators=own_generators, when_full=when_full, device=device
        )
        try:
            self._meeting = Meeting(name)
        except ValueError as error:
            raise SharedBudgetError(f"The name {name!r} was asked for: {error}.") from error
        self._joins = budget is None
        self._broker_on(self._usual_device())

    def __repr__(self) -> str:
        return f"SharedBudget.connect({self._meeting.name!r}, {None if self._joins else self.budget!r})"

    def __reduce__(self) -> Any:
        budget = None if self._joins else self.budget
        keywords = {"own_generators": self._own_generators, "when_full": self._when_full, "device": self._device}
        return _connect_again, (self._meeting.name, budget, keywords)

    def _forked(self) -> None:
        self._process, self._lock, self._broker = os.getpid(), threading.Lock(), None

    def _make_broker(self, device: torch.device) -> Broker:
        bytes_ = None if self._joins else self._spec.resolve(device_memory(device))
        return RemoteBroker(self._meeting, bytes_, _everywhere(device))


def _connect_again(name: str, budget: str | int | float | None, keywords: dict[str, Any]) -> SharedBudget:
    return SharedBudget.connect(name, budget, **keywords)


def _everywhere(device: torch.device) -> str:
    """A device in words that mean the same in every process, whatever it is allowed to see."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return str(device)
