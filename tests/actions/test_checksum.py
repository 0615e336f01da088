"""Equal bits give equal numbers, whatever the layout; other bits give others; nothing large is allocated."""

from __future__ import annotations

import pytest
import torch

from lightning_mimose.actions.checksum import checksum
from lightning_mimose.measure.meter import ProfilerMeter

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


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[:, ::2],
        lambda t: t[2:5, 1:3],
        lambda t: t[:1].expand(6, 8),
        lambda t: t.unflatten(1, (2, 4)).permute(2, 0, 1),
        lambda t: t[:0],
        lambda t: t[0, 0],
    ],
)
def test_views_count_as_what_they_show(view: object) -> None:
    """And what the storage holds besides does not."""
    base = torch.randn(6, 8)
    shown = view(base)  # type: ignore[operator]
    again = view(base.clone())  # type: ignore[operator]
    assert checksum(shown) == checksum(again)
    if shown.numel():
        again.reshape(-1)
        shifted = view(base + 1)  # type: ignore[operator]
        assert checksum(shown) != checksum(shifted)


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
