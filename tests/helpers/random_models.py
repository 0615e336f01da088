"""Random module trees, as plain data that Hypothesis can shrink, and the models they stand for.

A tree is a `Node`: what it prints is what rebuilds it, `RandomModel((Node("residual", (Node("mlp"),)),))`. Every node
maps a tensor (..., hidden) to another one of the same shape, so that any tree of them is a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.helpers.models import Batch

HIDDEN = 16
FEATURES = 4


@dataclass(frozen=True)
class Node:
    """One module of a tree.

    Attributes:
        kind: A name in `LEAVES` or `BRANCHES`.
        parts: The nodes inside.
        which: What a leaf chooses among: an activation, a rate, an earlier module.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    which: int = 0

    def __repr__(self) -> str:
        given = [repr(self.kind), *([repr(self.parts)] if self.parts else [])]
        return f"Node({', '.join(given)}{f', which={self.which}' if self.which else ''})"


LEAVES = ("linear", "inplace", "mlp", "layernorm", "batchnorm", "dropout", "same", "again", "tied")
BRANCHES = ("sequence", "residual", "twice", "tuples", "dicts", "keywords")
ACTIVATIONS = (nn.GELU, nn.Tanh, nn.ReLU, nn.SiLU)


class Residual(nn.Module):
    """`x + inner(x)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Twice(Residual):
    """One module, called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


class Same(nn.Module):
    """Returns what it is given, itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Norm(nn.Module):
    """BatchNorm over all axes but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class TuplePart(Residual):
    """Takes and returns a tuple; its second element passes through."""

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = state
        return self.inner(x * gate), gate


class DictPart(Residual):
    """Takes and returns a dictionary, with what is no tensor in it."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "x": self.inner(state["x"]) * state["gate"], "depth": state["depth"] + 1}


class KeywordPart(Residual):
    """Gets its tensors by keyword only."""

    def forward(self, *, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x) if gate is None else self.inner(x) * gate


class Handing(nn.Module):
    """Hands tuples, dictionaries or keywords to its parts, in turn.

    Args:
        kind: "tuples", "dicts" or "keywords".
        inner: What its parts run.
        learnt: Whether the second tensor requires a gradient.
    """

    def __init__(self, kind: str, inner: list[nn.Module], learnt: bool) -> None:
        super().__init__()
        part = {"tuples": TuplePart, "dicts": DictPart, "keywords": KeywordPart}[kind]
        self.parts = nn.ModuleList(part(module) for module in inner)
        self.kind, self.learnt = kind, learnt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid((x if self.learnt else x.detach()).mean(-1, keepdim=True))
        state: Any = {"tuples": (x, gate), "dicts": {"x": x, "gate": gate, "depth": 0, "note": None}}.get(self.kind)
        for part in self.parts:
            if self.kind == "keywords":
                x = part(x=x, gate=gate)
            else:
                state = part(state)
        return x if self.kind == "keywords" else state[0] if self.kind == "tuples" else state["x"]


class _Builder:
    """Makes the modules of a tree; later nodes may name earlier ones."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._linears: list[nn.Linear] = []

    def build(self, node: Node) -> nn.Module:
        """The module a node stands for."""
        if node.kind == "again" and self._modules:
            return self._modules[node.which % len(self._modules)]
        inner = [self.build(part) for part in node.parts]
        module = self._leaf(node) if not inner else self._branch(node, inner)
        self._modules.append(module)
        return module

    def _linear(self, inside: int = HIDDEN, outside: int = HIDDEN) -> nn.Linear:
        linear = nn.Linear(inside, outside)
        if inside == outside:
            self._linears.append(linear)
        return linear

    def _leaf(self, node: Node) -> nn.Module:
        activation = ACTIVATIONS[node.which % len(ACTIVATIONS)]
        if node.kind == "inplace":
            return nn.Sequential(self._linear(), nn.ReLU(inplace=True))
        if node.kind == "mlp":
            return nn.Sequential(self._linear(HIDDEN, 4 * HIDDEN), activation(), self._linear(4 * HIDDEN, HIDDEN))
        if node.kind == "layernorm":
            return nn.LayerNorm(HIDDEN)
        if node.kind == "batchnorm":
            return Norm()
        if node.kind == "dropout":
            return nn.Dropout((0.1, 0.5, 0.0)[node.which % 3])
        if node.kind == "same":
            return Same()
        tied = self._linears[node.which % len(self._linears)] if node.kind == "tied" and self._linears else None
        linear = self._linear()
        if tied is not None:
            linear.weight = tied.weight
        return nn.Sequential(linear, activation())

    def _branch(self, node: Node, inner: list[nn.Module]) -> nn.Module:
        if node.kind in ("residual", "twice"):
            body = inner[0] if len(inner) == 1 else nn.Sequential(*inner)
            return Residual(body) if node.kind == "residual" else Twice(body)
        if node.kind == "sequence":
            return nn.Sequential(*inner)
        return Handing(node.kind, inner, learnt=node.which % 2 == 1)


class RandomModel(nn.Module):
    """Regression from features to one number, through the blocks of some trees.

    Args:
        trees: The blocks, in order.
        result: What it returns: an object with a `.loss`, a dict, a tuple or the loss itself.
    """

    def __init__(self, trees: tuple[Node, ...], result: str = "object") -> None:
        super().__init__()
        self.result = result
        self.stem = nn.Linear(FEATURES, HIDDEN)
        builder = _Builder()
        self.blocks = nn.ModuleList(nn.Sequential(builder.build(tree)) for tree in trees)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """The loss of one batch."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x).squeeze(-1) - y).square().mean()
        results: dict[str, Any] = {"object": SimpleNamespace(loss=loss), "dict": {"loss": loss, "note": None}}
        return results.get(self.result, (loss, None) if self.result == "tuple" else loss)


def loss_of(result: Any) -> torch.Tensor:
    """The loss in what a `RandomModel` returned."""
    if isinstance(result, torch.Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result["loss"] if isinstance(result, dict) else result.loss


def random_batch(batch: int, tokens: int, seed: int = 0) -> Batch:
    """Random features and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, FEATURES, generator=generator)
    return {"x": x, "y": torch.randn(batch, tokens, generator=generator)}


# --- strategies -------------------------------------------------------------------------------------------------


def _extended(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    parts = st.lists(nodes, min_size=1, max_size=3).map(tuple)
    return st.builds(Node, st.sampled_from(BRANCHES), parts, st.integers(0, 1))


def nodes() -> st.SearchStrategy[Node]:
    """Trees of at most six leaves."""
    leaves = st.builds(Node, st.sampled_from(LEAVES) | st.just("mlp"), st.just(()), st.integers(0, 5))
    return st.recursive(leaves, _extended, max_leaves=6)


@dataclass(frozen=True)
class Training:
    """One random training.

    Attributes:
        trees: The model's blocks.
        sizes: (batch, tokens) of every step.
        result: What the model returns.
        share: Where the budget lies between the smallest feasible one (0) and the unbudgeted peak (1).
        seed: Of weights and dropout.
        sgd: Whether the optimizer has no state.
    """

    trees: tuple[Node, ...]
    sizes: tuple[tuple[int, int], ...]
    result: str = "object"
    share: float = 0.5
    seed: int = 0
    sgd: bool = False

    def model(self) -> RandomModel:
        """A fresh model, with the generator where training begins."""
        torch.manual_seed(self.seed)
        return RandomModel(self.trees, self.result)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer."""
        if self.sgd:
            return torch.optim.SGD(model.parameters(), lr=1e-2)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batches(self) -> list[Batch]:
        """The data."""
        return [random_batch(batch, tokens, index) for index, (batch, tokens) in enumerate(self.sizes)]


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Models of one to five blocks; sizes that vary along one axis (the last batch may be shorter), or along both."""
    trees = tuple(draw(st.lists(nodes(), min_size=1, max_size=5)))
    varies = draw(st.sampled_from(["tokens", "tokens", "batch", "both"]))
    lengths = st.lists(st.integers(32, 192), min_size=6, max_size=8, unique=True)
    if varies == "tokens":
        sizes = [(16, tokens) for tokens in draw(lengths)]
        if draw(st.booleans()):
            sizes[-1] = (draw(st.integers(2, 15)), sizes[-1][1])
    elif varies == "batch":
        sizes = [(batch, 32) for batch in draw(lengths)]
    else:
        batches = draw(st.lists(st.integers(4, 32), min_size=8, max_size=8))
        sizes = list(zip(batches, draw(lengths), strict=False))
    again = draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=4))
    return Training(
        trees,
        (*sizes, *again),
        result=draw(st.sampled_from(["object", "dict", "tuple", "tensor"])),
        share=draw(st.sampled_from([-0.3, 0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.1]) | st.floats(0, 1)),
        seed=draw(st.integers(0, 3)),
        sgd=draw(st.booleans()),
    )
