"""Steps that call other blocks than others, by their size: long texts that skip some, short ones that do, either."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseCallback
from tests.helpers.fits import run, same
from tests.helpers.models import Batch, Block, Task, TinyText, text_batch
from tests.helpers.pairs import pair

STEPS, LIMIT = 72, 40


class Skips(Task):
    """Skips most blocks in some steps."""

    def __init__(self, _: Any = None) -> None:
        super().__init__(TinyText(6, 32))
        self.others = nn.ModuleList()

    def skips(self, length: int) -> bool:
        """Whether texts of some length do."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        x = self.model.embed(batch["input_ids"])
        skips = self.skips(x.shape[1])
        for layer in [*self.model.layers[:2], *(self.others if skips else self.model.layers[2:])]:
            x = layer(x)
        return x.square().mean()


class LongSkip(Skips):
    """Long texts call two blocks only."""

    def skips(self, length: int) -> bool:
        """See above."""
        return length > LIMIT


class ShortSkip(Skips):
    """Short texts do."""

    def skips(self, length: int) -> bool:
        """See above."""
        return length <= LIMIT


class Either(LongSkip):
    """Long texts call a block of their own in place of the others."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.others = nn.ModuleList([Block(32)])


@pytest.mark.conformance("How people train", "blocks that are left out of long texts", "works")
@pytest.mark.parametrize("task", [LongSkip, ShortSkip, Either])
def test_what_goes_by_the_size_is_learnt_for_its_sizes(task: type[Skips]) -> None:
    """Each path is predicted for the sizes that take it, to within 1 %, once enough steps have shown it."""
    chance = random.Random(3)
    data = [text_batch(4, chance.randint(8, 72), i) for i in range(STEPS)]
    both = pair(0.8, task=task, data=data)
    late = [*zip(both.callback.records, both.budgeted.peaks, strict=True)][STEPS // 2 :]
    assert sum(record.sheltered for record, _ in late) <= 2
    for record, peak in late:
        if not record.sheltered:
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01), record.size


def test_plans_for_one_path_are_forgotten_when_a_size_takes_another() -> None:
    """As soon as it goes by the size no more: the next text of any length may take the longer path."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(32) for _ in range(6))
            self.skips: bool | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips = x.shape[1] <= LIMIT if self.skips is None else self.skips
            for layer in self.layers[:2] if skips else self.layers:
                x = layer(x)
            return x.square().mean()

    chance, net = random.Random(1), Net()
    with Mimose(net, budget="1GB", optimizer=torch.optim.SGD(net.parameters(), 1e-3), units=["layers.*"]) as mimose:

        def predicted(length: int) -> int:
            mimose.step(torch.randn(4, length, 32))
            return mimose.records[-1].predicted_peak_bytes or 0

        for _ in range(60):
            predicted(chance.randint(8, 72))
        before = max(predicted(21) for _ in range(2))  # it may be measured first
        net.skips = True
        predicted(50)
        net.skips = None
        assert predicted(21) > 1.3 * before > 0


def test_long_texts_that_skip_blocks_are_not_refused_for_them() -> None:
    """Though it is not known yet that it goes by the length, and no plan for all blocks would fit."""

    class Deep(LongSkip):
        def __init__(self, _: Any = None) -> None:
            super().__init__()
            self.model = TinyText(24, 32)

        def skips(self, length: int) -> bool:
            return length > 64

    chance = random.Random(3)
    short, long = ([text_batch(4, chance.randint(*span), i) for i in range(20)] for span in ((8, 64), (66, 90)))
    data = [*short[:10], *long[:4], *short[10:16], *long[4:8], *short[16:]]
    plain = run(task=Deep, data=data)
    callback = MimoseCallback(budget := plain.budget(0.1))
    fit = run(callback, task=Deep, data=data)
    assert len(fit.peaks) == len(data)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget
