"""What others set for one call of a unit: its recomputation finds it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_mimose.actions.setting import Settings
from tests.helpers.architectures import recompute_all
from tests.helpers.loops import train

ROWS = (96, 64, 128, 80, 112, 96, 64, 72)


class Block(nn.Module):
    """A residual block with one norm for each domain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        nn.init.normal_(self.norms[1].weight)  # type: ignore[arg-type]
        self.between: nn.Module = nn.Identity()
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("shift", torch.zeros(64))
        self.dropout = nn.Dropout(0.1)
        self.domain = 0
        self.context: torch.Tensor | None = None
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.last: torch.Tensor | None = None
        self.calls = 0
        self.added: torch.Tensor | float = 0.0
        self.inside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        self.calls += 1
        self.last = x.detach()
        inside = self.dropout(self.activation(self.between(self.norms[self.domain](self.up(x)) + self.shift)))
        if self.context is not None:
            inside = inside * self.context
        inside = torch.tanh(inside + self.added)
        self.inside = inside  # an activation, of which others may make a part of the loss
        out: torch.Tensor = x + self.down(inside) * self.scale
        return out


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A scalar."""
    value: torch.Tensor = (model(batch) - 1).pow(2).mean()
    return value


def _blocks(model: nn.Module) -> Any:
    return model.children()


def domains(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """An index that is set before each of two calls."""
    total = torch.zeros(())
    for domain in (0, 1):
        for block in _blocks(model):
            block.domain = domain
        total = total + loss_of(model, batch)
    return total


def rates(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A dropout that is strong for one call alone."""
    for block in _blocks(model):
        block.dropout.p = 0.5
    loss = loss_of(model, batch)
    for block in _blocks(model):
        block.dropout.p = 0.1
    return loss


def contexts(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Tensors that are handed over as attributes, and replaced."""
    total = torch.zeros(())
    for factor in (1.0, 2.0):
        for block in _blocks(model):
            block.context = torch.full((batch.shape[0], 64), factor)
        total = total + loss_of(model, batch)
    for block in _blocks(model):
        block.context = None
    return total


def handed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Activations that are handed over as attributes, and replaced."""
    total = torch.zeros(())
    for block in _blocks(model):
        for factor in (1.0, 2.0):
            block.context = torch.sigmoid(factor * block.up(batch))
            total = total + loss_of(block, batch)
    return total


def written_buffers(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A buffer that is written in place before each of two calls."""
    total = torch.zeros(())
    for factor in (1.0, 2.0):
        for block in _blocks(model):
            block.shift.fill_(factor)
        total = total + loss_of(model, batch)
    return total


def written_attributes(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A tensor that is an attribute, written in place after the call; no backward needs it in any other way."""
    for block in _blocks(model):
        block.added = torch.ones(64)
    total = loss_of(model, batch)
    for block in _blocks(model):
        block.added.fill_(2.0)
    return total


def stored(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """What the blocks leave as attributes is a part of the loss."""
    loss = loss_of(model, batch)
    return loss + sum(block.inside.square().mean() for block in _blocks(model))


def functions(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Another activation for one call."""
    for block in _blocks(model):
        block.activation = torch.sin
    loss = loss_of(model, batch)
    for block in _blocks(model):
        block.activation = torch.tanh
    return loss


def members(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Another part and another buffer for one call."""
    for block in _blocks(model):
        block.between, block.scale = nn.Sigmoid(), torch.full((16,), 2.0)
    loss = loss_of(model, batch)
    for block in _blocks(model):
        block.between, block.scale = nn.Identity(), torch.ones(16)
    return loss


def hooks(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """One that changes what a layer returns, for one call."""
    handles = [block.up.register_forward_hook(lambda _, __, out: 2 * out) for block in _blocks(model)]
    handles += [
        block.down.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
        for block in _blocks(model)
    ]
    loss = loss_of(model, batch)
    for handle in handles:
        handle.remove()
    return loss + loss_of(model, batch)


def modes(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A call in eval mode, whose gradients count."""
    model.eval()
    loss = loss_of(model, batch)
    model.train()
    return loss + loss_of(model, batch)


def fast_weights(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """MAML's inner step, through which gradients flow."""
    weights = dict(model.named_parameters())
    inner = (functional_call(model, weights, (batch,)) + 1).pow(2).mean()
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True, materialize_grads=True)
    fast = {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients, strict=True)}
    value: torch.Tensor = (functional_call(model, fast, (batch,)) - 1).pow(2).mean()
    return value


def lent_weights(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Other weights for one call."""
    lent = {name: 1.5 * weight for name, weight in model.named_parameters()}
    value: torch.Tensor = functional_call(model, lent, (batch,)).pow(2).mean()
    return value


def trained(loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor], actions: list[str] | None) -> list[Any]:
    """Weights and what forwards count, after some steps; without actions in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    batches = [torch.randn(rows, 16) for rows in ROWS]
    forced = {"planner": recompute_all} if actions else {}
    records = train(model, batches, loss_fn, planned=bool(actions), lr=0.05, actions=actions, **forced)
    refused = loss_fn in (modes, handed, written_buffers, written_attributes)
    assert not actions or refused or records[-1].recomputed_units == 4
    return [*model.parameters(), *[torch.tensor(block.calls) for block in _blocks(model)]]


@pytest.mark.filterwarnings("ignore:A step ran backward twice")
@pytest.mark.parametrize("actions", [["recompute"], ["lean", "recompute"]])
@pytest.mark.parametrize(
    "loss_fn",
    [
        domains,
        rates,
        contexts,
        handed,
        written_buffers,
        written_attributes,
        stored,
        functions,
        members,
        hooks,
        modes,
        fast_weights,
        lent_weights,
    ],
)
def test_a_recomputation_finds_what_its_forward_found(loss_fn: Any, actions: list[str]) -> None:
    """Of the same shapes, so that no check of torch's would notice; bit-equal to the plain loop."""
    assert all(map(torch.equal, trained(loss_fn, []), trained(loss_fn, actions)))


def test_attributes_that_come_and_go() -> None:
    """Kinds of values change, names appear and go, and what the forward writes itself is left alone."""
    block: Any = Block()
    written: set[tuple[int, str]] = set()
    settings = Settings([weakref.ref(module) for module in block.modules()], lambda _: written)
    first = settings.note()
    block.context, block.rate, block.heads = torch.ones(1), 2.0, [1, 2]
    second = settings.note()
    block.rate, block.heads = 3.0, [3]
    with settings.as_found(first):
        assert block.context is None
        assert block.rate == 3.0
    with settings.as_found(second):
        assert (block.rate, block.heads) == (2.0, [1, 2])
    written.add((id(block), "rate"))
    with settings.as_found(second):
        assert (block.rate, block.heads) == (3.0, [1, 2])
    del block.rate
    block.other = 1
    settings.note()
    with settings.as_found(second):
        assert block.heads == [1, 2]
    assert block.heads == [3]
    block.context = torch.ones(1, requires_grad=True)
    settings.note()
    block.context = kept = torch.ones(2)
    third = settings.note()
    block.context = None
    with settings.as_found(third):
        assert block.context is kept


class Normed(nn.Module):
    """Writes in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.linear(torch.tanh(self.norm(x)))
        return out


def lent_buffers(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Other statistics for one call in eval mode, after one in training mode."""
    loss = loss_of(model, batch)
    model.eval()
    lent = {name: buffer + 1 for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    loss = loss + functional_call(model, lent, (batch,)).pow(2).mean()
    model.train()
    return loss


@pytest.mark.parametrize("loss_fn", [modes, lent_buffers])
def test_modes_in_which_other_things_are_written(loss_fn: Any) -> None:
    """A unit whose mode changes before its backward is refused, and the step runs again."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Normed() for _ in range(4)])
        train(model, [torch.randn(rows, 16) for rows in ROWS], loss_fn, planned=planned, lr=0.05)
        found.append([*model.parameters(), *model.buffers()])
    assert all(map(torch.equal, *found))
