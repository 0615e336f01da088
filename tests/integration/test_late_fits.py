"""Trainings whose kernels follow no law: fits come late, and budget and weights are as ever."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fits import MAY_BE_LATE
from lightning_mimose.predict.fitting import best_fit
from tests.helpers.architectures import equal, train
from tests.helpers.models import Batch, TinyText, text_batch

LENGTHS = (48, 16, 40, 24, 32, 20, 44, 28, 36, 18, 46, 22, 42, 26, 24, 48)


@pytest.fixture
def lawless(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every fit takes its time and is no good; how many sizes each was made from."""
    made: list[int] = []

    def fit(*given: Any) -> Fit:
        time.sleep(0.02)
        made.append(len(given[0]))
        return replace(best_fit(*given), error=0.3)

    monkeypatch.setattr("lightning_mimose.predict.fits.best_fit", fit)
    return made


def size(batch: Batch) -> int:
    """As a user names it, who does not say that it is the length of a text."""
    return batch["input_ids"].shape[1]


def test_nothing_but_time_depends_on_them(lawless: list[int]) -> None:
    """Sizes that were measured themselves are planned; a question is answered by all of them."""
    batches = [text_batch(4, length, number) for number, length in enumerate(LENGTHS)]
    plain = train(TinyText, batches)
    budget = plain.budget(0.6)
    held = train(TinyText, batches, budget, size_fn=size)
    assert held.mimose is not None
    assert equal(held, plain)
    assert max(held.peaks) <= budget < max(plain.peaks)
    assert not all(record.sheltered for record in held.mimose.records)
    assert max(lawless) >= MAY_BE_LATE  # one was made beside the training
    held.mimose.smallest_feasible_bytes({"size": 47})
    assert not held.mimose._advisor.estimator.fits.is_late
