"""Hugging Face caches are off during training, and as before afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mimose.actions.caches import CacheSwitch, checkpointed_layers
from tests.helpers.hub import bert, gpt2, language, t5, translation


def configs(model: nn.Module) -> list[bool]:
    """`use_cache` of every config in the tree."""
    return [m.config.use_cache for m in model.modules() if hasattr(getattr(m, "config", None), "use_cache")]


@pytest.mark.parametrize(("make", "batch_of"), [(gpt2, language), (t5, translation)])
def test_caches_are_off_and_come_back(make: type, batch_of: type) -> None:
    """No cache is returned in training; every config of the tree is restored."""
    model, batch = make(), batch_of(2, 8)
    before = configs(model)
    assert any(before)
    assert model(**batch).past_key_values is not None
    switch = CacheSwitch()
    switch.off(model)
    assert not any(configs(model))
    assert model(**batch).past_key_values is None
    switch.restore()
    assert configs(model) == before
    assert model(**batch).past_key_values is not None


def test_a_cache_that_was_off_stays_off() -> None:
    """Restoring puts back what was found, not what is usual."""
    model = gpt2()
    model.config.use_cache = False
    switch = CacheSwitch()
    switch.off(model)
    switch.restore()
    assert model.config.use_cache is False


def test_switching_off_twice_restores_the_first_value() -> None:
    """A second fit may begin before the first was torn down."""
    model = t5()
    before = configs(model)
    switch = CacheSwitch()
    switch.off(model)
    switch.off(model)
    switch.restore()
    switch.restore()
    assert configs(model) == before


@pytest.mark.parametrize("first", [0, 1])
def test_of_models_that_share_a_config_the_last_one_switches_it_on_again(first: int) -> None:
    """In whatever order they go."""
    model, other = gpt2(), gpt2()
    other.config = model.config
    switches = CacheSwitch(), CacheSwitch()
    for switch, each in zip(switches, (model, other), strict=True):
        switch.off(each)
    switches[first].restore()
    assert model.config.use_cache is False
    switches[1 - first].restore()
    assert model.config.use_cache is True


def test_models_without_a_config_are_fine() -> None:
    """Or with one that has no such switch."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.config = {"use_cache": True}
    switch = CacheSwitch()
    switch.off(model)
    switch.restore()
    assert model.config == {"use_cache": True}
    assert torch.is_grad_enabled()


def test_layers_that_checkpoint_themselves_are_found() -> None:
    """Hugging Face's own switch."""
    model = bert()
    assert checkpointed_layers(model) == []
    # transformers 5 renamed both and warns of the old names.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    found = checkpointed_layers(model)
    assert [name for name in found if name.startswith("bert.encoder.layer")] == [
        f"bert.encoder.layer.{i}" for i in range(3)
    ]
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    assert checkpointed_layers(model) == []
