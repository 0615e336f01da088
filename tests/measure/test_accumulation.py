"""Gradients are added up under a meter's mode as they are without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import FunctionCtx

from lightning_mimose.measure.meters.dispatch import DispatchMeter

SHAPE = (1, 4, 2, 3)
TURNED, LAST = (4, 1, 12, 4), (24, 1, 12, 4)
"""Strides of one image with its channels last: of what was a transposed matrix, and as a kernel writes it."""


class _Use(torch.autograd.Function):
    """Gives its input a gradient of some strides."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, strides: tuple[int, ...], keep: list[torch.Tensor]) -> torch.Tensor:
        ctx.strides, ctx.keep = strides, keep  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        given = torch.empty_strided(SHAPE, ctx.strides).copy_(gradient)
        if ctx.keep is not None:
            ctx.keep.append(given)
        return given, None, None


def summed(meter: DispatchMeter | None, held: bool) -> tuple[tuple[int, ...], list[float]]:
    """Strides and values of the sum of a tensor's two gradients, of which the first is held by somebody, or is not."""
    keep: list[torch.Tensor] | None = [] if held else None
    found: list[torch.Tensor] = []
    x = torch.linspace(0, 1, 24).reshape(SHAPE).requires_grad_()
    y = x * 2
    y.register_hook(lambda gradient: found.append(gradient.detach()))
    later = _Use.apply(y, LAST, None)
    loss = (later * 3).sum() + (_Use.apply(y, TURNED, keep).exp()).sum()
    if meter is not None:
        meter.start()
    try:
        loss.backward()
    finally:
        if meter is not None:
            meter.stop()
    if keep:
        assert keep[0].max() < found[0].max()  # what somebody holds is not written to
    return found[0].stride(), found[0].flatten().tolist()


@pytest.mark.parametrize("held", [False, True])
def test_the_sum_of_two_gradients_has_the_layout_that_it_has_without_a_mode(held: bool) -> None:
    """In place, so that of the first one, where only autograd holds that; else a new tensor's."""
    assert summed(DispatchMeter(), held) == summed(None, held)


def test_in_place_and_new_sums_differ_in_their_layout() -> None:
    """Otherwise there is nothing to be seen here."""
    assert summed(None, held=False)[0] == TURNED
    assert summed(None, held=True)[0] == LAST


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_without_strides_are_summed() -> None:
    """Nested ones, which say so only by an error."""
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], requires_grad=True)
    twice = rows * 2
    loss = sum(torch.nested.to_padded_tensor(twice * factor, 0.0).sum() for factor in (2, 3))
    meter = DispatchMeter()
    meter.start()
    try:
        torch.autograd.backward(loss)
    finally:
        meter.stop()
    assert rows.grad is not None
    assert [part.unique().tolist() for part in rows.grad.unbind()] == [[10.0], [10.0]]


def test_a_sum_takes_no_more_memory_than_without_a_mode() -> None:
    """The second gradient goes into the first one, so that both are all there ever is."""
    x = torch.ones(1000, requires_grad=True)
    y = x * 2
    loss = (y * 3).sum() + (y * 4).sum()
    meter = DispatchMeter()
    meter.start()
    try:
        loss.backward()
    finally:
        intervals = meter.stop()
    assert max(interval.peak_bytes for interval in intervals) < 3 * 4000
    assert x.grad is not None
    assert x.grad.unique().tolist() == [14.0]


@pytest.mark.parametrize("operation", ["gather", "index_select", "max", "topk"])
def test_what_was_chosen_from_gets_its_gradient_in_place(operation: str) -> None:
    """With the same bits, and with the memory of one tensor."""
    rows = torch.tensor([[3, 3, 1], [0, 2, 2]])
    choose: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gather": lambda x: x.gather(0, rows[:, :1].expand(2, 500)),
        "index_select": lambda x: x.index_select(0, rows[0]),
        "max": lambda x: x.max(0).values,
        "topk": lambda x: x.topk(2, 0).values,
    }

    def gradient(meter: DispatchMeter | None) -> tuple[torch.Tensor, int]:
        x = (torch.arange(20_000) * 0.7).sin().view(40, 500).requires_grad_()
        loss = choose[operation](x).square().sum()
        if meter is not None:
            meter.start()
        try:
            loss.backward()
        finally:
            intervals = meter.stop() if meter is not None else []
        assert x.grad is not None
        return x.grad, max((interval.peak_bytes for interval in intervals), default=0)

    (plain, _), (measured, peak_bytes) = gradient(None), gradient(DispatchMeter())
    assert torch.equal(plain, measured)
    chosen_bytes = choose[operation](torch.ones(40, 500)).nbytes
    assert peak_bytes <= plain.nbytes + 3 * chosen_bytes + 64 < 2 * plain.nbytes


@pytest.mark.parametrize("writes", ["scatter_add", "index_add"])
def test_what_a_hook_holds_is_not_written_on(writes: str) -> None:
    """Though it runs in the time of a node that writes on zeros of its own."""
    rows, ones = torch.tensor([0, 2]), torch.ones(2)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scatter_add": lambda counts: counts.scatter_add(0, rows, ones),
        "index_add": lambda counts: counts.index_add(0, rows, ones),
    }
    nodes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scatter_add": lambda x: x.gather(0, rows),
        "index_add": lambda x: x.index_select(0, rows),
    }
    counts, made = torch.zeros(4), list[torch.Tensor]()

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        made.append(calls[writes](counts))
        return kept

    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        chosen = nodes[writes](x)
    chosen.register_hook(lambda gradient: made.append(calls[writes](counts)))
    meter = DispatchMeter()
    meter.start()
    try:
        (chosen * 2).sum().backward()
    finally:
        meter.stop()
    assert counts.tolist() == [0.0] * 4
    assert made
    assert all(each.tolist() == [1.0, 0.0, 1.0, 0.0] for each in made)
