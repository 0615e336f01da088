"""What holds the data of tensors that are no plain ones, and the tensors in objects that pytree cannot take apart."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mimose.measure.resident import batch_bytes
from lightning_mimose.parts import leaves_in, plain_parts, storages_in


@dataclass
class Batch:
    """Has more than its fields."""

    ids: torch.Tensor

    def __post_init__(self) -> None:
        """A mask that is made of them."""
        self.mask = torch.ones(250)


@dataclass(slots=True)
class Slotted:
    """Has no dictionary."""

    ids: torch.Tensor
    more: list[torch.Tensor]


class Lazy(Mapping[str, Any]):
    """Loads whatever is asked for."""

    def __getitem__(self, key: str) -> Any:
        """Never asked for here."""
        raise AssertionError(key)

    def __iter__(self) -> Iterator[str]:
        """One name."""
        return iter(["images"])

    def __len__(self) -> int:
        """One."""
        return 1


class Closed:
    """Tells nobody what it holds."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """Nor that it does."""
        raise RuntimeError("closed")


class Proxy:
    """Has whatever it is asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """A number."""
        return 1


def endless() -> SimpleNamespace:
    """A list that holds itself."""
    items: list[Any] = []
    items.append(items)
    return SimpleNamespace(items=items)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(layout: str) -> None:
    """Values, and where they are."""
    dense = torch.eye(6)
    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    parts = plain_parts(getattr(dense, f"to_sparse_{layout}", dense.to_sparse)(**blocks))
    assert sum(part.is_floating_point() for part in parts) == 1
    assert all(part.layout is torch.strided for part in parts)
    assert len(parts) == (2 if layout == "coo" else 3)


def test_jagged_tensors_share_their_offsets() -> None:
    """Two of them: two storages of values, one of offsets."""
    one = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    both = {storage._cdata: storage.nbytes() for storage in storages_in({"x": one, "y": [one * 2]})}
    assert sorted(filter(None, both.values())) == [3 * 8, 8 * 4 * 4, 8 * 4 * 4]


def test_all_that_an_object_holds_counts_once() -> None:
    ids, more = torch.zeros(1), [torch.zeros(2), torch.zeros(3)]
    assert batch_bytes(Batch(ids)) == 1004
    assert [each for each in leaves_in(Slotted(ids, more)) if isinstance(each, torch.Tensor)] == [ids, *more]
    assert leaves_in([UserDict(ids=ids), SimpleNamespace(more=more)]) == [ids, *more]


@pytest.mark.parametrize("make", [Lazy, Closed, Proxy, endless, object, lambda: max, lambda: Batch])
def test_what_cannot_be_looked_into_is_a_leaf(make: Callable[[], Any]) -> None:
    leaf = make()
    found = leaves_in((torch.zeros(1), leaf))
    assert any(each is leaf for each in found)
