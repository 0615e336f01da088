"""Forwards whose result is dropped before the loss: a metric, a generator's output that is detached."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseCallback
from tests.helpers.fits import same
from tests.helpers.meter import MeterCallback, PeakMeter
from tests.helpers.models import Batch, Block, TinyText, loader, quiet_trainer, text_batch

LENGTHS = (64, 80, 48, 96) * 6


class Task:
    """Runs the model once more, and keeps the graph of that until the loss is there, or not even so long.

    Args:
        held: Whether it is kept.
        times: How much longer that text is than the one that is learnt from.
    """

    def __init__(self, held: bool, times: int = 1) -> None:
        self.held, self.times = held, times

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch["input_ids"].repeat(1, self.times), batch["labels"])
        metric = out.loss.detach()
        if not self.held:
            del out
        loss: torch.Tensor = model(**batch).loss
        return loss + 0 * metric


def trained(held: bool, budget: int | None, times: int = 1) -> tuple[list[torch.Tensor], list[int], list[int], Any]:
    """Weights, peaks, resident bytes and records."""
    torch.manual_seed(0)
    model, task = TinyText(4), Task(held, times)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mimose = None
    if budget is not None:
        mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=task)
    peaks, resident = [], []
    for length in LENGTHS:
        batch = text_batch(4, length)
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                optimizer.zero_grad()
                task(model, batch).backward()
                optimizer.step()
        peaks.append(meter.peak_bytes)
        resident.append(meter.resident_bytes)
    records = list(mimose.records) if mimose is not None else None
    if mimose is not None:
        mimose.close()
    return [p.detach() for p in model.parameters()], peaks, resident, records


def test_a_dropped_call_that_is_larger_keeps_the_budget() -> None:
    """A long clip of which only a metric is wanted: attention saves quadratically more."""
    _, peaks, resident, _ = trained(True, None, times=3)
    budget = int(max(resident) + 0.6 * (max(peaks) - max(resident)))
    _, reached, _, _ = trained(True, budget, times=3)
    assert max(reached) <= budget


@pytest.mark.parametrize("held", [False, True])
def test_units_whose_result_is_dropped_are_planned(held: bool) -> None:
    """In the budget, with the bits of the plain run, and soon without shelter."""
    weights, peaks, resident, _ = trained(held, None)
    budget = int(max(resident) + 0.6 * (max(peaks) - max(resident)))
    found, reached, _, records = trained(held, budget)
    assert max(reached) <= budget
    assert sum(record.sheltered for record in records) <= 8
    assert any(set(record.actions.values()) - {"keep"} for record in records if not record.sheltered)
    assert all(torch.equal(one, other) for one, other in zip(weights, found, strict=True))


class Probed(pl.LightningModule):
    """Blocks of their own look at what the model made, and no gradient goes through them.

    Args:
        held: Whether their graph lives to the end of the step (it is returned), or is dropped at once.
    """

    def __init__(self, held: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held = held
        self.model = TinyText(4)
        self.probe = nn.ModuleList([Block(32) for _ in range(4)])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        out = self.model(**batch)
        seen = self.model.embed(batch["input_ids"]).detach()
        for block in self.probe:
            seen = block(seen)
        seen = seen.square().mean()
        return {"loss": out.loss, "probe": seen if self.held else seen.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def probed(held: bool, callback: MimoseCallback | None) -> tuple[Any, MeterCallback]:
    """Weights and peaks of a fit."""
    module, meter = Probed(held), MeterCallback()
    torch.manual_seed(1)
    batches = loader([text_batch(4, length) for length in LENGTHS])
    quiet_trainer(*(each for each in (meter, callback) if each is not None)).fit(module, batches)
    return module.state_dict(), meter


@pytest.mark.parametrize("held", [True, False])
def test_units_whose_every_result_is_dropped_are_known(held: bool) -> None:
    """They never run again, so that no recomputation tells what they save: their forward does."""
    weights, plain = probed(held, None)
    budget = int(min(plain.residents) + 0.7 * (max(plain.peaks) - min(plain.residents)))
    callback = MimoseCallback(budget=budget)
    found, meter = probed(held, callback)
    assert same(weights, found)
    assert max(meter.peaks) <= budget
    planned = [(r.predicted_peak_bytes, peak) for r, peak in zip(callback.records, meter.peaks, strict=True)]
    errors = [predicted / peak - 1 for predicted, peak in planned if predicted is not None]
    assert len(errors) >= len(LENGTHS) - 8
    assert max(map(abs, errors)) <= 0.001
