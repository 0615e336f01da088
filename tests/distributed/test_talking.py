"""What is known of units that talk to other ranks goes on with the rest of what was learnt."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_mimose import MimoseCallback
from tests.distributed.fits import TalkingText
from tests.helpers.fits import batches
from tests.helpers.models import Batch, Task, loader, quiet_trainer, text_batch


def fit(callback: MimoseCallback, data: list[Batch]) -> MimoseCallback:
    """One epoch."""
    pl.seed_everything(0, verbose=False)
    quiet_trainer(callback).fit(Task(TalkingText()), loader(data))
    return callback


# Lightning says so of a single device too, where a process group is open.
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log.*sync_dist=True")
def test_a_resumed_run_recomputes_none_of_them() -> None:
    """Not even in its first step, which other ranks may plan."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    first = fit(MimoseCallback("1GB"), batches(count=3))
    assert not any("model.layers.1" in record.actions for record in first.records)
    second = MimoseCallback("1GB")
    second.load_state_dict(first.state_dict())
    (record,) = fit(second, [text_batch(4, 48)]).records  # too little is known to plan
    assert record.sheltered
    assert "model.layers.0" in record.actions
    assert "model.layers.1" not in record.actions
