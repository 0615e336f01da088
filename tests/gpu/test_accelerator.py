"""On an accelerator: the allocator's own counters say that the budget is held, and the weights are the plain run's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mimose import Mimose
from tests.helpers.fits import same
from tests.helpers.models import TinyKeywords, TinyText, text_batch

pytestmark = pytest.mark.gpu
LENGTHS = (256, 192, 384, 128, 320, 512, 224, 448, 160, 288)


def train(kind: type[TinyText], budget: int | None) -> tuple[dict[str, torch.Tensor], list[int], Mimose | None]:
    """Weights, the peak of every step by the allocator, and the loop's `Mimose`."""
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    model = kind(layers=6, hidden=256).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = [{k: v.to(device) for k, v in text_batch(8, n, i).items()} for i, n in enumerate(LENGTHS)]
    peaks = []
    torch.manual_seed(1)
    mimose = None if budget is None else Mimose(model, budget=budget, optimizer=optimizer)
    for batch in batches:
        torch.accelerator.reset_peak_memory_stats()
        if mimose is not None:
            mimose.step(batch)
        else:
            loss = model(**batch).loss
            model.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        peaks.append(int(torch.accelerator.max_memory_allocated()))
    if mimose is not None:
        mimose.close()
    return {name: value.cpu() for name, value in model.state_dict().items()}, peaks, mimose


@pytest.mark.parametrize("kind", [TinyText, TinyKeywords], ids=lambda kind: kind.__name__)
def test_held_and_the_same(kind: type[TinyText]) -> None:
    """Dropout included, whose generator must be put back for units that get their tensors by keyword, too."""
    deterministic: Any = torch.use_deterministic_algorithms
    deterministic(True, warn_only=True)
    plain, peaks, _ = train(kind, None)
    budget = int(0.7 * max(peaks))
    ours, _, mimose = train(kind, budget)
    assert mimose is not None
    assert max(record.measured_peak_bytes or 0 for record in mimose.records) <= budget
    assert any(record.actions for record in mimose.records if not record.sheltered)
    assert same(plain, ours)
