"""Recomputation: the same gradients to the bit, the forward run as often as it must be, nothing kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.actions.recompute import recompute
from lightning_mimose.actions.state import WrittenState
from tests.helpers.models import MODELS, Block
from tests.helpers.recording import model_loss, patched, recorded, shelter_of

Run = Callable[..., Any]


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Every gradient and buffer after one step from a fixed seed."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's forward as a recomputed region."""
    return recompute(module.forward, args, kwargs, WrittenState(module))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-autocast"])
def test_gradients_are_equal_to_the_bit(name: str, autocast: bool) -> None:
    """Dropout, tensors by keyword only, dictionaries, nested and shared modules, BatchNorm; autocast or not."""
    make, batch_of = MODELS[name]
    model, batch = make(), batch_of()

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model_loss(model, batch)

    plain = gradients(model, loss)
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        assert equal(gradients(model, loss), plain)


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_blocks_can_be_recomputed_alone(name: str) -> None:
    """Any antichain is a plan: here the deepest units."""
    make, batch_of = MODELS[name]
    model, batch = make(), batch_of()
    plain = gradients(model, lambda: model_loss(model, batch))
    with patched(model) as (units, session):
        inner = {unit.parent for unit in units}
        session.arm({unit.name: "recompute" for i, unit in enumerate(units) if i not in inner}, None)
        assert equal(gradients(model, lambda: model_loss(model, batch)), plain)


class Attending(nn.Module):
    """Takes another path if it is given one tensor as query and as key, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.paths = nn.Linear(8, 8), SimpleNamespace(same=[])

    def forward(self, query: torch.Tensor, *, key: torch.Tensor) -> torch.Tensor:
        self.paths.same.append(query is key)
        return self.linear(query) * (1 if query is key else self.linear(key))


def test_a_tensor_that_is_given_twice_is_one_when_it_runs_again() -> None:
    """Under hooks as well, which give another tensor each time that they are asked."""
    block, x = Attending(), torch.randn(4, 8, requires_grad=True)

    def loss(given: Run) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
            return given(x, key=x).square().sum()

    plain = gradients(block, lambda: loss(block))
    block.paths.same.clear()
    assert equal(gradients(block, lambda: loss(lambda *args, **kwargs: region(block, *args, **kwargs))), plain)
    assert block.paths.same == [True, True]


class Odd(nn.Module):
    """Takes and returns structures of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.tally = SimpleNamespace(runs=0)  # a plain attribute would be put back around a recomputation

    def forward(
        self, state: Any, *more: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None, flag: str = "sum"
    ) -> dict[str, Any]:
        """A dictionary with a tensor, a tuple and what is no tensor."""
        self.tally.runs += 1
        x = self.dropout(self.linear(state["x"][0])) * scale
        for other in more:
            x = x + other
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return {"out": x, "pair": (x.exp(), None), "flag": flag}


def odd_loss(module: Odd, call: Run) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A loss through nested arguments, and the tensors that take gradients."""
    torch.manual_seed(1)
    leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    out = call(
        {"x": [leaves[0] * 1.0], "note": "text"},
        leaves[1] * 1.0,
        scale=0.5,
        mask=torch.rand(4, 8) > 0.5,
        flag="mean",
    )
    assert out["flag"] == "mean"
    assert out["pair"][1] is None
    return (out["out"].tanh() + out["pair"][0]).sum(), leaves


def test_structures_pass_through_unchanged() -> None:
    """Nested dictionaries and lists, keyword tensors, strings and numbers; gradients of all of them."""
    module = Odd()
    found = []
    for call in (module, lambda *a, **k: region(module, *a, **k)):
        torch.manual_seed(0)
        module.zero_grad()
        loss, leaves = odd_loss(module, call)
        loss.backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in module.parameters()])
    assert equal(*found)


def test_the_callers_arguments_are_left_alone() -> None:
    """Tensors are taken out of a copy of the structure, never out of the caller's own lists."""
    state = {"x": [torch.randn(4, 8, requires_grad=True)]}
    kept = state["x"][0]
    region(Odd(), state)
    assert state["x"][0] is kept


def test_the_forward_runs_once_more_per_backward() -> None:
    """Once in forward, once in backward; again for a second backward over the same graph; never in no_grad."""
    module = Odd()
    loss, _ = odd_loss(module, lambda *a, **k: region(module, *a, **k))
    assert module.tally.runs == 1
    loss.backward(retain_graph=True)
    assert module.tally.runs == 2
    loss.backward()
    assert module.tally.runs == 3


def test_a_recomputation_stops_at_the_last_tensor_it_needs() -> None:
    """Unless it is observed."""
    ends = []

    class Tail(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.exp().sin()
            ends.append(1)
            return x

    x = torch.randn(4, requires_grad=True)
    region(Tail(), x).sum().backward()
    assert ends == [1]


def test_a_region_in_which_nothing_needs_gradients_is_not_run_again() -> None:
    """A frozen region on data."""
    module = Odd().requires_grad_(False)
    out = region(module, {"x": [torch.randn(4, 8)]})
    assert not out["out"].requires_grad
    assert module.tally.runs == 1


def test_a_frozen_region_whose_input_needs_gradients_passes_them_on() -> None:
    """Frozen blocks save as much as any, and may be recomputed."""
    module = Odd().requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    region(module, {"x": [x]})["pair"][0].sum().backward()
    assert x.grad is not None
    assert module.tally.runs == 2


@pytest.mark.parametrize("by_keyword", [False, True])
def test_arguments_are_not_kept_alive_after_backward(by_keyword: bool) -> None:
    """Neither by a closure nor by the graph that is still referenced."""

    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * y).exp()

    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    given = x * 2
    gone = weakref.ref(given.untyped_storage())
    out = region(Product(), x=given, y=y) if by_keyword else region(Product(), given, y)
    del given
    out.sum().backward()
    gc.collect()
    assert gone() is None
    assert out is not None


def test_only_the_inputs_are_kept_between_forward_and_backward() -> None:
    """What the forward computes inside is free when it returns."""
    inside = []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            inside.append(weakref.ref(y.untyped_storage()))
            return y.sin().cos()

    out = region(Inner(), torch.randn(4, requires_grad=True))
    assert inside[0]() is None
    out.sum().backward()


def test_an_argument_changed_in_place_is_noticed() -> None:
    """Recomputing from a changed input would give wrong gradients: an error instead, for keyword tensors too."""

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * y).exp()

    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    out = region(Scale(), x, y=y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_an_error_in_forward_leaves_no_hooks() -> None:
    """It is raised as it is."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        region(Broken(), torch.randn(4, requires_grad=True))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_error_in_the_recomputation_is_raised_as_it_is() -> None:
    """With the state that it restored put back again."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if recomputing:
                raise KeyError("mine")
            return x.exp().sin()

    recomputing, module = False, Second()
    out = region(module, torch.randn(4, requires_grad=True))
    recomputing = True
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    assert module.count == 1


def test_an_observed_step_has_the_same_gradients() -> None:
    """Measuring during the recomputation changes nothing."""
    model, batch = MODELS["dict"][0](), MODELS["dict"][1]()
    plain = gradients(model, lambda: model_loss(model, batch))
    torch.manual_seed(0)
    recorded(model, batch)
    assert equal([p.grad for p in model.parameters() if p.grad is not None], plain)


def test_double_backward_through_a_region() -> None:
    """A gradient penalty."""
    block = Block(8, dropout=0.0)
    x = torch.randn(2, 3, 8, requires_grad=True)
    found = []
    for call in (block, lambda x: region(block, x)):
        block.zero_grad()
        (slope,) = torch.autograd.grad(call(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append([p.grad.clone() for p in block.parameters()])
    assert equal(*found)
