"""Lean saves inside one recomputed region: every pass over the graph gets the plain bits, and nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mimose.actions.lean.region import LeanRegion
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.actions.recompute import recompute
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.menu import GRADES


class Block(nn.Module):
    """Saves tensors of every kind: masks, views, results of operations that have recipes and of some that have not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(64, 32)
        self.gate: Callable[[Tensor], Tensor] = functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(self.up(self.norm(x)))
        left, right = h.chunk(2, dim=-1)
        y = functional.dropout(left.softmax(-1) * right.cumsum(-1), 0.2)
        return x + self.down(y)


def region(block: Block, x: Tensor) -> tuple[Tensor, LeanRegion]:
    state = WrittenState(block)
    observer = LeanRegion(Sites(), len(GRADES), state.parameters, [], lambda saves: None)
    torch.manual_seed(3)
    return recompute(lambda x: Block.forward(block, x), (x,), {}, state, observer), observer


GATES: list[Callable[[Tensor], Tensor]] = [
    functional.gelu,
    lambda h: h * torch.sigmoid(1.702 * h),  # which is saved before its source
    lambda h: torch.tanh(h) + h.sin(),
]


@pytest.mark.parametrize("gate", range(len(GATES)))
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_the_plain_ones(passes: int, gate: int) -> None:
    """In every pass; each runs the region again."""
    block, x = Block(), torch.randn(40, 32, requires_grad=True)
    block.gate = GATES[gate]
    wanted = [x, *block.parameters()]
    torch.manual_seed(3)
    plain = torch.autograd.grad(block(x).square().sum(), wanted)
    out, observer = region(block, x)
    loss = out.square().sum()
    for number in range(passes):
        done = torch.autograd.grad(loss, wanted, retain_graph=number + 1 < passes)
        assert all(map(torch.equal, plain, done))
        assert observer._uses == {}


def test_a_pass_over_a_part_of_the_graph_leaves_nothing() -> None:
    block, x = Block(), torch.randn(40, 32, requires_grad=True)
    out, observer = region(block, x)
    torch.autograd.grad(out.square().sum(), [block.down.weight], retain_graph=True)
    assert observer._uses == {}
    plain = torch.autograd.grad(out.square().sum(), x)
    assert len(plain) == 1


def test_what_the_recomputation_kept_dies_with_the_operations() -> None:
    """Recipes hold what they are made from; none outlives the pass."""
    block, x = Block(), torch.randn(400, 32, requires_grad=True)
    out, _ = region(block, x)
    out.sum().backward()
    gc.collect()
    large = [t for t in gc.get_objects() if type(t) is Tensor and t.shape[:1] == (400,) and t is not x]
    assert {id(t) for t in large} <= {id(out), id(x.grad)}


def test_nothing_to_differentiate() -> None:
    block, x = Block(), torch.randn(40, 32)
    with torch.no_grad():
        out, _ = region(block, x)
    assert not out.requires_grad


class Scaled(nn.Module):
    """Saves numbers in tensors without dimensions, of which some are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * functional.gelu(functional.silu(self.scale)).exp() * x.mean().tanh().square()


def test_numbers_without_dimensions() -> None:
    """A stand-in is of their shape as well."""
    block, x = Scaled(), torch.randn(40, 32, requires_grad=True)
    plain = torch.autograd.grad(block(x).square().sum(), [x, block.scale])
    state = WrittenState(block)
    observer = LeanRegion(Sites(), len(GRADES), state.parameters, [], lambda saves: None)
    out = recompute(lambda x: Scaled.forward(block, x), (x,), {}, state, observer)
    assert all(map(torch.equal, plain, torch.autograd.grad(out.square().sum(), [x, block.scale])))
