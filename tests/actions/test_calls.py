"""What a patched unit does when it is called: by the plan, and out of everybody else's way."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mimose.actions.patch import is_patched
from tests.helpers.counting import ForwardCounter, flops
from tests.helpers.models import Batch, TinyNested, TinyText, text_batch
from tests.helpers.recording import alive_before_backward, model_loss, patched, recorded, shelter_of


def gradients(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Every gradient after one step from a fixed seed."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    model_loss(model, batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def runs(model: nn.Module, batch: Batch) -> dict[str, int]:
    """How often each child of a unit ran in one step."""
    counter = ForwardCounter(model)
    try:
        gradients(model, batch)
    finally:
        counter.remove()
    return counter.calls


def test_exactly_the_planned_units_are_recomputed() -> None:
    """Children of the others run once."""
    model, batch = TinyText(layers=3), text_batch()
    with patched(model) as (_, session):
        session.arm({"layers.1": "recompute"}, None)
        calls = runs(model, batch)
    assert [calls[f"layers.{i}.qkv"] for i in range(3)] == [1, 2, 1]


def test_without_a_session_that_is_armed_nothing_happens() -> None:
    """Before the first step, between steps, and after disarming."""
    model, batch = TinyText(layers=2), text_batch()
    with patched(model) as (units, session):
        assert all(runs(model, batch)[f"layers.{i}.qkv"] == 1 for i in range(2))
        session.arm(shelter_of(units), None)
        session.disarm()
        assert all(runs(model, batch)[f"layers.{i}.qkv"] == 1 for i in range(2))


def test_without_gradients_nothing_is_recomputed_or_kept() -> None:
    """Under `no_grad` and `inference_mode` an armed unit runs its own forward."""
    model, batch = TinyText(layers=2, dropout=0.0), text_batch()
    expected = model_loss(model, batch).detach()
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = model_loss(model, batch)
            assert torch.equal(loss, expected)
            assert not loss.requires_grad


def test_units_in_eval_mode_are_recomputed() -> None:
    """Training is not the gate: Lightning leaves pretrained modules in eval mode, and they save as much."""
    model, batch = TinyText(layers=2).eval(), text_batch()
    with patched(model) as (_, session):
        session.arm({"layers.0": "recompute"}, None)
        assert runs(model, batch)["layers.0.qkv"] == 2


def test_a_unit_inside_a_recomputed_one_is_left_alone() -> None:
    """Even if a plan named both: the outer region's recomputation saves what its forward would have."""
    model, batch = TinyNested(), text_batch()
    plain = gradients(model, batch)
    with patched(model, ["stages.*", "*.mlp"]) as (units, session):
        session.arm({unit.name: "recompute" for unit in units}, None)
        assert equal(gradients(model, batch), plain)


class Uses(nn.Module):
    """A layer that contains a part it shares with others."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.linear(x).relu()).relu()


@pytest.mark.parametrize("outer", ["a", "b"])
@pytest.mark.parametrize("recording", [False, True])
def test_a_part_that_is_shared_between_units_may_be_called_in_a_region_and_outside(outer: str, recording: bool) -> None:
    """It has one name, so a plan may act on it and on another unit that calls it, too."""
    part = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    model = nn.Sequential()
    model.a, model.b = Uses(part), Uses(part)
    x = torch.randn(4, 8)

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        return model.b(model.a(x)).sum()

    loss().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if recording:
        torch.manual_seed(0)
        recorded(model, x, ["a", "b", "a.shared"], lambda m, b: m.b(m.a(b)).sum())
    else:
        with patched(model, ["a", "b", "a.shared"]) as (_, session):
            session.arm({outer: "recompute", "a.shared": "recompute"}, None)
            loss().backward()
    assert equal([p.grad for p in model.parameters() if p.grad is not None], plain)


class OwnCheckpoint(TinyText):
    """Its author checkpoints the first layer."""

    reentrant = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x: Any = self.embed(input_ids)
        x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant)
        for layer in self.layers[1:]:
            x = layer(x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


def test_a_users_own_checkpoint_is_respected_and_named_once() -> None:
    """The unit inside is recomputed by its author alone; gradients are exact; one warning, however many steps."""
    model, batch = OwnCheckpoint(), text_batch()
    plain = gradients(model, batch)
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        with pytest.warns(UserWarning, match=r"layers\.0.*checkpoint") as caught:
            assert equal(gradients(model, batch), plain)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(gradients(model, batch), plain)
            assert runs(model, batch)["layers.0.qkv"] == 2


def test_a_users_own_checkpoint_is_no_call_of_a_unit() -> None:
    """In a recorded step neither its forward nor its recomputation is mistaken for one; the others are seen."""
    model, batch = OwnCheckpoint(), text_batch()
    plain = gradients(model, batch)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"layers\.0"):
        trace = recorded(model, batch)
    assert equal([p.grad for p in model.parameters() if p.grad is not None], plain)
    assert [call.key for call in trace.calls if call.parent is None] == ["layers.1", "layers.2"]


def test_a_users_own_reentrant_checkpoint_is_respected() -> None:
    """The old kind runs its forward without gradients and again inside backward."""
    model, batch = OwnCheckpoint(), text_batch()
    model.reentrant = True
    plain = gradients(model, batch)
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        assert equal(gradients(model, batch), plain)
        assert runs(model, batch)["layers.0.qkv"] == 2


@pytest.mark.parametrize("record", [False, True])
def test_functional_transforms_pass_through(record: bool) -> None:
    """`torch.func.grad` refuses saved-tensor hooks, so units inside it run their own forward, and are not recorded."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(3, 4)

    def slopes() -> dict[str, torch.Tensor]:
        return torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).pow(2).sum())(parameters)

    expected, found = slopes(), []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found.append(slopes())
        return model(x).sum()

    if record:
        assert [call.key for call in recorded(model, x, None, loss).calls] == ["0", "1"]
    else:
        with patched(model) as (units, session):
            session.arm(shelter_of(units), None)
            loss(model, x).backward()
    assert all(torch.equal(found[0][name], expected[name]) for name in expected)


def test_a_loop_of_vmap_passes_through() -> None:
    """Gradients per sample."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).pow(2).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    x = torch.randn(5, 4)
    expected = per_sample(parameters, x)
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        found = per_sample(parameters, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_forwards_in_one_step() -> None:
    """A contrastive pair: both are recomputed, each with its own random numbers."""
    model, batches = TinyText(layers=2), (text_batch(seed=1), text_batch(seed=2))

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        sum(model_loss(model, batch) for batch in batches).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = step()
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        assert equal(step(), plain)


def test_recomputing_costs_operations_and_frees_memory() -> None:
    """The point of it."""
    model, batch = TinyText(layers=3), text_batch(4, 32)
    plain = flops(lambda: gradients(model, batch))
    keep = alive_before_backward(model, batch, {})
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        assert plain < flops(lambda: gradients(model, batch)) < 1.5 * plain
    assert alive_before_backward(model, batch, shelter_of(units)) < keep / 2


def test_an_error_in_a_unit_leaves_the_session_usable() -> None:
    """The next forward is recomputed as planned."""
    model, batch = TinyText(layers=2), text_batch()
    with patched(model) as (units, session):
        session.arm(shelter_of(units), None)
        with pytest.raises(IndexError):
            model_loss(model, {**batch, "input_ids": batch["input_ids"] + 100})
        with pytest.raises(RuntimeError):
            model.layers[0](torch.zeros(2, 3, 5))
        assert session.inside == 0
        assert runs(model, batch)["layers.0.qkv"] == 2


def test_patching_only_reaches_the_units() -> None:
    """Nothing else in the model is touched."""
    model = TinyText(layers=2)
    with patched(model) as (units, _):
        names = {unit.name for unit in units}
        assert {name for name, module in model.named_modules() if is_patched(module)} == names
    assert not any("forward" in vars(module) for module in model.modules())
