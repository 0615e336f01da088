"""Batches with dimensions that decide next to nothing: how many boxes there are in each image."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.predict import fits
from tests.helpers.architectures import equal, train

STEPS = 30


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fit comes late: on a busy machine one may, for longer than this lasts."""
    monkeypatch.setattr(fits, "MAY_BE_LATE", 10**9)


class Detector(nn.Module):
    """Patches, a few blocks, and a loss of every box against every query."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 48, 16, 16), nn.Linear(48, 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, dropout=0.0) for _ in range(3)
        )

    def forward(self, pixels: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        found = self.head(x)[:, :20]
        losses = [torch.cdist(each, wanted).square().mean() for each, wanted in zip(found, boxes, strict=True)]
        return torch.stack(losses).sum()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """As the batch comes."""
    loss: torch.Tensor = model(batch["pixel_values"], [label["boxes"] for label in batch["labels"]])
    return loss


def images(count: int) -> list[dict[str, Any]]:
    """Squares of one side in a batch, each with boxes of its own."""
    rng = random.Random(0)
    batches = []
    for _ in range(STEPS):
        side = 32 * rng.randrange(3, 8)
        labels = [{"boxes": torch.rand(rng.randrange(1, 12), 4)} for _ in range(count)]
        batches.append({"pixel_values": torch.randn(count, 3, side, side), "labels": labels})
    return batches


@pytest.mark.parametrize(("count", "learns"), [(2, 10), (4, 12), (8, 17)])
def test_they_are_left_out_until_more_is_known(count: int, learns: int) -> None:
    """With all of them it takes two sizes more for each: 12, 24 and 23 steps of these."""
    data = images(count)
    plain = train(Detector, data, None, loss_of)
    budget = plain.budget(0.7)
    done = train(Detector, data, budget, loss_of)
    assert equal(plain, done)
    assert max(done.peaks) <= budget
    assert done.mimose is not None
    records = list(done.mimose.records)
    assert sum(record.sheltered for record in records) <= learns
    for record, peak in zip(records, done.peaks, strict=True):
        if not record.sheltered:
            assert record.predicted_peak_bytes is not None
            assert abs(record.predicted_peak_bytes - peak) <= 0.005 * peak


def test_what_all_of_them_come_to_is_bounded_too() -> None:
    """Of each so many were seen, but never of all at once."""
    data = images(12)
    most = {**data[-1], "labels": [{"boxes": torch.rand(11, 4)} for _ in range(12)]}
    done = train(Detector, [*data, most], "1GB", loss_of)
    assert done.mimose is not None
    *records, last = done.mimose.records
    assert any(record.predicted_peak_bytes is not None for record in records[-5:])
    assert last.predicted_peak_bytes is None
