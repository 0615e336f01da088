"""Activations that units keep as attributes: features for others, and the state of recurrent cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.actions.stored import left_alone, watched
from tests.helpers.loops import plain_step, train
from tests.helpers.meter import PeakMeter


class Cell(nn.Module):
    """Goes on from what it has left as its attribute: as it is, or detached, alone or in a tuple."""

    def __init__(self, keeps: Callable[[torch.Tensor], Any], takes: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.into, self.on, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.keeps, self.takes = keeps, takes
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One moment of a sequence."""
        state = torch.zeros_like(x) if self.state is None else self.takes(self.state)
        new = torch.sin(self.out(torch.tanh(self.into(x) + self.on(state))))
        self.state = self.keeps(new)
        return x + new


class Recurrent(nn.Module):
    """Two such cells."""

    def __init__(self, *how: Any) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(*how) for _ in range(2))

    def forward(self, moments: torch.Tensor) -> torch.Tensor:
        """A loss over all moments."""
        total = torch.zeros(())
        for x in moments.unbind(1):
            for cell in self.cells:
                x = cell(x)
            total = total + x.pow(2).mean()
        return total


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """What the model returns."""
    loss: torch.Tensor = model(batch)
    return loss


def from_the_start(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The state lives within a step."""
    cells: Any = model.cells
    for cell in cells:
        cell.state = None
    return loss_of(model, batch)


def same(state: Any) -> Any:
    """As it is."""
    return state


def first(state: Any) -> Any:
    """Of a tuple."""
    return state[0]


@pytest.mark.parametrize("actions", [["recompute"], None])
@pytest.mark.parametrize(
    ("keeps", "takes", "loss_fn"),
    [
        pytest.param(same, same, from_the_start, id="within a step"),
        pytest.param(lambda state: (state, state), first, from_the_start, id="in a tuple"),
        pytest.param(same, torch.Tensor.detach, loss_of, id="detached when it is read"),
        pytest.param(torch.Tensor.detach, same, loss_of, id="detached when it is kept"),
    ],
)
def test_recurrent_cells_are_exact(keeps: Any, takes: Any, loss_fn: Any, actions: list[str] | None) -> None:
    """By the time of backward their state is the last one, of the same shape."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Recurrent(keeps, takes)
        batches = [torch.randn(32, 3, 16) for _ in range(6)]
        train(model, batches, loss_fn, planned=planned, actions=actions)
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


class Remembering(Cell):
    """Keeps its state in a buffer, or in a container that it changes in place."""

    def __init__(self, where: str, takes: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(same, takes)
        self.where = where
        self.held: Any
        self.register_buffer("held", None)
        self.box: dict[str, torch.Tensor] = {}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One moment of a sequence."""
        self.state = self.held if self.where == "buffer" else self.box.get("state")
        out: torch.Tensor = super().forward(x)
        new, self.state = self.state, None
        if self.where == "buffer":
            self.held = new
        else:
            self.box["state"] = new
        return out


class Resetting(Cell):
    """Begins anew in its first calls, or leaves something else there in the first."""

    def __init__(self, resets: int, detached: int) -> None:
        super().__init__(same, torch.Tensor.detach)
        self.resets, self.detached, self.calls = resets, detached, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One moment of a sequence."""
        if self.calls < self.resets:
            self.state = None
        out: torch.Tensor = super().forward(x)
        if self.calls < self.detached:
            self.state = self.state.detach()
        self.calls += 1
        return out


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Remembering("buffer", same), id="in a buffer"),
        pytest.param(lambda: Remembering("buffer", torch.Tensor.detach), id="in a buffer, detached"),
        pytest.param(lambda: Remembering("box", torch.Tensor.detach), id="in a container, detached"),
        pytest.param(lambda: Resetting(3, 0), id="after some resets"),
        pytest.param(lambda: Resetting(0, 1), id="detached at first"),
    ],
)
def test_states_in_other_places_and_from_later_on_are_exact(make: Callable[[], Cell]) -> None:
    """Across steps, and within them."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(model[0], Remembering) and model[0].takes is same:  # type: ignore[index]
            for cell in model:  # type: ignore[attr-defined]
                cell.held = None
        total = torch.zeros(())
        for x in batch.unbind(1):
            total = total + model(x).square().mean()
        return total

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(make(), make())
        batches = [torch.randn(32, 2, 16) for _ in range(6)]
        train(model, batches, loss_fn, planned=planned, actions=["recompute"])
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


class Featured(nn.Module):
    """Leaves what is inside it as an attribute."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])
        self.out, self.keeps = nn.Linear(32, 32), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        inside = self.inside(x)
        if self.keeps:
            self.feature = inside
        out: torch.Tensor = x + torch.sin(self.out(inside))
        return out


def _squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).square().mean()
    return value


def _keep_result(module: Any, args: Any, out: torch.Tensor) -> None:
    module.activation = out


@pytest.mark.parametrize(("keeps", "hooked"), [(False, False), (True, False), (False, True)])
def test_features_hold_no_recomputed_graph(keeps: bool, hooked: bool) -> None:
    """After a recomputation the attribute is the forward's again: the other one would keep all of it alive.

    What a hook of the unit's own leaves there, outside of its forward, its recomputation finds gone and leaves alone.
    """
    model = nn.Sequential(*[Featured(keeps=keeps) for _ in range(8)])
    for block in model if hooked else ():
        block.register_forward_hook(_keep_result)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(8, rows, 32) for rows in 4 * (40, 60, 50, 80, 70, 64, 90, 100, 96, 100)]
    peaks = []
    for batch in batches:
        with PeakMeter(model, optimizer, batch) as meter:
            plain_step(model, optimizer, batch, _squares)
        peaks.append(meter.peak_bytes)
    budget = int(0.6 * max(peaks))
    with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=_squares) as mimose:
        for batch in batches:
            with PeakMeter(model, optimizer, batch) as meter:
                mimose.step(batch)
            assert meter.peak_bytes <= budget
            predicted = mimose.records[-1].predicted_peak_bytes
            assert predicted is None or predicted == pytest.approx(meter.peak_bytes, rel=0.01)
        assert not mimose.records[-1].sheltered
        assert mimose.records[-1].actions


def test_gradients_of_features_are_retained() -> None:
    """On the tensor that the forward has left, which is still there after backward."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = _squares(model, batch)
        features: list[Any] = [block.feature for block in model.children()]
        for feature in features:
            feature.retain_grad()
        return loss

    model = nn.Sequential(*[Featured(keeps=True) for _ in range(3)])
    blocks: list[Any] = [*model.children()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss_fn, actions=["recompute"]) as mimose:
        for _ in range(2):
            mimose.step(torch.randn(4, 8, 32))
            assert all(block.feature.grad is not None for block in blocks)
        assert mimose.records[0].recomputed_units == 3


def test_what_a_forward_beside_the_step_leaves_is_taken_away() -> None:
    """Whether there was another activation, something else, or nothing."""
    module: Any = nn.Module()
    module.kept, module.none = held, _ = torch.ones(1, requires_grad=True), None
    with left_alone([module]):
        module.kept, module.none, module.new = (torch.zeros(1, requires_grad=True) for _ in range(3))
        module.count = 1
    assert module.kept is held
    assert module.none is None
    assert "new" not in vars(module)
    assert module.count == 1


def test_what_is_looked_at_is_told_from_what_is_replaced() -> None:
    """Afterwards modules are of their own class again, also where watching fails."""

    class Both(nn.Module):
        def forward(self) -> Any:
            self.other = self.one
            return self.other

    module = Both()
    module.one, module.other = torch.ones(1), torch.ones(1)
    with pytest.raises(ZeroDivisionError), watched({module: ["one", "other"]}) as looks:
        assert module() is module.one
        raise ZeroDivisionError
    assert looks.read == {(id(module), "one")}
    assert looks.replaced == {(id(module), "other")}
    assert type(module) is Both
