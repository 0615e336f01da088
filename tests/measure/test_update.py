"""What an update reached, and what of it has to come again."""

from __future__ import annotations

import torch
from torch import nn

from lightning_mimose.measure.resident import ResidentLedger
from lightning_mimose.measure.update import UpdateReserve

Optimizers = type[torch.optim.Optimizer]


def updated(kind: Optimizers, *, steps: bool = True) -> UpdateReserve:
    """One that has seen an update begin, in which the optimizer stepped or did not."""
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    reserve = UpdateReserve(ResidentLedger(model))
    reserve.watch([optimizer])
    model(torch.ones(1, 8)).sum().backward()
    reserve.begins()
    if steps:
        optimizer.step(lambda: 0.0)
    return reserve


def test_what_stayed_need_not_come_again() -> None:
    """State lasts by now, or nobody knows of it; all of it together is sure to do."""
    reserve = updated(torch.optim.SGD)
    assert reserve.surely_bytes(1000) == (1000, 1000)
    reserve.reached(500, 200)
    assert reserve.surely_bytes(1000) == (1000, 1000), "things are made and tuned in the first one"
    reserve.reached(500, 200)
    assert reserve.surely_bytes(1000) == (1300, 1500)
    reserve.reached(500, -200)  # gradients went in it
    assert reserve.surely_bytes(1000) == (1300, 1500)
    reserve.reached(600, 0)
    assert reserve.surely_bytes(1000) == (1500, 1600)


def test_an_update_that_wrote_nothing_tells_nothing() -> None:
    """A scaler has skipped it; nor does one whose optimizer keeps more with every update."""
    for reserve in (updated(torch.optim.SGD, steps=False), updated(torch.optim.LBFGS)):
        reserve.reached(500, 200)
        reserve.reached(500, 200)
        assert reserve.surely_bytes(1000) == (1000, 1000)


def test_other_optimizers_are_other_updates() -> None:
    """What was trained before says nothing of what is trained now."""
    reserve = updated(torch.optim.SGD)
    reserve.reached(500, 200)
    reserve.reached(500, 200)
    reserve.watch([])
    assert reserve.surely_bytes(1000) == (1000, 1000)
