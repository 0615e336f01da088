"""Trainings whose kernels follow no law: fits come late, and budget and weights are as ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_mimose import Mimose
from lightning_mimose.predict.fit import Fit, best_fit
from lightning_mimose.predict.fits import MAY_BE_LATE
from tests.helpers.meter import PeakMeter
from tests.helpers.models import TinyText, text_batch

LENGTHS = (48, 16, 40, 24, 32, 20, 44, 28, 36, 18, 46, 22, 42, 26, 24, 48)


@pytest.fixture
def lawless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every fit takes its time and is no good; how many sizes each was made from."""
    made: list[int] = []

    def fit(*given: Any) -> Fit:
        time.sleep(0.02)
        made.append(len(given[0]))
        return replace(best_fit(*given), error=0.3)

    monkeypatch.setattr("lightning_mimose.predict.fits.best_fit", fit)
    yield made


def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int], int, Mimose | None]:
    """Weights, true peaks and what is resident."""
    torch.manual_seed(0)
    model = TinyText()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mimose = None
    if budget is not None:
        mimose = Mimose(model, budget=budget, optimizer=optimizer, size_fn=lambda batch: batch["input_ids"].shape[1])
    peaks, resident = [], 0
    for number, length in enumerate(LENGTHS):
        batch = text_batch(4, length, number)
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = model(**batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        peaks.append(meter.peak_bytes)
        resident = max(resident, meter.resident_bytes)
    return [each.detach().clone() for each in model.parameters()], peaks, resident, mimose


def test_nothing_but_time_depends_on_them(lawless: list[int]) -> None:
    """Sizes that were measured themselves are planned; a question is answered by all of them."""
    weights, peaks, resident, _ = trained(None)
    budget = int(resident + 0.6 * (max(peaks) - resident))
    again, held, _, mimose = trained(budget)
    assert mimose is not None
    assert all(map(torch.equal, weights, again))
    assert max(held) <= budget < max(peaks)
    assert not all(record.sheltered for record in mimose.records)
    assert max(lawless) >= MAY_BE_LATE  # one was made beside the training
    mimose.smallest_feasible_bytes({"size": 47})
    assert not mimose._advisor.estimator.fits.is_late
    mimose.close()
