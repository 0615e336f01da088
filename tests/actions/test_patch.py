"""Patching `forward`: in force while it should be, and without a trace afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import Handler, is_patched, patch, unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.units import find_units
from tests.helpers.models import TinyText


def doubled(original: Any) -> Handler:
    """A handler that shows that it ran."""
    return lambda args, kwargs: 2 * original(*args, **kwargs)


def test_the_handler_runs_in_the_place_of_forward() -> None:
    """Also by `forward` itself; hooks of the module stay outside and run once."""
    layer, x, seen = nn.Linear(2, 2), torch.randn(3, 2), []
    plain = layer(x)
    layer.register_forward_hook(lambda *_: seen.append(1))
    patch(layer, doubled)
    assert is_patched(layer)
    assert torch.equal(layer(x), 2 * plain)
    assert torch.equal(layer.forward(x), 2 * plain)
    assert seen == [1]


def test_nothing_is_left_after_unpatching() -> None:
    """No `forward` in `vars`, the class, its forward and the keys as before."""
    layer = nn.Linear(2, 2)
    before, kind, forward, keys = dict(vars(layer)), type(layer), nn.Linear.forward, list(layer.state_dict())
    patch(layer, doubled)
    assert list(layer.state_dict()) == keys
    assert type(layer) is kind
    unpatch(layer)
    assert vars(layer) == before
    assert "forward" not in vars(layer)
    assert nn.Linear.forward is forward
    assert not is_patched(layer)


def test_unpatching_twice_or_what_was_never_patched_is_harmless() -> None:
    """Cleaning up may happen on several paths."""
    layer = nn.Linear(2, 2)
    unpatch(layer)
    patch(layer, doubled)
    unpatch(layer)
    unpatch(layer)
    assert "forward" not in vars(layer)


def with_own_forward() -> tuple[nn.Linear, Any]:
    """A layer whose instance has a forward of its own (as LoRA or quantization tools set it)."""

    def own(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x) + 1

    layer = nn.Linear(2, 2)
    layer.forward = types.MethodType(own, layer)
    return layer, layer.forward


def test_an_instances_own_forward_is_used_and_restored() -> None:
    """The very same object stands there again."""
    layer, own = with_own_forward()
    x = torch.randn(3, 2)
    plain = layer(x)
    before = dict(vars(layer))
    patch(layer, doubled)
    assert torch.equal(layer(x), 2 * plain)
    unpatch(layer)
    assert vars(layer)["forward"] is own
    assert vars(layer) == before
    assert torch.equal(layer(x), plain)


def test_a_deep_copy_runs_its_own_weights_and_its_own_forward() -> None:
    """What SWA and EMA copy during training: neither patched nor tied to the original."""
    for layer in (nn.Linear(2, 2), with_own_forward()[0]):
        x = torch.randn(3, 2)
        plain = layer(x)
        patch(layer, doubled)
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        assert torch.equal(twin(x), plain)
        assert not is_patched(twin)
        unpatch(layer)
        assert torch.equal(twin(x), plain)
        assert list(twin.state_dict()) == list(layer.state_dict())


def test_a_copy_trains_its_own_weights() -> None:
    """Gradients of the copy's forward arrive at the copy."""
    layer = nn.Linear(2, 2)
    patch(layer, doubled)
    twin = copy.deepcopy(layer)
    twin(torch.randn(3, 2)).sum().backward()
    assert twin.weight.grad is not None
    assert layer.weight.grad is None
    unpatch(layer)


def test_a_copy_of_a_patched_module_can_be_patched_itself() -> None:
    """Training goes on with the copy; afterwards it is as clean as any."""
    for layer in (nn.Linear(2, 2), with_own_forward()[0]):
        x, own = torch.randn(3, 2), "forward" in vars(layer)
        plain = layer(x)
        patch(layer, doubled)
        twin = copy.deepcopy(layer)
        patch(twin, doubled)
        assert torch.equal(twin(x), 2 * plain)
        unpatch(twin)
        unpatch(layer)
        assert torch.equal(twin(x), plain)
        assert ("forward" in vars(twin)) is own


def test_a_patched_module_can_be_pickled() -> None:
    """As `ddp_spawn` and `torch.save(model)` do; what comes back computes as the plain module."""
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    plain = layer(x)
    patch(layer, doubled)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), plain)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), plain)
    unpatch(layer)


def test_a_patched_model_can_be_copied_and_pickled() -> None:
    """With the real handlers, in the middle of an armed session."""
    model, session = TinyText(layers=2, dropout=0.0), Session()
    units = find_units(model)
    for unit in units:
        patch_unit(unit, session)
    session.arm({"layers.0": "recompute"}, None)
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
    loss = model(**batch).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch).loss, loss)
        assert not any(is_patched(module) for module in twin.modules())
    for unit in units:
        unpatch(unit.module)


def test_a_model_that_is_dropped_while_patched_is_freed() -> None:
    """Who forgets to close must not leak the model."""
    model, session = TinyText(layers=2), Session()
    for unit in find_units(model):
        patch_unit(unit, session)
    session.arm({"layers.0": "recompute"}, None)
    model(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, dtype=torch.long)).loss.backward()
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in gone[:1])


@pytest.mark.parametrize("own", [False, True])
def test_a_handler_is_passed_by_while_its_switch_is_off(own: bool) -> None:
    """And asked again as soon as it is on, or there is somewhere to stop; also where the instance had a forward."""
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    if own:
        layer.forward = lambda x: x - 1  # type: ignore[method-assign]
    plain, switch = layer(x), SimpleNamespace(armed=False, stops=None)
    patch(layer, doubled, switch)
    assert torch.equal(layer(x), plain)
    switch.armed = True
    assert torch.equal(layer(x), 2 * plain)
    switch.armed, switch.stops = False, object()
    assert torch.equal(layer(x), 2 * plain)


@pytest.mark.parametrize("own", [False, True])
def test_a_forward_that_was_put_above_ours_stays(own: bool) -> None:
    """And calls what was there before us, once we are gone and even when we are back."""
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    plain = layer(x)
    if own:
        before = layer.forward
        layer.forward = lambda x: before(x) + 1  # type: ignore[method-assign]
        plain = plain + 1
    for times in range(1, 4):
        patch(layer, doubled)
        ours = layer.forward
        layer.forward = lambda x, ours=ours: ours(x) - 5  # type: ignore[method-assign]
        # Ours of the earlier times are not in force: what was above them is what we act on.
        below = plain - 5 * (times - 1)
        torch.testing.assert_close(layer(x), 2 * below - 5)
        unpatch(layer)
        torch.testing.assert_close(layer(x), below - 5)
        assert layer.forward is not ours
