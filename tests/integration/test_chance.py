"""Steps that call other blocks than others by chance: layers that are left out (LayerDrop), one head of several."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import Batch, Block, Task, TinyText, text_batch
from tests.helpers.pairs import pair

WAYS, STEPS = "How people train", 56


class LeftOut(Task):
    """Leaves out each layer by chance."""

    share = 0.1

    def __init__(self, _: Any = None) -> None:
        super().__init__(TinyText(8, 32))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        x = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            if float(torch.rand(())) >= self.share:
                x = layer(x)
        return self.after(x)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of it."""
        return x.square().mean()


class OneHead(LeftOut):
    """Leaves out none, and goes on with one head of three, each of another depth."""

    share = 0.0

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.model = TinyText(4, 32)
        self.heads = nn.ModuleList(nn.Sequential(*(Block(32) for _ in range(count))) for count in (1, 2, 3))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """One of them."""
        out: torch.Tensor = self.heads[int(torch.randint(3, ()))](x).square().mean()
        return out


@pytest.mark.parametrize(
    ("task", "seed", "most"),
    [
        pytest.param(
            LeftOut, 5, 16, marks=pytest.mark.conformance(WAYS, "blocks that are left out by chance", "works")
        ),
        pytest.param(OneHead, 4, 42, marks=pytest.mark.conformance(WAYS, "one head of several, by chance", "works")),
    ],
)
def test_what_is_called_by_chance_is_learnt_once(task: type[LeftOut], seed: int, most: int) -> None:
    """Not for every number of operations by itself: the paths through the model tell what such steps take."""
    chance = random.Random(seed)
    data = [text_batch(4, chance.randint(8, 64), i) for i in range(STEPS)]
    sheltered = [record.batch_idx for record in pair(task=task, data=data).callback.records if record.sheltered]
    assert len(sheltered) <= most
    assert not [step for step in sheltered if step >= most]
