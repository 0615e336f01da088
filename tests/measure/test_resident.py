"""What is resident: parameters, buffers, gradients, optimizer state, batch."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.measure.resident import ResidentLedger, batch_bytes, batch_tensors
from lightning_mimose.parts import storage_bytes


def test_tied_weights_and_views_count_once() -> None:
    """Bytes of storages, not of tensors."""
    a, b = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    assert storage_bytes([a, a.view(2, 5), a[3:4], b]) == 40 + 24


def test_a_view_counts_its_whole_storage() -> None:
    """A slice keeps all of its storage alive."""
    assert storage_bytes([torch.zeros(100)[:1]]) == 400


def test_sparse_tensors_count_their_indices_and_values() -> None:
    """A sparse gradient has no storage of its own."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (5, 4), check_invariants=True)
    assert storage_bytes([sparse]) == 2 * 8 + 8 * 4


def test_compressed_sparse_batches_count_all_of_their_memory() -> None:
    """Torch makes the indices of both dimensions at once, and one of them is a view of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are "in beta state"
        batch = torch.eye(64).to_sparse_csr()
    held = {part.untyped_storage() for part in (batch.crow_indices(), batch.col_indices(), batch.values())}
    assert batch_bytes({"x": batch}) == sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
    assert batch_bytes({"x": batch}) > 65 * 8 + 64 * 8 + 64 * 4


@dataclass
class Batch:
    """A batch that pytree does not look into."""

    x: torch.Tensor
    extra: dict[str, Any]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6),
        {"x": torch.zeros(4), "y": [torch.zeros(2), 3, "text", None]},
        (torch.zeros(4), (torch.zeros(1), torch.zeros(1))),
        Batch(torch.zeros(4), {"y": torch.zeros(2)}),
    ],
    ids=["tensor", "dict", "tuple", "dataclass"],
)
def test_a_batch_of_any_structure_is_counted(batch: Any) -> None:
    """Six floats in every structure."""
    assert batch_bytes(batch) == 24
    assert sum(tensor.numel() for tensor in batch_tensors(batch)) == 6


def test_a_batch_encoding_is_counted() -> None:
    """A tokenizer's own mapping."""
    from transformers import BatchEncoding

    assert batch_bytes(BatchEncoding({"input_ids": torch.zeros(2, 8, dtype=torch.long)})) == 128


def test_a_slice_of_a_dataset_counts_as_its_own_part() -> None:
    """A batch that views the whole data set is not as large as that."""
    data = torch.zeros(1000, 4)
    assert batch_bytes([data[:10], data[:10]]) == 160


def test_an_expanded_tensor_counts_its_storage() -> None:
    """No more than there is."""
    assert batch_bytes(torch.zeros(1).expand(100)) == 4


def test_the_ledger_counts_parameters_buffers_state_and_gradients() -> None:
    """Tied weights once; state as soon as it is there."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    ledger = ResidentLedger(model, bucket_bytes=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger.watch([optimizer])
    parameters, buffers = (64 + 16) * 4, 16 * 4 + 8
    assert ledger.lasting_bytes() == parameters + buffers + 100
    assert ledger.gradient_bytes == 0
    assert ledger.gradient_capacity_bytes == parameters
    model(torch.randn(4, 8)).sum().backward()
    ledger.count_gradients()
    assert ledger.gradient_bytes == parameters
    optimizer.step()
    assert ledger.state_bytes() == parameters
    assert ledger.lasting_bytes() == 2 * parameters + buffers + 100


def test_refresh_notices_changed_parameters() -> None:
    """After a conversion to another precision the ledger is asked to count again."""
    model = nn.Linear(8, 8, bias=False)
    ledger = ResidentLedger(model)
    model.bfloat16()
    ledger.refresh()
    assert ledger.lasting_bytes() == 128


def test_state_that_comes_late_is_counted() -> None:
    """An optimizer that begins to keep averages after some updates (Lookahead)."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger = ResidentLedger(model)
    ledger.watch([optimizer])
    sum(layer(torch.randn(2, 4)).sum() for layer in model).backward()
    optimizer.step()
    assert ledger.state_bytes() == 20 * 64
    for parameter in model.parameters():
        optimizer.state[parameter]["slow"] = parameter.detach().clone()
    assert ledger.state_bytes() == 2 * 20 * 64


def test_gradients_are_followed_among_many_parameters() -> None:
    """Those freed at once, those that come late to a parameter which had none, and those that are freed again."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(100))
    ledger, each = ResidentLedger(model), 4 * 4 * 4

    def gradients(layers: slice) -> int:
        batch = torch.randn(2, 4)
        sum(layer(batch).sum() for layer in model[layers]).backward()
        ledger.count_gradients()
        return ledger.gradient_bytes // each

    assert [gradients(slice(0, 40)), gradients(slice(0, 40)), gradients(slice(39, 41))] == [40, 40, 41]
    model.zero_grad(set_to_none=True)
    assert [gradients(slice(70, 100)), gradients(slice(0, 100))] == [30, 100]
    model.zero_grad(set_to_none=True)
    ledger.count_gradients()
    assert ledger.gradient_bytes == 0


def test_gradients_that_came_while_parameters_were_trained_for_a_while() -> None:
    """A discriminator inside the model, frozen in every step of the generator's."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    ledger, other = ResidentLedger(model), model[1].weight
    other.requires_grad_(False)
    model[0](torch.randn(2, 4)).sum().backward()
    ledger.count_gradients()
    assert ledger.gradient_bytes == 64
    other.requires_grad_(True)
    model[1](torch.randn(2, 4)).sum().backward()
    other.requires_grad_(False)
    ledger.count_gradients()
    assert ledger.gradient_bytes == 128


def test_gradients_of_frozen_parameters_count_as_long_as_they_are_there() -> None:
    """Whatever has a gradient is resident, trained or not; only what is trained will get one."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    ledger, first = ResidentLedger(model), model[0].weight
    seen = []

    def look() -> None:
        ledger.count_gradients()
        seen.append((ledger.gradient_bytes, ledger.gradient_capacity_bytes, ledger.trained))

    look()
    model(torch.randn(2, 4)).sum().backward()
    look()
    first.requires_grad_(False)
    look()
    first.grad = None
    look()
    first.requires_grad_(True)
    look()
    both = (True, True)
    assert seen == [
        (0, 128, both),
        (128, 128, both),
        (128, 64, (False, True)),
        (64, 64, (False, True)),
        (64, 128, both),
    ]


def test_layers_frozen_and_unfrozen_in_a_large_model_are_noticed_at_once() -> None:
    """Whichever they are."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(100)))
    ledger, layer = ResidentLedger(model), model[37]
    layer.requires_grad_(False)
    ledger.count_gradients()
    assert ledger.gradient_capacity_bytes == 1584
    layer.requires_grad_(True)
    assert ledger.trains_more()
    ledger.count_gradients()
    assert ledger.gradient_capacity_bytes == 1600
    assert not ledger.trains_more()


def test_an_optimizer_that_is_replaced_counts_as_long_as_somebody_keeps_it() -> None:
    """A scheduler, for example; state that both have counts once, and an old one's fills no other's reserve."""
    model = nn.Linear(8, 8, bias=False)
    model.weight.grad = torch.ones(8, 8)
    ledger, weights = ResidentLedger(model), 256
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger.watch([first])
    first.step()
    assert ledger.state_bytes() == weights
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger.watch([second], growing_bytes=4 * weights)
    assert ledger.optimizers == (second,)
    assert (ledger.state_bytes(), ledger.unfilled_bytes()) == (weights, 4 * weights)
    second.step()
    assert (ledger.state_bytes(), ledger.unfilled_bytes()) == (2 * weights, 3 * weights)
    second.load_state_dict(first.state_dict())
    ledger.watch([second])
    assert ledger.state_bytes() == weights
    second.state.clear()
    second.step()
    del first
    gc.collect()
    assert ledger.state_bytes() == weights
    ledger.watch([])
    assert ledger.state_bytes() == weights
