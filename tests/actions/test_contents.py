"""Contents are copied, compared and put back without replacing the object that has them."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mimose.actions.contents import content_of, put_content, same_content

CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensor": (torch.zeros(3), lambda t: t.add_(1)),
    "tensor, by data": (torch.zeros(3), lambda t: t.data.add_(1)),
    "list": ([1, 2], lambda x: x.append(3)),
    "deque": (deque([1, 2], maxlen=2), lambda x: x.append(3)),
    "dict": ({"a": 1}, lambda x: x.update(a=2)),
    "ordered": (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "default": (defaultdict(list, a=[1]), lambda x: x["b"]),
    "counter": (Counter("aab"), lambda x: x.update("a")),
    "set": ({1}, lambda x: x.add(2)),
    "random": (random.Random(1), lambda r: r.random()),
    "numpy": (np.random.default_rng(1), lambda r: r.random()),
    "numpy's old one": (np.random.RandomState(1), lambda r: r.rand()),
    "torch's": (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_undone(kind: str) -> None:
    value, change = CHANGES[kind]
    before, shown = content_of(value), repr(value)
    assert same_content(value, before)
    change(value)
    assert not same_content(value, before)
    put_content(value, before)
    assert same_content(value, before)
    if "object at" not in shown:
        assert repr(value) == shown


@pytest.mark.parametrize("value", [3, "text", None, object(), (1, 2)], ids=lambda v: type(v).__name__)
def test_what_cannot_change_inside_has_no_content(value: Any) -> None:
    assert content_of(value) is None
    assert same_content(value, None)
    put_content(value, None)


@pytest.mark.parametrize("container", [list, deque, lambda items: dict(enumerate(items))])
def test_activations_that_nobody_else_holds(container: Callable[[list[Any]], Any]) -> None:
    """They survive being put back, and a copy that holds them; another copy does not keep them."""

    def items(value: Any) -> list[Any]:
        return [*value.values()] if isinstance(value, dict) else [*value]

    value = container([torch.ones(1, requires_grad=True), 2])
    put_content(value, content_of(value))
    assert [type(item) for item in items(value)] == [torch.Tensor, int]
    holding, other = content_of(value, holding=True), content_of(value)
    value.clear()
    put_content(value, holding)
    assert [type(item) for item in items(value)] == [torch.Tensor, int]
    value.clear()
    del holding
    put_content(value, other)
    assert items(value) == [2]
