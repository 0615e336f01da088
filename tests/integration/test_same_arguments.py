"""A recomputation finds its arguments as the forward did: whether two are the same tensor, and what is known of one.

In sheltered steps regions hold other tensors in their place, which must make no difference to what a unit computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_mimose import MimoseCallback
from tests.helpers.architectures import equal, train
from tests.helpers.fits import same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Batch, loader, quiet_trainer

WIDTH = 32


class Block(nn.Module):
    """Two layers, weighted by what it finds out about its arguments."""

    def __init__(self, weight: Callable[..., float]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.weight = weight

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """As many operations in any case: a checkpoint would not notice."""
        y: torch.Tensor = self.second(torch.tanh(self.first(x)) * self.weight(x, *more))
        return y


class Model(nn.Module):
    """Four blocks; `arguments` makes what each is given."""

    def __init__(self, arguments: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], block: Callable[[], nn.Module]):
        super().__init__()
        self.embed, self.arguments = nn.Embedding(64, WIDTH), arguments
        self.blocks = nn.ModuleList([block() for _ in range(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(ids)
        for block in self.blocks:
            y = block(*self.arguments(x))
            x = x + (y[0] if isinstance(y, tuple) else y)
        found: torch.Tensor = x.square().mean()
        return found


TABLE = torch.ones(3)


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With an attribute."""
    x.scale = 0.5  # type: ignore[attr-defined]
    return (x,)


def leaf(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """And one that is a leaf and requires gradients."""
    return x, torch.ones(3, requires_grad=True)


NOTES: list[weakref.ref[torch.Tensor]] = []
KEYS: Any = WeakTensorKeyDictionary()


def noted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With a weak reference to it."""
    x = x * 1.0
    NOTES.append(weakref.ref(x))
    return (x,)


def keyed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With a note about it."""
    x = x * 1.0
    KEYS[x] = 0.5
    return (x,)


CASES: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, ...]], Callable[..., float]]] = {
    "twice the same": (lambda x: (x, x), lambda x, y: 0.5 if x is y else 2.0),
    "two of one storage": (lambda x: (x, x.view_as(x)), lambda x, y: 0.5 if x is y else 2.0),
    "an attribute": (scaled, lambda x: getattr(x, "scale", 2.0)),
    "a leaf": (leaf, lambda x, y: 0.5 if y.is_leaf else 2.0),
    "no leaf": (lambda x: (x,), lambda x: 2.0 if x.is_leaf else 0.5),
    "a view": (lambda x: (x, x[:, 1:]), lambda x, y: 0.5 if y._base is x else 2.0),
    "a view alone": (lambda x: (x.transpose(0, 1).transpose(0, 1),), lambda x: 0.5 if x._is_view() else 2.0),
    "no view": (lambda x: (x,), lambda x: 2.0 if x._is_view() else 0.5),
    "a weak reference": (noted, lambda x: 0.5 if any(note() is x for note in NOTES) else 2.0),
    "a weak key": (keyed, lambda x: KEYS.get(x, 2.0)),
    "one that others have": (lambda x: (x, TABLE), lambda x, y: 0.5 if y is TABLE else 2.0),
}


SEEN: list[int] = []


def seen(x: torch.Tensor) -> torch.Tensor:
    """Note its identity."""
    SEEN[:] = [*SEEN[-7:], id(x)]
    return x


APART: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, ...]], Callable[..., float]]] = {
    "an identity": (lambda x: (seen(x * 1.0),), lambda x: 0.5 if id(x) in SEEN else 2.0),
    "a mask's identity": (lambda x: (x, seen(torch.ones(3) * 1.0)), lambda x, y: 0.5 if id(y) in SEEN else 2.0),
    "what made it": (lambda x: (x * 1.0,), lambda x: 0.5 if "Mul" in type(x.grad_fn).__name__ else 2.0),
    "what that was made of": (
        lambda x: ((x * 1.0).tanh(),),
        lambda x: 0.5 if x.grad_fn and "Mul" in str(x.grad_fn.next_functions) else 2.0,
    ),
}


def batches() -> list[Batch]:
    """Token numbers."""
    lengths = (40, 56, 48, 64, 44, 60, 52, 63)
    return [{"ids": torch.randint(0, 64, (4, n), generator=torch.Generator().manual_seed(n))} for n in lengths]


def check(make: Callable[[], nn.Module], share: float = 1.2, *, recomputes: bool = True, runs_again: int = 0) -> None:
    """It trains as it does alone; as many steps run again."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(batch["ids"])
        return found

    data = batches()
    plain = train(make, data, loss_fn=loss)
    done = train(make, data, plain.budget(share), loss_fn=loss)
    assert equal(plain, done)
    assert done.mimose is not None
    records = done.mimose.records
    assert records[0].sheltered
    assert ("recompute" in records[0].actions.values()) == recomputes
    assert not all(record.sheltered for record in records)
    assert [record.retried for record in records] == [True] * runs_again + [False] * (len(records) - runs_again)


@pytest.mark.parametrize("name", CASES)
def test_what_a_unit_can_tell_of_its_arguments_is_the_same_again(name: str) -> None:
    """Otherwise its gradients would be wrong, and nobody would notice."""
    arguments, weight = CASES[name]
    check(lambda: Model(arguments, lambda: Block(weight)))


@pytest.mark.parametrize("name", APART)
def test_what_stands_for_an_argument_may_be_told_from_it(name: str) -> None:
    """The first step shows it, and runs again; such blocks are given the arguments themselves from then on."""
    arguments, weight = APART[name]
    check(lambda: Model(arguments, lambda: Block(weight)), runs_again=1)


class Task(pl.LightningModule):
    """Blocks that go by the identity of what they are given, in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        arguments, weight = APART["an identity"]
        self.model = Model(arguments, lambda: Block(weight))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss."""
        found: torch.Tensor = self.model(batch["ids"])
        self.log("loss", found)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def test_lightning_runs_such_a_step_again() -> None:
    """Its weights are those of a run without a budget."""

    def fit(*callbacks: pl.Callback) -> tuple[MeterCallback, dict[str, torch.Tensor]]:
        pl.seed_everything(0, verbose=False)
        task, meter = Task(), MeterCallback()
        quiet_trainer(meter, *callbacks).fit(task, loader(batches()))
        return meter, task.state_dict()

    plain, weights = fit()
    resident = max(plain.residents)
    callback = MimoseCallback(int(resident + 0.6 * (max(plain.peaks) - resident)), actions=["recompute"])
    assert same(weights, fit(callback)[1])
    assert [record.retried for record in callback.records] == [True] + [False] * (len(batches()) - 1)
    assert all("recompute" in record.actions.values() for record in callback.records)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_is_given_one_tensor_three_times(dropout: float) -> None:
    """torch's own looks whether query, key and value are the same, and takes another way then."""
    check(lambda: Model(lambda x: (x, x, x), lambda: nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True)))


class Dual(nn.Module):
    """Its blocks are called with dual numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, WIDTH), nn.ModuleList([Block(lambda x: 1.0) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss, and how fast it changes in some direction."""
        x = self.embed(ids)
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, torch.ones_like(x))
            for block in self.blocks:
                y = y + block(y)
            value, tangent = forward_ad.unpack_dual(y)
            assert tangent is not None
            found: torch.Tensor = value.square().mean() + tangent.square().mean()
        return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # from torch 2.14 on
def test_forward_mode_differentiation_goes_on() -> None:
    """Dual numbers stand for themselves; a checkpoint cannot give them back, so that such units are left alone."""
    check(Dual, 1.5, recomputes=False)
