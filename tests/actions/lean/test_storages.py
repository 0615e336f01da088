"""Known storages are those that live."""

from __future__ import annotations

import torch

from lightning_mimose.actions.lean.storages import Storages


def test_another_storage_at_the_same_address_is_not_known() -> None:
    """The allocator gives an address out again as soon as it is free."""
    storages, addresses, later = Storages(), set(), []
    for _ in range(64):
        tensor = torch.ones(4)
        storages.add([tensor])
        addresses.add(tensor.untyped_storage()._cdata)
        del tensor
        later.append(torch.ones(4))
    assert any(each.untyped_storage()._cdata in addresses for each in later)
    assert not any(each.untyped_storage() in storages for each in later)


def test_only_plain_tensors_have_one() -> None:
    """Of a sparse tensor nothing can be asked."""
    sparse, plain = torch.eye(3).to_sparse(), torch.ones(2)
    storages = Storages([sparse, plain, 3, None])
    assert not storages.has_that_of(sparse)
    assert storages.has_that_of(plain[:1])
    storages.clear()
    assert not storages.has_that_of(plain)
