"""Casts of weights in autocast's cache: counted once, and spared by nobody as long as the cache lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mimose import Mimose
from lightning_mimose.measure.casts import may_be_cached
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.meter import PeakMeter

WIDTH = 64


class Block(nn.Module):
    """Weights that take more than what a short batch saves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Large tensors before and after the cache ends."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch)
        wide = functional.gelu(torch.cat([out] * 3, -1)).mean()
    return wide + functional.gelu(torch.cat([out.float()] * 2, -1)).mean()


def batches(rows: int = 4) -> Iterator[torch.Tensor]:
    """The same four sizes again and again."""
    torch.manual_seed(0)
    for length in (32, 64, 48, 80) * 5:
        yield torch.randn(rows, length, WIDTH)


def trained(model: nn.Module, mimose: Mimose | None = None, rows: int = 4) -> list[float]:
    """Predicted to measured peaks of planned steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mimose is None:
        for batch in batches():
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        return []
    ratios = []
    for batch in batches(rows):
        with PeakMeter(model, None) as meter:
            mimose.step(batch)
        predicted = mimose.records[-1].predicted_peak_bytes
        if predicted is not None:
            ratios.append(predicted / (meter.peak_bytes + batch.nbytes))
    return ratios


def ratios_of(
    model: nn.Module, loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor], chosen: dict[str, str], rows: int = 4
) -> list[float]:
    """Predicted to measured peaks under a forced plan, as soon as the menu has it.

    Where kernels for half precision take scratch for some sizes only, it takes a size more until lean saves are on it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forced(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        offered = {(timeline.units[option.unit], option.action) for option in timeline.options}
        return chosen if chosen.items() <= offered else {}

    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss_fn, planner=forced) as mimose:
        ratios = trained(model, mimose, rows)
        assert sum(chosen.items() <= record.actions.items() for record in mimose.records) >= 10
        return ratios


@pytest.mark.parametrize("action", ["keep", "recompute", "lean", "recompute+lean"])
def test_a_plain_loop_under_autocast_is_predicted(action: str) -> None:
    """Whether units keep, recompute or rebuild what they saved, and with the bits of the plain run."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    trained(plain)
    chosen = {} if action == "keep" else {"layers.1": action, "layers.2": action}
    ratios = ratios_of(model, loss, chosen)
    assert len(ratios) >= 10
    assert all(0.999 <= ratio <= 1.001 for ratio in ratios)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_a_cast_that_somebody_else_saves_too(action: str) -> None:
    """A tied head outside of units keeps one of them beyond the cache: nothing is predicted too low for that."""

    def tied(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = functional.linear(model(batch), model.layers[0].up.weight)  # type: ignore[union-attr, arg-type]
        return functional.gelu(out.float()).square().mean()

    torch.manual_seed(0)
    chosen = {"layers.1": action, "layers.2": action} if action != "keep" else {}
    ratios = [ratio for rows in (4, 6) for ratio in ratios_of(Net(), tied, chosen, rows)]
    assert len(ratios) >= 4
    assert all(0.999 <= ratio <= 1.03 for ratio in ratios)


def test_autocast_around_the_whole_step() -> None:
    """The cache then lasts to its end."""
    torch.manual_seed(0)
    model = Net()

    def inner(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.gelu(torch.cat([model(batch)] * 3, -1).float()).mean()

    ratios = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=inner) as mimose:
        for batch in batches():
            with PeakMeter(model, None) as meter, torch.autocast("cpu", dtype=torch.bfloat16):
                mimose.step(batch)
            predicted = mimose.records[-1].predicted_peak_bytes
            if predicted is not None:
                ratios.append(predicted / (meter.peak_bytes + batch.nbytes))
    assert len(ratios) >= 10
    assert all(0.999 <= ratio <= 1.001 for ratio in ratios)


def test_what_may_be_cached() -> None:
    """Casts of weights while autocast keeps them, and nothing else."""
    weight, found = nn.Parameter(torch.ones(4, 4)), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(may_be_cached(tensor))
        return tensor.detach()

    x = torch.ones(2, 4, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for cache in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                x @ weight
    assert found == [True, False, False, False]  # the weight, what it is multiplied with; nothing without a cache
