"""The accelerator's meter, on an allocator that is played on the CPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_mimose.measure.curve import Curve
from lightning_mimose.measure.interval import Interval
from lightning_mimose.measure.meters.accelerator import AcceleratorMeter
from tests.helpers.allocator import play

KIB = 1024


def block(kibibytes: int) -> torch.Tensor:
    """A tensor of so many KiB."""
    return torch.zeros(kibibytes * KIB, dtype=torch.uint8)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceleratorMeter]:
    """One that was started, with something on the device already."""
    with play(monkeypatch):
        older = block(100)
        meter = AcceleratorMeter(torch.device("cpu"))
        meter.start()
        yield meter
        del older


def cut_when_it_goes(meter: AcceleratorMeter, tensor: torch.Tensor) -> Any:
    """As the curve is cut: told by the storage's last reference, right before its memory goes."""

    def goes(_: Any) -> None:
        meter.mark()
        meter.expect_free()

    return weakref.ref(tensor.untyped_storage(), goes)


def test_a_peak_after_something_went_is_told_apart(meter: AcceleratorMeter) -> None:
    """What is there when the interval opens is its peak, and yet the rest never reaches it."""
    large = block(50)
    watch = cut_when_it_goes(meter, large)
    del large
    small = block(20)
    del small
    assert meter.stop() == [Interval(0, 50 * KIB), Interval(50 * KIB, 50 * KIB, 20 * KIB)]
    assert sys.getprofile() is None
    del watch


def test_a_higher_peak_is_that_of_the_interval(meter: AcceleratorMeter) -> None:
    """And of the rest."""
    large = block(50)
    watch = cut_when_it_goes(meter, large)
    del large
    larger = block(70)
    del larger
    assert meter.stop()[1] == Interval(50 * KIB, 70 * KIB, 70 * KIB)
    del watch


def test_what_does_not_go_after_all_is_waited_for_no_longer_than_to_the_next_mark(meter: AcceleratorMeter) -> None:
    """Somebody else took it over."""
    kept = block(50)
    meter.mark()
    meter.expect_free()
    assert sys.getprofile() is not None
    assert meter.stop()[1:] == [Interval(50 * KIB, 50 * KIB)]
    assert sys.getprofile() is None
    del kept


def test_a_profiler_of_the_users_own_is_left_alone(meter: AcceleratorMeter) -> None:
    """There is one of them in Python; without it less is known."""
    seen: list[str] = []

    def own(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    large = block(50)
    watch = cut_when_it_goes(meter, large)
    sys.setprofile(own)
    try:
        del large
        block(20)
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
    assert meter.stop()[1].rest_bytes is None
    assert seen
    del watch


@pytest.mark.parametrize("stay", [False, True])
def test_old_gradients_that_go_are_told_by_the_marks(stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve is that of what the step has made, whether their memory goes with them or lies in buckets that stay."""
    with play(monkeypatch):
        old = [block(30)]
        bucket = old[0] if stay else None
        curve = Curve(
            torch.device("cpu"), lambda: (30 * KIB * len(old), 0), profile=False, gradients_stay=bucket is not None
        )
        curve.start()
        made = block(10)
        old.clear()
        curve.mark("step", "backward")
        more = block(5)
        measured = curve.stop()
        del made, more, bucket
    assert measured is not None
    assert [(i.level_bytes, i.peak_bytes) for i in measured.intervals] == [(0, 10 * KIB), (10 * KIB, 15 * KIB)]
