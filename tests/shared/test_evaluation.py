"""Validation in a shared budget."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mimose import MimoseCallback, SharedBudget
from lightning_mimose.shared.broker import LocalBroker
from tests.helpers.sharing import block


class Training(pl.LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        self.blocks, self.fails = torch.nn.Sequential(*(block() for _ in range(3))), fails

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        if self.fails and batch_idx == 2:
            raise RuntimeError("no more")
        self.blocks(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(model, budget, sanity=0):
    sizes = (64, 16, 128, 128)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[callback := MimoseCallback(budget=budget)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=sanity,
    )
    batches = DataLoader([torch.randn(size, 32) for size in sizes], batch_size=None)
    trainer.fit(model, DataLoader([torch.randn(8, 32) for _ in range(8)], batch_size=None), batches)
    return callback


@pytest.fixture
def claims(monkeypatch):
    """Whatever is claimed, with whether gradients are on."""
    found = []
    resume = LocalBroker.resume  # whatever begins tries this first

    def noted(self, job, claim, rest_bytes):
        if not torch.is_grad_enabled():
            found.append(claim.peak_bytes)
        return resume(self, job, claim, rest_bytes)

    monkeypatch.setattr(LocalBroker, "resume", noted)
    return found


def test_validation_claims_what_no_smaller_batch_took_and_all_there_is_for_a_larger_one(claims):
    shared = SharedBudget("100MB", device="cpu")
    callback = fit(Training(), shared)
    assert shared.report().highest_bytes <= 10**8
    peak = callback.report().evaluation_peaks["validation"]
    first, second = claims[:4], claims[4:]
    assert first[0] == first[2] == 10**8
    assert first[1] < 10**7
    assert first[3] == peak
    assert [claim == 10**8 for claim in second] == [False] * 4
    assert max(second) <= peak


def test_validation_that_fails_gives_back_what_it_claimed():
    shared = SharedBudget("100MB", device="cpu")
    with shared.job("one") as job:
        lease, _ = job.open(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="no more"):
            fit(Training(fails=True), shared)
        assert not lease._stepping


def test_validation_before_the_first_step_is_claimed_as_well(claims):
    fit(Training(), SharedBudget("100MB", device="cpu"), sanity=2)
    assert claims[0] == 10**8
    assert len(claims) == 10
