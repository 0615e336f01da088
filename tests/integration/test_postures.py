"""Modules that are switched to another mode in the midst of a training, and rates of dropout that are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from tests.helpers.meter import PeakMeter
from tests.helpers.models import TinyText, TinyVision, image_batch, text_batch

STEPS, SWITCH = 40, 18


def text() -> list[Any]:
    """Of six lengths, the longest of them early in either half."""
    return [text_batch(4, (32, 64, 48, 80, 56, 72)[number % 6], number) for number in range(STEPS)]


def vision() -> list[Any]:
    """The same of images."""
    sides = [(24, 40, 32, 48, 28, 44)[number % 6] for number in range(STEPS)]
    return [image_batch(4, side, side, number) for number, side in enumerate(sides)]


def frozen_norms(model: nn.Module, number: int) -> None:
    """Their statistics are those of evaluation from some step on, which save more of what they are given."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(number < SWITCH)


def dropout(model: nn.Module, number: int) -> None:
    """Switched on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1 if number >= SWITCH else 0.0


def evaluation(model: nn.Module, number: int) -> None:
    """A model that was loaded for evaluation, trained as it is for a while."""
    model.train(number >= SWITCH)


def alternating(model: nn.Module, number: int) -> None:
    """Three steps in either mode."""
    model.train(number % 6 >= 3)


Switch = Callable[[nn.Module, int], None]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], Switch]] = {
    "norms": (lambda: TinyVision(3, 16), vision, frozen_norms),
    "dropout": (lambda: TinyText(layers=3), text, dropout),
    "evaluation": (lambda: TinyText(layers=3), text, evaluation),
    "alternating": (lambda: TinyText(layers=3), text, alternating),
}


def run(
    kind: str, share: float | None, *, inside: bool, most: int = 0, resident: int = 0
) -> tuple[list[int], Any, Any]:
    """Peaks, weights and records; `inside` switches modules in the loss, where nobody sees it beforehand."""
    make, batches, switch = CASES[kind]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(1)
    number, peaks = 0, list[int]()

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        if inside:
            switch(model, number)
        loss: torch.Tensor = model(**batch).loss
        return loss

    mimose = None
    if share is not None:
        mimose = Mimose(model, budget=int(resident + share * (most - resident)), optimizer=optimizer, loss_fn=loss_of)
    for number, batch in enumerate(batches()):
        if not inside:
            switch(model, number)
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                del loss
        peaks.append(meter.peak_bytes)
    records = [] if mimose is None else list(mimose.records)
    if mimose is not None:
        mimose.close()
    return peaks, {name: value.clone() for name, value in model.state_dict().items()}, records


@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("kind", CASES)
def test_the_budget_holds_whatever_mode_modules_are_in(kind: str, inside: bool) -> None:
    """Each mode is learnt by itself, and planned with again when it comes back."""
    peaks, weights, _ = run(kind, None, inside=inside)
    resident = sum(each.nbytes for each in weights.values())
    ours, same, records = run(kind, 0.75, inside=inside, most=max(peaks), resident=resident)
    budget = int(resident + 0.75 * (max(peaks) - resident))
    assert max(ours) <= budget < max(peaks)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    planned = [record for record in records if not record.sheltered]
    assert any(record.actions for record in planned)
    assert len(planned) >= STEPS // 2
    for record in planned:
        if record.measured_peak_bytes:
            assert record.predicted_peak_bytes == pytest.approx(record.measured_peak_bytes, rel=0.01)
