"""Updates that evaluate the loss again, as SAM's do: what they hold meanwhile is planned with."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from tests.helpers.meter import PeakMeter

STEPS, WIDTH = 30, 32
Update = Callable[[], None]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(torch.sin(nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Training:
    """A model whose every second gradient is taken where the first one leads uphill."""

    def __init__(self, every: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(5)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.every, self.steps, self.batch = every, 0, torch.empty(0)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The mean square."""
        self.batch = batch
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    def update(self) -> None:
        """Climb, evaluate, come back and step; only step where it is not due."""
        self.steps += 1
        if self.steps % self.every == 0:
            parameters = [*self.model.parameters()]
            with torch.no_grad():
                climbs = [0.05 * parameter.grad for parameter in parameters if parameter.grad is not None]
                torch._foreach_add_(parameters, climbs)
            self.optimizer.zero_grad()
            self.loss(self.model, self.batch).backward()
            with torch.no_grad():
                torch._foreach_sub_(parameters, climbs)
        self.optimizer.step()


def run(every: int, budget: int | None = None) -> tuple[Training, list[int], int, list[bool], list[float]]:
    """Train: peaks, the largest resident bytes, whether steps were sheltered, and predictions against peaks."""
    training, chance = Training(every), random.Random(1)
    mimose = None
    if budget is not None:
        mimose = Mimose(
            training.model,
            budget=budget,
            optimizer=training.optimizer,
            loss_fn=training.loss,
            update_fn=training.update,
        )
    peaks, resident = [], 0
    for number in range(STEPS):
        batch = torch.randn(4, chance.randint(16, 128), 8, generator=torch.Generator().manual_seed(number))
        with PeakMeter(training.model, training.optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = training.loss(training.model, batch)
                training.optimizer.zero_grad()
                loss.backward()
                training.update()
                del loss
        peaks.append(meter.peak_bytes)
        resident = max(resident, meter.resident_bytes)
    records = [] if mimose is None else list(mimose.records)
    if mimose is not None:
        mimose.close()
    against = [
        (record.predicted_peak_bytes or 0) / peak
        for record, peak in zip(records, peaks, strict=False)
        if not record.sheltered
    ]
    return training, peaks, resident, [record.sheltered for record in records], against


@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize("every", [1, 2])
def test_a_second_pass_in_the_update_stays_inside_the_budget(every: int, share: float) -> None:
    plain, peaks, resident, _, _ = run(every)
    budget = int(resident + share * (max(peaks) - resident))
    ours, held, _, sheltered, against = run(every, budget)
    assert max(held) <= budget
    assert sum(sheltered) <= 10
    assert all(each >= 0.99 for each in against)
    for one, other in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other)
