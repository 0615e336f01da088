"""Names of dimensions in any batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lightning_mimose.dims import raw_dims
from lightning_mimose.errors import SizeError

Pair = namedtuple("Pair", "source target")


@dataclass
class Sample:
    image: torch.Tensor
    mask: torch.Tensor | None = None
    unset: torch.Tensor = field(init=False)


class Graph:
    """Neither mapping nor sequence, with a cycle, as graph libraries have them."""

    kind = torch.zeros(3)  # of the class, so of no batch

    def __init__(self) -> None:
        self.x = torch.zeros(5, 16)
        self._store = {"edge_index": torch.zeros(2, 9, dtype=torch.long), "owner": self}
        self.model = torch.nn.Linear(2, 2)
        self.again = [self]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("batch", "dims"),
    [
        pytest.param(zeros(8, 3, 32), {"batch": 8, "input:1": 3, "input:2": 32}, id="tensor"),
        pytest.param(zeros(), {}, id="a tensor without axes"),
        pytest.param(zeros(0, 3), {"batch": 0, "input:1": 3}, id="empty tensor"),
        pytest.param((zeros(8, 3), zeros(8)), {"batch": 8, "0:1": 3}, id="tuple"),
        pytest.param([zeros(8, 3), zeros(8, 4)], {"batch": 8, "0:1": 3, "1:1": 4}, id="list"),
        pytest.param((zeros(8, 3), zeros(5)), {"0:0": 8, "0:1": 3, "1:0": 5}, id="leading axes differ"),
        pytest.param((zeros(8, 3), zeros()), {"batch": 8, "0:1": 3}, id="a tensor without axes shares nothing"),
        pytest.param({"a": {"b": zeros(8, 3)}, "c": [zeros(8, 4)]}, {"batch": 8, "a.b:1": 3, "c.0:1": 4}, id="nested"),
        pytest.param(UserDict(a=zeros(8, 3)), {"batch": 8, "a:1": 3}, id="UserDict"),
        pytest.param(Pair(zeros(8, 3), zeros(8, 4)), {"batch": 8, "source:1": 3, "target:1": 4}, id="namedtuple"),
        pytest.param(Sample(zeros(8, 3)), {"batch": 8, "image:1": 3}, id="dataclass"),
        pytest.param(Graph(), {"x:0": 5, "x:1": 16, "_store.edge_index:0": 2, "_store.edge_index:1": 9}, id="object"),
        pytest.param(
            {"text": ["a", "b"], "n": 3, "x": zeros(8, 2), "none": None, "fn": zeros, "cls": Graph, "set": {1}},
            {"batch": 8, "x:1": 2},
            id="what is no tensor is ignored",
        ),
        pytest.param({"a.b": zeros(1, 2), "a": {"b": zeros(1, 3)}}, {"batch": 1, "a.b:1": 2, "a.b:1'": 3}, id="clash"),
        pytest.param({0: zeros(1, 2), ("x", 1): zeros(1, 3)}, {"batch": 1, "0:1": 2, "('x', 1):1": 3}, id="keys"),
        pytest.param(torch.eye(3).to_sparse(), {"batch": 3, "input:1": 3}, id="sparse"),
        pytest.param(
            torch.nested.nested_tensor([zeros(3, 5), zeros(2, 5)], layout=torch.jagged),
            {"batch": 2, "input:1": 25},
            id="nested tensor",
        ),
        pytest.param(
            torch.nn.utils.rnn.pack_sequence([zeros(3, 5), zeros(2, 5)]),
            {"data:0": 5, "data:1": 5, "batch_sizes:0": 3},
            id="packed sequence",
        ),
    ],
)
def test_raw_dims(batch: Any, dims: dict[str, int]) -> None:
    """Every kind of batch gives its dimensions, by path and axis, in order of occurrence."""
    assert list(raw_dims(batch).items()) == list(dims.items())


def test_raw_dims_hugging_face() -> None:
    """What tokenizers and models of Hugging Face return is read like a dict."""
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": zeros(8, 128), "attention_mask": zeros(8, 128)})
    assert raw_dims(encoding) == {"batch": 8, "input_ids:1": 128, "attention_mask:1": 128}
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=zeros(8, 4), hidden_states=(zeros(8, 2),))
    assert raw_dims(output) == {"batch": 8, "last_hidden_state:1": 4, "hidden_states.0:1": 2}


@pytest.mark.parametrize("batch", [None, 3, "text", ["a", "b"], {}, object(), torch.nn.Linear(2, 2), torch.Tensor])
def test_no_tensor(batch: Any) -> None:
    """A batch without tensors is refused with its type and the way out."""
    with pytest.raises(SizeError, match="size_fn") as caught:
        raw_dims(batch)
    assert type(batch).__name__ in str(caught.value)


@pytest.mark.parametrize("size", [{"batch": -4, "x:1": 8}, {"batch": 4.0}])
def test_sizes_that_are_none(size: dict[str, Any]) -> None:
    """Numbers, but no sizes."""
    with pytest.raises(SizeError, match="whole numbers, of at least 0"):
        raw_dims(size)
