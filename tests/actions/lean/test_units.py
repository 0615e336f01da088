"""Several units, calls and threads: what one saves is never rebuilt from another's graph."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from tests.helpers.lean import EVERYTHING, Watch, same_bits


def matrix(rows: int = 33, columns: int = 47) -> Tensor:
    """A leaf of an awkward size."""
    return torch.randn(rows, columns, requires_grad=True)


class Block(nn.Module):
    """A small unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)
        self.sites = Sites()
        self.lean = False

    def forward(self, x: Tensor) -> Tensor:
        """With lean saves, if they are on."""
        if not self.lean:
            return self.inner(x)
        with LeanSaves(self.sites, EVERYTHING).active():
            return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        """The unit itself."""
        return x + functional.dropout(self.last(functional.gelu(self.first(self.norm(x)))), 0.1, self.training)


def gradients(block: Block, run: Callable[[Block], list[Tensor]], *, lean: bool) -> list[Tensor]:
    """What a run gives, and the gradients that it leaves."""
    block.lean = lean
    block.zero_grad()
    torch.manual_seed(8)
    out = run(block)
    return [*(each.detach() for each in out), *(p.grad for p in block.parameters() if p.grad is not None)]


def called_twice(block: Block) -> list[Tensor]:
    """One loss."""
    out = block(block(torch.randn(40, 32)))
    out.sum().backward()
    return [out]


def two_forwards(block: Block) -> list[Tensor]:
    """And then two backwards."""
    outs = [block(torch.randn(40, 32)), block(torch.randn(24, 32))]
    for out in outs:
        out.square().sum().backward()
    return outs


def without_gradients_first(block: Block) -> list[Tensor]:
    """A forward that saves nothing changes nothing."""
    with torch.no_grad():
        before = block(torch.randn(40, 32))
    return [before, *two_forwards(block)]


def in_another_thread(block: Block) -> list[Tensor]:
    """Only the backward."""
    out = block(torch.randn(40, 32))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result()
    return [out]


def several_threads_at_once(block: Block) -> list[Tensor]:
    """Each over the same graph."""
    out = block(torch.randn(40, 32))
    weights = list(block.parameters())
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: torch.autograd.grad(out.sum(), weights, retain_graph=True), range(8))
        return [gradient for each in found for gradient in each]


def forwards_in_threads(block: Block) -> list[Tensor]:
    """A thread's graph is numbered by itself."""
    block.eval()
    inputs = [torch.randn(40, 32) for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(block, inputs))
    for out in outs:
        out.square().sum().backward()
    return outs


def lean_in_lean(block: Block) -> list[Tensor]:
    """The inner one takes what is its own."""
    if not block.lean:
        return called_twice(block)
    with LeanSaves(Sites(), EVERYTHING).active():
        out = block(torch.randn(40, 32))
        out = block(out)
    out.sum().backward()
    return [out]


RUNS = [
    called_twice,
    two_forwards,
    without_gradients_first,
    in_another_thread,
    several_threads_at_once,
    forwards_in_threads,
    lean_in_lean,
]


@pytest.mark.parametrize("run", RUNS)
def test_runs_that_are_not_one_forward_and_one_backward(run: Callable[[Block], list[Tensor]]) -> None:
    """Every bit is as without lean saves, the first time and the second."""
    block = Block()
    plain = gradients(block, run, lean=False)
    assert same_bits(gradients(block, run, lean=True), plain)
    assert block.sites.checked
    assert not block.sites.different
    assert same_bits(gradients(block, run, lean=True), plain)


@pytest.mark.parametrize("made", [functional.gelu, torch.relu, torch.neg, lambda x: (x + x).t().unsqueeze(0)])
def test_what_another_unit_made_is_kept(made: Callable[[Tensor], Tensor]) -> None:
    """Whether it has lean saves of its own or none."""
    x, w = matrix(), torch.ones((), requires_grad=True)
    for other in (True, False):
        sites, watch = Sites(), Watch()
        if other:
            with LeanSaves(Sites(), EVERYTHING).active():
                y = made(x)
        else:
            y = made(x)
        with LeanSaves(sites, EVERYTHING).active():
            out = watch(y) * w
        del y
        assert watch.alive() == [True]
        assert not sites.checked
        out.sum().backward()


def test_an_input_whose_start_has_changed_since() -> None:
    """The place was compared while nothing had changed yet."""
    sites, w = Sites(), matrix()
    for change in (0.0, 1.0):
        x = matrix()
        y = -x
        expected = y.detach().clone()
        with torch.no_grad():
            x.add_(change)
        with LeanSaves(sites, EVERYTHING).active():
            out = y * w
        (gradient,) = torch.autograd.grad(out.sum(), [w])
        assert torch.equal(gradient, expected)


def test_nothing_is_taken_over_afterwards() -> None:
    """The hooks end with the unit's forward, also when it fails."""
    saves = LeanSaves(Sites(), EVERYTHING)
    with pytest.raises(ZeroDivisionError), saves.active():
        1 / 0  # noqa: B018
    x = matrix()
    node: Any = functional.gelu(x).grad_fn
    assert node._saved_self is x


def test_only_evaluation_leaves_no_trace() -> None:
    """No gradients, nothing saved, nothing learned."""
    block = Block()
    block.lean = True
    with torch.no_grad():
        block(torch.randn(40, 32))
    assert block.sites == Sites()
