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
