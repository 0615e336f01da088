"""Units not called once by their own forward; forwards that resize, or leave memory unwritten; least budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import BudgetInfeasibleError, Mimose
from tests.helpers.loops import Loss, plain_step
from tests.helpers.meter import PeakMeter


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(torch.sin(nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Tower(nn.Module):
    """Blocks that may be called by another method than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), Block())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Not `forward`."""
        out: torch.Tensor = self.net(x)
        return out

    forward = encode


class Towers(nn.Module):
    """Calls them so."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.towers, self.whole = nn.ModuleList(Tower() for _ in range(4)), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them."""
        towers: Any = self.towers
        for tower in towers:
            x = tower(x) if self.whole else tower.encode(x)
        return x


class Cells(nn.Module):
    """LSTMs, of which oneDNN saves a workspace that it has not filled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(24, 24, batch_first=True) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after another."""
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class Field(nn.Module):
    """What a state changes by, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(9, 48), nn.Linear(48, 8)

    def forward(self, time: float, x: torch.Tensor) -> torch.Tensor:
        """As large as the state."""
        out: torch.Tensor = self.out(torch.tanh(self.into(torch.cat([x, torch.full_like(x[..., :1], time)], -1))))
        return out


class Ode(nn.Module):
    """Solved by Runge and Kutta's method: one unit, many calls, whose inputs die with them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.field, self.head = nn.Linear(24, 8), Field(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Six steps."""
        x, step = self.stem(x), 1 / 6
        for number in range(6):
            time = number * step
            k1 = self.field(time, x)
            k2 = self.field(time + step / 2, x + step / 2 * k1)
            k3 = self.field(time + step / 2, x + step / 2 * k2)
            k4 = self.field(time + step, x + step * k3)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        out: torch.Tensor = self.head(x.mean(1))
        return out


class Routed(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what they make of it."""
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, ranks, None])
        return x + out.view_as(x)


@dataclass
class Stream:
    """What blocks hand on: of two streams, and of what they have seen."""

    left: torch.Tensor
    right: torch.Tensor
    seen: list[float]


class Handing(Block):
    """Makes another object, or writes into the one that it is given."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, state: Stream) -> Stream:  # type: ignore[override]
        """Each stream is changed by the other."""
        left = super().forward(state.left + state.right.tanh())
        right = state.right + left.sigmoid()
        state.seen.append(float(left.detach().mean()))
        if not self.writes:
            return Stream(left, right, state.seen)
        state.left, state.right = left, right
        return state


class Handed(nn.Module):
    """A chain of them."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing(writes=writes) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All that is left in the end."""
        state = Stream(x, x.cos(), [])
        for block in self.blocks:
            state = block(state)
        assert len(state.seen) == len(self.blocks)
        return state.left * state.right + sum(state.seen)


class Observing(nn.Module):
    """Gives its buffer another shape in its first forward, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.empty(0))
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled by the largest values so far."""
        out = self.linear(x)
        most: Any = self.most
        now = out.detach().abs().amax((0, 1))
        if most.numel() == 0:
            most.resize_(now.shape).copy_(now)
        most.copy_(torch.maximum(most, now))
        return x + torch.sin(out / (most + 1))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """One call."""
    value: torch.Tensor = model(batch).square().mean()
    return value


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Two calls, as for two views."""
    return square(model, batch) + square(model, batch.flip(1))


def crops(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Calls of several sizes, as for large and small crops."""
    return twice(model, batch) + square(model, batch[:1]) + square(model, batch[1:2])


def batches(lengths: tuple[int, ...] = (40, 64, 24, 56, 80, 33, 48, 72, 100, 61)) -> list[torch.Tensor]:
    """Of several lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, length, 24, generator=generator) for length in lengths]


def trained(make: Callable[[], nn.Module], loss_fn: Loss, share: float | None, **options: Any) -> Any:
    """Weights and buffers, peaks, resident bytes, and what planned."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peaks, resident, mimose = [], [], None
    if share is not None:
        _, before, rest, _ = trained(make, loss_fn, None)
        budget = int(max(rest) + share * (max(before) - max(rest)))
        mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss_fn, **options)
    for batch in 2 * batches():
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                plain_step(model, optimizer, batch, loss_fn)
        peaks.append(meter.peak_bytes)
        resident.append(meter.resident_bytes)
    if mimose is not None:
        mimose.close()
        assert max(peaks) <= mimose.records[0].budget_bytes
    return [*model.state_dict().values()], peaks, resident, mimose


@pytest.mark.parametrize("whole", [True, False])
def test_units_whose_own_forward_is_not_called_are_planned_in_parts(whole: bool) -> None:
    """A backbone of which `forward_features` is called, a tower that encodes."""
    plain, *_ = trained(lambda: Towers(whole=whole), square, None)
    found, _, _, mimose = trained(lambda: Towers(whole=whole), square, 0.6, actions=["recompute"])
    assert all(map(torch.equal, plain, found))
    assert any(record.actions for record in mimose.records if not record.sheltered)
    assert not mimose.records[-1].sheltered


@pytest.mark.parametrize("make", [Cells, lambda: nn.Sequential(*[Observing() for _ in range(4)])])
def test_what_kernels_leave_unwritten_and_forwards_resize(make: Callable[[], nn.Module]) -> None:
    """Both are recomputed, and end as in the plain run."""
    plain, *_ = trained(make, square, None)
    found, _, _, mimose = trained(make, square, 0.9, actions=["recompute"])
    assert all(map(torch.equal, plain, found))
    assert mimose.records[0].recomputed_units == 4


@pytest.mark.conformance("How people train", "blocks that hand each other dataclasses", "works")
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("actions", [["recompute"], None])
def test_blocks_that_hand_each_other_objects(writes: bool, actions: list[str] | None) -> None:
    """A recomputation gets another one, with what the first one held then."""
    plain, *_ = trained(partial(Handed, writes=writes), square, None)
    found, peaks, _, mimose = trained(partial(Handed, writes=writes), square, 0.55, actions=actions)
    assert all(map(torch.equal, plain, found))
    planned = [(peak, r) for peak, r in zip(peaks, mimose.records, strict=True) if not r.sheltered]
    assert len(planned) > 10
    assert any(record.recomputed_units or record.lean_units for _, record in planned)
    for peak, record in planned:
        assert peak == pytest.approx(record.predicted_peak_bytes, rel=0.01)


@pytest.mark.parametrize("calls", [twice, crops])
def test_lean_units_that_are_called_several_times_are_predicted(calls: Loss) -> None:
    """What a call spares is spared in the others, too, and they need not be alike."""
    _, peaks, _, mimose = trained(lambda: nn.Sequential(*[Block() for _ in range(4)]), calls, 0.4, actions=["lean"])
    planned = [(peak, r) for peak, r in zip(peaks, mimose.records, strict=True) if r.lean_units and not r.sheltered]
    assert len(planned) > 3
    for peak, record in planned:
        assert peak == pytest.approx(record.predicted_peak_bytes, rel=0.01)


@pytest.mark.parametrize("share", [0.7, 0.6, 0.5, 0.4])
def test_experts_that_get_what_a_router_decides(share: float) -> None:
    """Steps of one size differ in what single experts take, though not in all: plans take blocks as a whole."""
    plain, *_ = trained(lambda: nn.Sequential(*[Routed() for _ in range(4)]), square, None)
    found, _, _, mimose = trained(lambda: nn.Sequential(*[Routed() for _ in range(4)]), square, share)
    assert all(map(torch.equal, plain, found))
    assert sum(bool(record.actions) for record in mimose.records if not record.sheltered) > 4


def test_inputs_that_nobody_keeps_are_not_counted() -> None:
    """Once the first kept steps have shown that they die."""
    _, peaks, _, mimose = trained(Ode, square, 0.9)
    kept = [(p, r) for p, r in zip(peaks, mimose.records, strict=True) if not r.sheltered and not r.actions]
    assert len(kept) > 6
    for peak, record in kept[3:]:
        assert peak == pytest.approx(record.predicted_peak_bytes, rel=0.01)


class Distilled(nn.Module):
    """A student, and a wider teacher without gradients that sees two views."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*[Block() for _ in range(2)])
        self.widen = nn.Linear(24, 240)
        self.teacher = nn.ModuleList(Block(240) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.widen.requires_grad_(False)


def distilled(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The student sees the shorter view."""
    views = [batch["one"], batch["other"]]
    with torch.no_grad():
        seen = []
        for view in views:
            wide = model.widen(view)
            for block in model.teacher:
                wide = block(wide)
            seen.append(wide.mean())
    value: torch.Tensor = sum(
        (model.student(view).mean() - mean).square() for view, mean in zip(views, seen, strict=True)
    )
    return value


def test_calls_without_gradients_are_moments_of_their_own() -> None:
    """Learnt where one of them was the highest, predicted where it is another."""
    lengths = [
        (69, 28),
        (73, 56),
        (25, 24),
        (53, 36),
        (60, 27),
        (58, 51),
        (65, 48),
        (38, 70),
        (32, 68),
        (28, 75),
        (21, 68),
    ]
    torch.manual_seed(0)
    model = Distilled()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.01)
    planned = 0
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=distilled) as mimose:
        for one, other in lengths:
            batch = {"one": torch.randn(4, one, 24), "other": torch.randn(4, other, 24)}
            with PeakMeter(model, optimizer, batch) as meter:
                mimose.step(batch)
            predicted = mimose.records[-1].predicted_peak_bytes
            planned += predicted is not None
            assert predicted is None or meter.peak_bytes == pytest.approx(predicted, rel=0.01)
    assert planned >= 3


def test_the_least_budget_that_is_named_holds_to_the_end() -> None:
    """Optimizer state and gradients, which come with the first update, are part of it."""

    def train(budget: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=square) as mimose:
            for batch in batches((100, 40, 72, 24, 100, 56, 100, 64, 100)):
                mimose.step(batch)

    with pytest.raises(BudgetInfeasibleError) as caught:
        train(1_000_000)
    least = caught.value.smallest_feasible_bytes
    assert least is not None
    train(least)
