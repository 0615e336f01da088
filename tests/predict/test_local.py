"""Fits of every column in a basis of its own: pyramids of images with padded windows, at any size."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import SwinConfig, SwinForImageClassification

from lightning_mimose.measure.observe import observe
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.checking import GOOD_ERROR
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.structure import Structure
from tests.helpers.recording import recorded

Size = tuple[int, int]
RESIDENT_BYTES = 1_000_000


@cache
def pyramid() -> nn.Module:
    """Three levels of windows, to which sides are padded after patches were merged."""
    torch.manual_seed(0)
    config = SwinConfig(image_size=128, embed_dim=16, depths=[1, 2, 1], num_heads=[1, 2, 4], window_size=4)
    return SwinForImageClassification(config)


@cache
def step(size: Size, batch: int = 2) -> tuple[Structure, NDArray[np.float64]]:
    """A measured one."""
    images = {"pixel_values": torch.zeros(batch, 3, *size), "labels": torch.zeros(batch, dtype=torch.long)}
    seen = observe(recorded(pyramid(), images), 0, grades=GRADES)
    return seen.structure, seen.values


def dims(size: Size, batch: int = 2) -> dict[str, int]:
    """Named dimensions."""
    return {"batch": batch, "pixels:2": size[0], "pixels:3": size[1]}


def fit(*sizes: Size) -> Fit:
    """From some sizes."""
    values = np.array([step(size)[1] for size in sizes])
    return best_fit(
        [dims(size) for size in sizes], [Measured(row) for row in values], step(sizes[0])[0], RESIDENT_BYTES
    )


def missed(found: Fit, size: Size) -> float:
    """By how much the peak of a size is missed, as a share."""
    structure, values = step(size)
    truth, predicted = structure.summary(np.stack([values, found.values_at(dims(size))]))
    return float(np.abs(truth - predicted)[:2].max() / truth[0])


SEEN = (
    (96, 128),
    (112, 152),
    (144, 104),
    (120, 120),
    (152, 136),
    (128, 96),
    (104, 160),
    (136, 144),
    (160, 112),
    (96, 104),
)
OTHERS = ((104, 136), (136, 112), (120, 152), (152, 96), (112, 144))
WHOLE = ((96, 96), (96, 128), (128, 96), (128, 128), (160, 128), (96, 160), (160, 160), (128, 160))


def test_images_of_any_size_are_predicted() -> None:
    """Windows at three levels, each of which rounds in its own way: no few features describe all moments at once."""
    found = fit(*SEEN)
    assert found.local is not None
    known = [size for size in OTHERS if found.error_at(dims(size), RESIDENT_BYTES) <= GOOD_ERROR]
    assert len(known) >= 3
    assert max(missed(found, size) for size in known) < 0.005


def test_without_it_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: the best single basis misses them."""
    monkeypatch.setattr("lightning_mimose.predict.choice.fit_locally", lambda *_: None)
    found = fit(*SEEN)
    assert found.local is None
    errors = []
    for size in OTHERS:
        structure, values = step(size)
        truth, predicted = structure.summary(np.stack([values, found.values_at(dims(size))]))
        errors.append(np.abs(truth - predicted)[:2].max() / truth[0])
    assert max(errors) > 0.01


def test_sizes_that_were_all_rounded_alike_tell_nothing_of_others() -> None:
    """Multiples of 32 everywhere: whether sides are rounded, and to what, cannot be known."""
    found = fit(*WHOLE)
    assert found.error_at(dims((160, 96)), RESIDENT_BYTES) <= GOOD_ERROR
    assert missed(found, (160, 96)) < 0.005
    assert found.error_at(dims((152, 144)), RESIDENT_BYTES) > GOOD_ERROR
    assert missed(found, (152, 144)) > 0.01


def test_two_odd_sizes_beside_whole_ones_are_not_enough() -> None:
    """A fit goes through both, whatever it makes of others: they alone tell one rounding from another."""
    found = fit(*WHOLE, (104, 112), (120, 104))
    for size in ((112, 112), (136, 104), (144, 152)):
        assert found.error_at(dims(size), RESIDENT_BYTES) > GOOD_ERROR
