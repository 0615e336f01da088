"""Storages by number, and which are those of what is resident."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from lightning_mimose.measure.storages import Storages


def test_the_address_of_what_was_replaced_may_be_an_activations() -> None:
    """A storage that is gone is resident no more: the next one may lie at the same address."""
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(50)]
    storages = Storages(weights)
    assert all(storages.is_resident(weight.untyped_storage()) for weight in weights)
    old = {weight.untyped_storage()._cdata for weight in weights}
    weights.clear()
    made = [torch.zeros(8) for _ in range(200)]
    assert old & {each.untyped_storage()._cdata for each in made}
    assert not any(storages.is_resident(each.untyped_storage()) for each in made)


def test_what_takes_the_place_of_what_is_gone_is_resident() -> None:
    """Nothing is kept alive by that, and nothing is asked after the end."""
    model = nn.BatchNorm1d(4)
    asked = []

    def tell() -> list[torch.Tensor]:
        asked.append(len(asked))
        return [*model.parameters(), *model.buffers()]

    storages = Storages(tell(), renewed=tell)
    old = weakref.ref(model.running_mean.untyped_storage())
    model.weight.data = model.weight.data + 1
    model.running_mean = model.running_mean + 1
    assert old() is None
    for tensor in (model.weight, model.running_mean, model.bias):
        assert storages.is_resident(tensor.untyped_storage())
    assert asked == [0, 1]
    storages.clear()
    model.weight.data = model.weight.data + 1
    storages.is_resident(model.weight.untyped_storage())
    assert asked == [0, 1]


def test_what_a_step_puts_into_its_batch_is_an_activation() -> None:
    """Blocks may hand on a dictionary that begins as the batch, each with a result of its own in it."""
    model, batch = nn.Linear(4, 4), {"x": torch.ones(2, 4)}
    storages = Storages([*model.parameters(), batch["x"]], renewed=lambda: list(model.parameters()))
    assert storages.is_resident(batch["x"].untyped_storage())
    batch["x"] = model(batch["x"]).relu().detach() + 1
    gc.collect()
    model.weight.data = model.weight.data + 1
    assert not storages.is_resident(batch["x"].untyped_storage())
    assert storages.is_resident(model.weight.untyped_storage())
