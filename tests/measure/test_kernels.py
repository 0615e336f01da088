"""Sizes from which on kernels are others: none is planned by what was measured of the other ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_mimose.measure.kernels import kernels_turn_at
from tests.helpers.architectures import equal, train
from tests.helpers.models import Points

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as decide about a convolution by a point."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Transposed(Points):
    """The same with what spreads a point."""

    convolution = nn.ConvTranspose2d


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model", [Points, Transposed])
def test_a_batch_of_sixteen_is_measured_before_it_is_planned(model: type[Points]) -> None:
    """On one thread it takes oneDNN's kernels, which take copies of what they are given."""
    rows = (15, 4, 10, 13, 8, 15, 16, 16, 12)
    batches = [{"x": torch.randn(n, 16, 12, 12, generator=torch.Generator().manual_seed(n))} for n in rows]
    plain = train(model, batches, loss_fn=lambda model, batch: model(batch["x"]))
    more = plain.peaks[6] - plain.peaks[5]
    assert more > 1.5 * (plain.peaks[3] - plain.peaks[2]) / 3  # or there is nothing to see
    budget = plain.budget(0.7)
    ours = train(model, batches, budget, lambda model, batch: model(batch["x"]))
    assert equal(plain, ours)
    assert max(ours.peaks) <= budget
    records = ours.mimose.records
    assert not records[5].sheltered
    assert records[6].sheltered


@pytest.mark.usefixtures("one_thread")
def test_which_sizes_these_are() -> None:
    """By the device, the filters and the threads there are."""
    point, wide = nn.Conv2d(4, 4, 1), nn.Conv1d(4, 4, 3)
    assert kernels_turn_at(nn.Sequential(point, wide), CPU) == {"batch": (2, 16)}
    assert kernels_turn_at(wide, CPU) == {"batch": (2,)}
    assert kernels_turn_at(nn.ConvTranspose1d(4, 4, 1), CPU) == {"batch": (16,)}
    assert kernels_turn_at(nn.Conv3d(4, 4, (3, 1, 1)), CPU) == {"batch": (16,)}
    assert kernels_turn_at(nn.Conv3d(4, 4, (1, 1, 3)), CPU) == {"batch": (2,)}
    assert kernels_turn_at(nn.Conv2d(4, 4, 1, stride=2), CPU) == {"batch": (2,)}
    assert kernels_turn_at(nn.Conv2d(4, 4, 1, groups=2), CPU) == {"batch": (16,)}
    assert kernels_turn_at(nn.Conv2d(4, 4, 3, groups=2), CPU) == {}
    assert kernels_turn_at(nn.ConvTranspose2d(4, 4, 4), CPU) == {}
    assert kernels_turn_at(nn.Linear(4, 4), CPU) == {}
    assert kernels_turn_at(point, torch.device("meta")) == {}
    torch.set_num_threads(2)
    assert kernels_turn_at(point, CPU) == {"batch": (2,)}
