"""Digests of gradients: equal for equal bits, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose.bench import digest as module
from lightning_mimose.bench.digest import digest


def model_with(*gradients: torch.Tensor | None) -> nn.Module:
    """A model whose parameters have these gradients."""
    zeros = [torch.zeros(10) if gradient is None else torch.zeros_like(gradient.to_dense()) for gradient in gradients]
    parameters = nn.ParameterList(map(nn.Parameter, zeros))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_bit_changes_it_wherever_it_is(dtype: torch.dtype) -> None:
    """Also the sign of a zero, which no comparison of numbers sees, and two of them."""
    gradient = torch.zeros(64, dtype=dtype)
    known = {digest(model_with(gradient))}
    for place in range(64):
        for other in (place, (place + 7) % 64):
            changed = gradient.clone()
            numbers = torch.view_as_real(changed) if dtype.is_complex else changed
            numbers[place] = -numbers[place]
            if other != place:
                numbers[other] = -numbers[other]
            known.add(digest(model_with(changed)))
    assert len(known) == 1 + 2 * 64


def test_numbers_that_are_each_others_bits_differ() -> None:
    """A shift that repeats the sign would take both for the same."""
    bits = torch.tensor([0x3FF123456789ABCD])
    mixed = bits * -7046029254386353131
    inverse = pow(-7046029254386353131 % 2**64, -1, 2**64)
    other = (~mixed) * (inverse - 2**64 if inverse >= 2**63 else inverse)
    assert digest(model_with(bits.view(torch.float64))) != digest(model_with(other.view(torch.float64)))


def test_places_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two elements that changed places, within a piece and across pieces, and gradients that did."""
    monkeypatch.setattr(module, "CHUNK", 4)
    first, second = torch.arange(1.0, 11.0), torch.arange(21.0, 31.0)
    known = digest(model_with(first, second))
    for one, other in ((0, 1), (0, 4), (1, 9)):
        swapped = first.clone()
        swapped[one], swapped[other] = first[other], first[one]
        assert digest(model_with(swapped, second)) != known
    assert digest(model_with(second, first)) != known


def test_a_gradient_that_is_missing_is_not_one_of_zeros() -> None:
    """And sparse ones are looked at as a whole."""
    assert digest(model_with(None)) != digest(model_with(torch.zeros(10)))
    dense = torch.tensor([0.0, 2.0, 0.0])
    assert digest(model_with(dense.to_sparse())) == digest(model_with(dense))
