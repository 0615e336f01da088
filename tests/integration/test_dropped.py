"""Forwards whose result is dropped before the loss: a metric, a generator's output that is detached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from tests.helpers.meter import PeakMeter
from tests.helpers.models import TinyText, text_batch

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
