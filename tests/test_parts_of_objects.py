"""Tensors in objects that pytree cannot take apart, and objects that are in nobody's way."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mimose.measure.resident import batch_bytes
from lightning_mimose.parts import leaves_in


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
