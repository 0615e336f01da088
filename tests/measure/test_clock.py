"""Times: of the host on a CPU, of the device's stream on an accelerator."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_mimose.measure.clock import Clock
from tests.helpers.allocator import Event, play


@pytest.mark.parametrize("plays", [False, True], ids=["cpu", "accelerator"])
def test_what_took_longer_is_told_to(plays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are waited for before they are told apart."""
    if plays:
        play(monkeypatch)
    clock = Clock(torch.device("cpu"))
    began = clock.now()
    time.sleep(0.02)
    between = clock.now()
    ended = clock.now()
    assert isinstance(began, Event) == plays
    assert clock.seconds_between(began, between) >= 0.02
    assert clock.seconds_between(began, ended) >= clock.seconds_between(began, between)
