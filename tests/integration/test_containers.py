"""Units that keep activations in lists, dictionaries, deques and tuples of theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import Trained, equal, train

WIDTH = 48
CONTAINERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "dict": lambda features: dict(enumerate(features)),
    "dict of lists": lambda features: {"all": features},
}


class Layer(nn.Module):
    """Leaves what it computes on the way in a new container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        hidden = nn.functional.gelu(self.into(x))
        first, second = hidden.sin(), hidden.cos()
        self.features = CONTAINERS[self.container]([first, second])
        out: torch.Tensor = self.out(hidden + first * second)
        return out


class Window(Layer):
    """Adds to what it had, and keeps the latest."""

    features: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        hidden = nn.functional.gelu(self.into(x))
        self.features = [*self.features, hidden][-2:]
        out: torch.Tensor = self.out(hidden)
        return out


class Filled(Layer):
    """Empties a list of its own, and fills it."""

    def __init__(self, container: str) -> None:
        super().__init__(container)
        self.features: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        self.features.clear()
        hidden = nn.functional.gelu(self.into(x))
        self.features.append(hidden.sin())
        out: torch.Tensor = self.out(hidden * self.features[0])
        return out


class Placing(nn.Module):
    """Puts an activation in the place of that of the step before, and computes otherwise for many samples."""

    def __init__(self, heads: list[torch.Tensor], number: int) -> None:
        super().__init__()
        self.into, self.out, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.heads, self.number = heads, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        x = self.changed(x)
        self.heads[self.number] = self.head(x)
        return x

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """What the head is of."""
        hidden = self.into(x).relu()
        if len(x) > 4:
            hidden = nn.functional.gelu(hidden)
        return x + self.out(hidden)


class Supervised(nn.Module):
    """A loss of what every layer has put aside, as MONAI's DynUNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.rand(1)] * 4
        self.blocks = nn.ModuleList(Placing(self.heads, number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(head.square().mean() for head in self.heads)


def supervised() -> Supervised:
    """The same model each time."""
    torch.manual_seed(1)
    return Supervised()


class Block(nn.Module):
    """Calls such a layer so many times."""

    def __init__(self, layer: type[Layer], container: str, times: int) -> None:
        super().__init__()
        self.norm, self.layer, self.times = nn.LayerNorm(WIDTH), layer(container), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        out = self.norm(x)
        for _ in range(self.times):
            out = self.layer(out)
        return x + out


class Model(nn.Module):
    """Several blocks, and a loss."""

    def __init__(self, layer: type[Layer], container: str, times: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer, container, times) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def seeded(*how: Any) -> Model:
    """The same model each time."""
    torch.manual_seed(1)
    return Model(*how)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model returns."""
    loss: torch.Tensor = model(x)
    return loss


def left(run: Trained) -> list[list[torch.Tensor]]:
    """What is in the containers of a trained model."""
    found = []
    for block in run.model.blocks:  # type: ignore[union-attr]
        features: Any = block.layer.features  # type: ignore[union-attr]
        items = [*features.values()] if isinstance(features, dict) else [*features]
        found.append(items[0] if isinstance(items[0], list) else items)
    return found


def same_left(one: Trained, other: Trained) -> bool:
    """Whether the same is in the containers of both."""
    return all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in zip(left(one), left(other), strict=True)
    )


def batches_of(number: int) -> list[torch.Tensor]:
    """Of several lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 24 + 8 * (step * 5 % 7), WIDTH, generator=generator) for step in range(number)]


def of_several_counts() -> list[torch.Tensor]:
    """Of one length, and several numbers of samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 48, WIDTH, generator=generator) for n in (2, 3, 2, 8, 4, 6, 5, 7, 3, 8, 2, 6)]


def recomputing(*units: str) -> Callable[[Timeline, int], dict[str, str]]:
    """A plan that goes by no budget."""
    return lambda timeline, _: {each: "recompute" for each in units if (each, "recompute") in timeline.option_index}


@pytest.mark.conformance("State a forward writes", "lists, dictionaries, deques and tuples of activations", "works")
@pytest.mark.parametrize("container", CONTAINERS)
def test_new_containers_are_left_as_in_the_plain_run_and_counted(container: str) -> None:
    """A recomputation leaves those of the forward, whoever else holds what is in them."""
    build = partial(seeded, Layer, container, 1)
    plain = train(build, batches_of(12), None, loss_of)
    plan = recomputing("blocks.0", "blocks.1", "blocks.3")
    done = train(build, batches_of(12), "1GB", loss_of, planner=plan)
    assert equal(done, plain)
    assert same_left(done, plain)
    assert done.mimose is not None
    planned = [
        (record, peak)
        for record, peak in zip(done.mimose.records, done.peaks, strict=True)
        if not record.sheltered and record.recomputed_units == 3
    ]
    # What forwards do with what they find is known after some calls: until then old containers are held.
    assert len(planned) >= 4
    for record, peak in planned[2:]:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("layer", [Layer, Window, Filled])
def test_budgets_hold_where_parts_are_called_twice(layer: type[Layer]) -> None:
    """Old containers, which the forward replaces, are not held for the recomputation of a part."""
    build = partial(seeded, layer, "list", 2)
    plain = train(build, batches_of(16), None, loss_of)
    budget = plain.budget(0.75)
    done = train(build, batches_of(16), budget, loss_of)
    assert equal(done, plain)
    assert same_left(done, plain)
    assert max(done.peaks) <= budget


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_places_in_a_list_are_filled_in_each_step(share: float) -> None:
    """What is tried beside a later step replaces what nobody else holds, and leaves the list as it was."""
    batches = of_several_counts()
    plain = train(supervised, batches, None, loss_of)
    budget = plain.budget(share)
    done = train(supervised, batches, budget, loss_of)
    assert equal(done, plain)
    assert max(done.peaks) <= budget
    assert all(map(torch.equal, done.model.heads, plain.model.heads))  # type: ignore[arg-type]


def test_places_in_a_list_are_filled_when_a_step_runs_again() -> None:
    """It ran out of memory after it had replaced what the step before had left."""
    batches = [batch for batch in batches_of(14) for _ in range(2)]
    failing, steps = {9, 20, 25}, list[int]()

    def fails(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        steps.append(len(steps))
        if steps[-1] in failing:
            raise torch.OutOfMemoryError("out of memory, as played")
        return loss

    plain = train(supervised, batches, None, loss_of)
    done = train(supervised, batches, "1GB", fails)
    assert equal(done, plain)
    assert done.mimose is not None
    assert sum(record.retried for record in done.mimose.records) == 3


class Outside(Placing):
    """Puts it in a list that is nobody's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        x = self.changed(x)
        HEADS[self.number] = self.head(x)
        return x


HEADS: list[torch.Tensor] = []


def test_places_in_a_list_of_a_module_of_python_are_filled() -> None:
    """Which no module holds."""

    def build() -> Supervised:
        model = supervised()
        model.blocks = nn.ModuleList(Outside([], number) for number in range(4))
        HEADS[:] = [torch.rand(1)] * 4
        model.heads = HEADS
        return model

    batches = of_several_counts()
    plain = train(build, batches, None, loss_of)
    budget = plain.budget(0.7)
    done = train(build, batches, budget, loss_of)
    assert equal(done, plain)
    assert max(done.peaks) <= budget
