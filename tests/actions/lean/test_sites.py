"""What is known about places: where recipes are looked for in vain is passed over, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.lean.handles import Kept
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.sites import AGAIN, BUSY, MOST_SPOTS, SURE, Sites
from tests.helpers.lean import EVERYTHING, Pass, Watch, same_bits

CALLS = SURE + 2


def inputs(rows: int = 40) -> list[Tensor]:
    """Leaves."""
    torch.manual_seed(0)
    return [torch.randn(rows, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)]


def mixed(watch: Watch, x: Tensor, weight: Tensor) -> Tensor:
    """Products that are saved and never rebuilt, one of which something is rebuilt from, and such that are rebuilt."""
    one = watch(torch.addmm(x.sum(0), x, weight))
    wide = watch(functional.gelu(one))
    sine = watch(torch.sin(wide))
    return torch.cumsum(watch(torch.cumsum(sine, 0)) @ weight, 0).pow(3)


def gated(watch: Watch, x: Tensor, weight: Tensor) -> Tensor:
    """A view of a product is what something is rebuilt from."""
    gate, up = (x @ weight).view(-1, 2, 16).unbind(1)
    return torch.cumsum(watch(functional.silu(watch(gate))) * watch(up.cumsum(0)), 0).pow(3)


@pytest.mark.parametrize("function", [mixed, gated])
@pytest.mark.parametrize("grade", range(1, EVERYTHING + 1))
def test_later_calls_keep_and_rebuild_what_the_first_did(function: Callable[..., Tensor], grade: int) -> None:
    sites, plain = Sites(), Pass(function, inputs(), None)
    first = Pass(function, inputs(), grade, sites=sites)
    places = len(sites.checked)
    for rows in (40, 56, 72, 40):
        later = Pass(function, inputs(rows), grade, sites=sites)
        assert later.alive == first.alive
    assert same_bits(later.bits, plain.bits)
    assert len(sites.checked) == places
    assert max(sites.idle.values()) >= SURE


def test_another_branch_is_looked_at_anew() -> None:
    """The same operation saves as the same number, but others have run before it: here it can be rebuilt."""

    def branching(watch: Watch, x: Tensor, weight: Tensor, *, other: bool) -> Tensor:
        hidden = torch.cumsum(x, 0) if not other else functional.gelu(x.neg())
        return (watch(hidden) @ weight).exp()

    sites = Sites()
    for _ in range(CALLS):
        kept = Pass(lambda *given: branching(*given, other=False), inputs(), EVERYTHING, sites=sites)
    assert kept.alive == [True]
    rebuilt = Pass(lambda *given: branching(*given, other=True), inputs(), EVERYTHING, sites=sites)
    assert rebuilt.alive == [False]


def noisy(watch: Watch, x: Tensor, weight: Tensor, noise: Tensor | None) -> Tensor:
    """What is added is a tensor without gradients, of which no recipe is made, or a number."""
    return torch.cumsum(watch((x @ weight).sin() + (0.5 if noise is None else noise)) @ weight, 0).pow(3)


def test_what_was_in_vain_for_a_while_is_looked_at_again() -> None:
    """Operands without gradients make no other operation of it."""
    sites = Sites()

    def kept(noise: Tensor | None) -> list[bool]:
        return Pass(lambda *given: noisy(*given, noise), inputs(), EVERYTHING, sites=sites).alive

    assert kept(None) == [False]
    for _ in range(CALLS):
        assert kept(torch.randn(40, 32)) == [True]
    assert kept(None) == [False], "it was rebuilt once"
    sites = Sites()
    for _ in range(CALLS):
        assert kept(torch.randn(40, 32)) == [True]
    assert [False] in [kept(None) for _ in range(AGAIN + 1)]


def test_settling() -> None:
    sites, source, other = Sites(), Kept(torch.ones(3)), Kept(torch.ones(3))
    inner = Recipe(torch.relu, [source], 12, (3,), 1, 3.0)
    made = [Recipe(torch.relu, [inner], 12, (3,), 1, 3.0)]
    used, idle = (1, 1, 5, "SinBackward0"), (1, 2, 6, "ExpBackward0")
    for count in (1, 2):
        sites.settle([(used, (source, source)), (idle, (other, None))], made)
        assert sites.idle == {used: BUSY, idle: count}
    sites.settle([(used, (Kept(torch.ones(3)),))], [])
    assert sites.idle[used] == BUSY, "it may be needed again"
    sites.settle([(idle, (source,))], made)
    assert sites.idle[idle] == BUSY


def test_spots_that_never_come_again_are_not_remembered_for_ever() -> None:
    sites = Sites()
    for number in range(2 * MOST_SPOTS):
        sites.settle([((1, number, number, "SinBackward0"), ())], [])
        assert len(sites.idle) <= MOST_SPOTS + 1


def test_a_place_is_the_same_beside_a_meter_of_operations() -> None:
    """Which changes how a reshape is made: places that were compared beside it would be compared again, at a peak."""

    def reshaped(watch: Watch, x: Tensor, weight: Tensor) -> Tensor:
        parts = functional.gelu(x).permute(1, 0).reshape(4, 8, 40)
        return watch(parts + 1) * weight[:8, :1]

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    sites = Sites()
    with Meter():
        assert Pass(reshaped, inputs(), EVERYTHING, sites=sites).alive == [False]
    known = set(sites.checked)
    assert Pass(reshaped, inputs(), EVERYTHING, sites=sites).alive == [False]
    assert sites.checked == known
