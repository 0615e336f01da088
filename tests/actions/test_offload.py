"""Offloading one unit: the bits of a plain backward pass, whatever is done with the graph; and no trace of it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_mimose.actions.offload import SMALL_BYTES, HostMemory, Offloader

Function = Callable[..., Tensor]
CPU = torch.device("cpu")


def matrix(rows: int = 64, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, requires_grad=True)


def moved(function: Function, *inputs: Tensor, memory: HostMemory | None = None) -> Tensor:
    """What a function returns whose saved tensors are on the host."""
    offloader = Offloader(memory or HostMemory(1 << 30), CPU)
    offloader.begin()
    with offloader.around(inputs):
        out = function(*inputs)
    offloader.ran(out)
    offloader.ran(None)  # the next unit: from here on the originals are gone
    return out


def chain(x: Tensor, w: Tensor) -> Tensor:
    y = functional.gelu(x @ w)
    left, right = y.chunk(2, dim=1)
    return functional.softmax(left * right.sigmoid(), -1) @ w[:32]


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_the_same_bits(passes: int) -> None:
    """In every pass over a graph that is kept."""
    x, w = matrix(), matrix()
    plain = torch.autograd.grad(chain(x, w).square().sum(), [x, w])
    loss = moved(chain, x, w).square().sum()
    for number in range(passes):
        done = torch.autograd.grad(loss, [x, w], retain_graph=number + 1 < passes)
        assert all(map(torch.equal, plain, done))


def test_double_backward() -> None:
    x, w = matrix(), matrix()

    def second(out: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [w])[0]

    assert torch.equal(second(chain(x, w)), second(moved(chain, x, w)))


def test_memory_on_the_host_is_given_back() -> None:
    """With the graph, whether backward ran or not."""
    memory = HostMemory(1 << 30)
    x, w = matrix(), matrix()
    out = moved(chain, x, w, memory=memory)
    assert memory.used_bytes > 0
    out.sum().backward()
    del out
    gc.collect()
    assert memory.used_bytes == 0
    out = moved(chain, x, w, memory=memory)
    del out
    gc.collect()
    assert memory.used_bytes == 0


def test_views_of_one_storage_share_a_copy() -> None:
    """A q, k and v that one projection made are moved once."""
    memory = HostMemory(1 << 30)
    x = matrix(64, 192)

    def function(x: Tensor) -> Tensor:
        q, k, v = x.cumsum(0).chunk(3, dim=1)
        return (q * k).tanh() * v

    out = moved(function, x, memory=memory)
    whole, part = 64 * 192 * 4, 64 * 64 * 4
    assert memory.used_bytes == whole + part  # and tanh's result
    assert out.grad_fn is not None


@pytest.mark.parametrize("budget", [0, 40_000])
def test_what_the_host_has_no_room_for_stays(budget: int) -> None:
    memory = HostMemory(budget)
    x, w = matrix(), matrix()
    plain = torch.autograd.grad(chain(x, w).sum(), [x, w])
    out = moved(chain, x, w, memory=memory)
    assert memory.used_bytes <= budget
    assert all(map(torch.equal, plain, torch.autograd.grad(out.sum(), [x, w])))


def test_arguments_parameters_and_small_tensors_stay() -> None:
    memory = HostMemory(1 << 30)
    x, w = matrix(), matrix()
    moved(lambda x, w: x @ w, x, w, memory=memory)
    assert memory.used_bytes == 0
    small = torch.randn(SMALL_BYTES // 4 - 1, requires_grad=True)
    moved(lambda small: (small * 2).tanh().sigmoid(), small, memory=memory)
    assert memory.used_bytes == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_change_while_the_copy_may_still_run(late: bool) -> None:
    """The unit that runs next writes over a result: refused, as without. Once it is through, nothing can be harmed."""
    offloader, x = Offloader(HostMemory(1 << 30), CPU), matrix()
    offloader.begin()
    with offloader.around([x]):
        out = x.cumsum(0).tanh()
    offloader.ran(out)
    if late:
        offloader.ran(None)
    with torch.no_grad():
        out.zero_()
    if not late:
        offloader.ran(None)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), x)
    else:
        plain = torch.autograd.grad(x.cumsum(0).tanh().sum(), x)
        assert torch.equal(plain[0], torch.autograd.grad(out.sum(), x)[0])


@pytest.mark.parametrize("change", [lambda h: h.mul_(2), lambda h: h.detach().mul_(2), lambda h: h[:3].zero_()])
def test_a_change_in_place_is_refused_as_without(change: Callable[[Tensor], object]) -> None:
    def function(x: Tensor) -> Tensor:
        h = x.cumsum(0)
        out = h.sin()
        change(h)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(matrix()).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        moved(function, matrix()).sum().backward()


def test_a_change_behind_autograds_back_counts_as_without() -> None:
    """It is seen if it comes before the unit is done: copies are made at its end."""

    def function(x: Tensor) -> Tensor:
        h = x.cumsum(0)
        out = h.sin()
        h.data.mul_(2)
        return out

    x = matrix()
    plain = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(plain[0], torch.autograd.grad(moved(function, x).sum(), x)[0])


def test_a_backward_pass_inside_the_unit() -> None:
    """Nothing has been moved by then."""

    def function(x: Tensor) -> Tensor:
        h = x.cumsum(0).sin()
        (inner,) = torch.autograd.grad((h * h).sum(), h, retain_graph=True)
        return h * inner

    x = matrix()
    plain = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(plain[0], torch.autograd.grad(moved(function, x).sum(), x)[0])


def test_complex_and_other_dtypes_of_one_storage() -> None:
    def function(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.cumsum(0).reshape(64, 32, 2))
        return (z * z.conj()).real.exp() * z.imag.sin()

    x = (0.01 * matrix()).detach().requires_grad_()
    plain = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(plain[0], torch.autograd.grad(moved(function, x).sum(), x)[0])


def test_copies_are_fetched_before_they_are_needed() -> None:
    """When the backward of the unit that ran next begins; those of a pass that never asks for them are let go of."""
    offloader = Offloader(HostMemory(1 << 30), CPU)
    offloader.begin()
    x, w = matrix(), matrix()
    with offloader.around([x, w]):
        first = chain(x, w)
    offloader.ran(first)
    copies = [ref() for ref in offloader._waiting.moved]
    second = chain(first, w)
    offloader.ran(second)
    assert copies
    assert all(copy is not None and copy._arrived is None for copy in copies)
    fetched: list[bool] = []
    first.register_hook(lambda _: fetched.extend(copy is not None and copy._arrived is not None for copy in copies))
    torch.autograd.grad(second.sum(), first, retain_graph=True)  # no further
    assert fetched == [True] * len(copies)
    assert all(copy is not None and copy._arrived is None for copy in copies)
    plain = torch.autograd.grad(chain(chain(x, w), w).sum(), x)
    assert torch.equal(plain[0], torch.autograd.grad(second.sum(), x)[0])
