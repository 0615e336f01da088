"""Units with small buffers: copies of these are there while the forward of one that is recomputed runs."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_mimose import MimoseCallback
from tests.helpers.fits import same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Task, TinyText, loader, quiet_trainer, text_batch

LENGTHS = (64, 68, 20, 48, 80, 76, 64, 52, 76, 60, 88, 40, 80, 32, 52)


def pruned() -> TinyText:
    """Its linear layers make their weights before each forward, from a mask that is a buffer of theirs."""
    model = TinyText(hidden=64)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", 0.2)  # type: ignore[no-untyped-call]
    return model


def fitted(budget: int | None = None) -> tuple[Task, MeterCallback, MimoseCallback | None]:
    """Four epochs, on the independent meter."""
    pl.seed_everything(0, verbose=False)
    task, meter = Task(pruned()), MeterCallback()
    callback = None if budget is None else MimoseCallback(budget)
    data = [text_batch(4, length, number) for number, length in enumerate(LENGTHS)]
    quiet_trainer(meter, *([] if callback is None else [callback]), max_epochs=4).fit(task, loader(data))
    return task, meter, callback


@pytest.mark.parametrize("share", [0.5, 0.45])
def test_pruned_weights_are_predicted_and_held(share: float) -> None:
    """Also where a part of a block is recomputed, of which the whole was measured."""
    plain, meter, _ = fitted()
    resident = max(meter.residents)
    budget = int(resident + share * (max(meter.peaks) - resident))
    ours, measured, callback = fitted(budget)
    assert callback is not None
    assert max(measured.peaks) <= budget
    planned = [
        (record.predicted_peak_bytes, peak)
        for record, peak in zip(callback.records, measured.peaks, strict=True)
        if not record.sheltered
    ]
    assert len(planned) >= 50
    assert all(predicted == pytest.approx(peak, rel=0.012) for predicted, peak in planned)
    assert any(".mlp" in unit for record in callback.records for unit in record.actions)
    assert same(plain.state_dict(), ours.state_dict())
    assert not torch.equal(ours.state_dict()["model.layers.0.qkv.weight_orig"], pruned().layers[0].qkv.weight_orig)


@pytest.mark.parametrize("actions", [
    {"0": "lean+expansions", "2.mlp": "recompute"},
    {"0": "recompute", "1": "recompute", "2.mlp": "recompute"},
    {"0": "recompute", "1": "recompute", "2": "recompute"},
])  # fmt: skip
def test_weights_that_modules_keep_are_looked_at_without_more_memory(actions: dict[str, str]) -> None:
    """Whether calls go on from them is found out beside planned steps, and recomputations end with what is saved."""
    pl.seed_everything(0, verbose=False)
    named = {f"model.layers.{name}": action for name, action in actions.items()}
    meter, callback = MeterCallback(), MimoseCallback("1GB", planner=lambda *_: named)
    data = [text_batch(4, length, number) for number, length in enumerate(LENGTHS)]
    quiet_trainer(meter, callback, max_epochs=2).fit(Task(pruned()), loader(data))
    planned = [(r, peak) for r, peak in zip(callback.records, meter.peaks, strict=True) if not r.sheltered]
    assert len(planned) >= 24
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=1e-4)
        assert dict(record.actions) == named


def test_a_run_that_starts_with_the_least_budget_learns_within_it() -> None:
    """Its recomputations run to their end, further than those of planned steps."""
    _, _, callback = fitted(10**9)
    assert callback is not None
    longest = {"batch": 4, "input_ids:1": max(LENGTHS)}
    least = callback.smallest_feasible_bytes(longest)
    _, measured, fresh = fitted(least)
    assert fresh is not None
    learning = [peak for record, peak in zip(fresh.records, measured.peaks, strict=True) if record.sheltered]
    assert learning
    assert max(measured.peaks) <= least
