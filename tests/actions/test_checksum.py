"""Equal bits give equal numbers, whatever the layout; other bits give others; nothing large is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_mimose.actions.checksum import _of_some, _weighted, checksum, sample
from lightning_mimose.measure.meters.profiler import ProfilerMeter

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_makes_a_difference(dtype: torch.dtype) -> None:
    one = torch.ones(5, 7).to(dtype)
    other = one.clone()
    assert checksum(one) == checksum(other)
    other[3, 4] = 0
    assert checksum(one) != checksum(other)


def test_order_and_sign_of_zero_make_one() -> None:
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_what_an_accelerator_adds_up_knows_every_bit(dtype: torch.dtype) -> None:
    """Signs, and the lowest bits, at whichever place, of one and of two elements in one or in two pieces."""
    numbers = torch.arange(1, 70_001).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    known = {_weighted(numbers)}
    for sign in (True, False):
        for places in ([0], [1], [2], [65_535], [65_536], [65_537], [0, 1], [1, 2], [3, 65_536], [65_536, 65_539]):
            changed = numbers.clone().view(bits)
            changed[places] ^= torch.iinfo(bits).min if sign else 1
            known.add(_weighted(changed.view(dtype)))
    assert len(known) == 21


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.T,
    lambda t: t[:, ::2],
    lambda t: t[2:5, 1:3],
    lambda t: t[:1].expand(6, 8),
    lambda t: t.unflatten(1, (2, 4)).permute(2, 0, 1),
    lambda t: t.flatten().unfold(0, 8, 4),
    lambda t: t[:0],
    lambda t: t[0, 0],
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_count_as_what_they_show(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """And what the storage holds besides does not."""
    base = torch.randn(6, 8)
    shown, again = view(base), view(base.clone())
    assert checksum(shown) == checksum(again)
    if shown.numel():
        again.reshape(-1)
        assert checksum(shown) != checksum(view(base + 1))


@pytest.mark.parametrize("read", [lambda t: sample(t, whole=True), sample, _of_some], ids=["whole", "sample", "some"])
@pytest.mark.parametrize("view", VIEWS)
def test_samples_of_small_tensors_are_all_of_them(
    view: Callable[[torch.Tensor], torch.Tensor], read: Callable[[torch.Tensor], int]
) -> None:
    """Of what they show, and of nothing besides."""
    base = torch.randn(6, 8)
    found = read(view(base)) if view(base).numel() else 0
    for index in range(base.numel()):
        other, shows = base.clone(), torch.zeros(6, 8, dtype=torch.bool)
        other.view(-1)[index] += 1
        shows.view(-1)[index] = True
        if view(base).numel():
            assert (read(view(other)) != found) == bool(view(shows).any())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.T, lambda t: t[:, :700], lambda t: t[:, ::2]])
def test_samples_of_large_tensors_allocate_nothing(view: Callable[[torch.Tensor], torch.Tensor], whole: bool) -> None:
    """And are the same again, and not those of another tensor."""
    base = torch.randn(3000, 1024)
    copy = base.clone()
    meter = ProfilerMeter()
    meter.start()
    found = sample(view(base), whole=whole)
    assert max(interval.peak_bytes for interval in meter.stop()) == 0
    assert found == sample(view(copy), whole=whole) != sample(view(copy * 2), whole=whole)
    copy[-1, 0] += 1
    if whole and view(base).stride(-1) == 1:
        assert found != sample(view(copy), whole=whole)
    assert _of_some(view(base)) is not None


def test_a_sample_of_what_is_not_there_is_nothing() -> None:
    """A parameter whose storage was freed, as FSDP2 does; a tensor without data."""
    tensor = torch.randn(100)
    tensor.untyped_storage().resize_(0)
    assert sample(tensor) == sample(torch.empty(3, device="meta")) == sample(torch.empty(0)) == 0


def test_what_was_read_can_be_resized() -> None:
    """As FSDP2 does with the parameters that it gathers; a storage that NumPy has seen could not be."""
    tensor = torch.randn(100)
    checksum(tensor)
    tensor.untyped_storage().resize_(0)


def test_reading_needs_no_copy() -> None:
    tensor = torch.randn(1 << 20)
    meter = ProfilerMeter()
    meter.start()
    checksum(tensor)
    checksum(tensor.view(1024, 1024).T)
    assert max(interval.peak_bytes for interval in meter.stop()) < 4096
