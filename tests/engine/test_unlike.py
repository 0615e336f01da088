"""What is made of steps that differ from others of their size."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.engine.unlike import FEWEST_STEPS, MOST_MISSES, Unlike
from lightning_mimose.sizes import SizeTracker


def followed() -> tuple[Unlike, Any]:
    """Nothing known but some batches of two languages, and who was told what."""
    told: list[str] = []
    advisor: Any = SimpleNamespace(tracker=SizeTracker(), scratch_bytes=0, hints={}, announce=told.append, told=told)
    advisor.hint = partial(Advisor.hint, advisor)
    unlike = Unlike(advisor)
    for step in range(8):
        size = advisor.tracker.observe({"ids": torch.zeros(2, 8 + step), "language": ("en", "de")[step % 2]})
        unlike.ran(size, 70)
    return unlike, advisor


def test_what_was_suspected_and_explains_nothing_is_dropped() -> None:
    """Not for a few misses among many steps that held, and it is not tried twice."""
    unlike, advisor = followed()
    unlike.compare(1000, 1010)
    assert advisor.tracker.labels.told == ()
    unlike.compare(1000, 1030)
    assert advisor.tracker.labels.told == ("language",)
    assert unlike.renews
    for _ in range(5):
        for reached in (1030, 970, 1000, 1010):
            unlike.compare(1000, reached)
    assert advisor.tracker.labels.told == ("language",)
    unlike.renews = False
    for _ in range(MOST_MISSES):
        unlike.compare(1000, 970)
    assert advisor.tracker.labels.told == ()
    assert unlike.renews
    advisor.tracker.observe({"ids": torch.zeros(2, 8), "language": "en"})
    unlike.compare(1000, 970)
    assert advisor.tracker.labels.told == ()
    assert sum("'language'" in text for text in advisor.told) == 2


def test_misses_are_told_of_once_and_as_long_as_they_are_many() -> None:
    """What kernels take for a moment is none."""
    unlike, advisor = followed()
    for _ in range(FEWEST_STEPS):
        unlike.compare(1000, 1015)
    assert "size_fn=" in advisor.hints["scatter"]
    for _ in range(20):
        unlike.compare(1000, 1005)
    assert advisor.hints == {}
    for _ in range(20):
        unlike.compare(1000, 1015)
    assert "scatter" in advisor.hints
    assert len(advisor.told) == 1
    unlike, advisor = followed()
    advisor.scratch_bytes = 20
    for _ in range(20):
        unlike.compare(1000, 1025)
    assert advisor.hints == {}
    assert advisor.tracker.labels.told == ()
