"""Tasks that a word in the batch tells, each with a head of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fits import mimose, run
from tests.helpers.models import Batch, Task, TinyText, text_batch
from tests.helpers.pairs import pair

TASKS = ("few", "some", "many", "deep")


class Tasks(Task):
    """One body, and a head for each task: with other widths, or with more layers, too."""

    widths: tuple[int, ...] = (20, 60, 200, 600)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.body = TinyText(layers=3)
        self.heads = nn.ModuleDict({task: nn.Linear(32, width) for task, width in zip(TASKS, self.widths, strict=True)})

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch, as its task has it."""
        hidden = self.body.embed(batch["input_ids"])
        for layer in self.body.layers:
            hidden = layer(hidden)
        if self.widths[0] == self.widths[-1]:
            for _ in range(TASKS.index(str(batch["task"]))):
                hidden = torch.tanh(hidden)
        scores = self.heads[str(batch["task"])](hidden)
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch["input_ids"].flatten() % 20)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For all of it."""
        return torch.optim.SGD(self.parameters(), 1e-2)


class Depths(Tasks):
    """Heads of one width, before which there are more operations in some tasks."""

    widths = (20, 20, 20, 20)


class Unread(Task):
    """Reads nothing but tensors."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return super().training_step({name: batch[name] for name in ("input_ids", "labels")}, batch_idx)


def batches(count: int, labelled: Any) -> list[Batch]:
    """Of lengths and tasks by chance."""
    chance = random.Random(0)
    return [
        {**text_batch(4, chance.randrange(20, 84, 4), number), **labelled(number, chance.choice(TASKS))}
        for number in range(count)
    ]


@pytest.mark.conformance("How people train", "several tasks by chance, told by a word in the batch", "works")
@pytest.mark.parametrize("task", [Tasks, Depths])
def test_tasks_are_learnt_each_by_itself(task: type[Task]) -> None:
    """As soon as one of them has taken other memory, or had other operations, than its size had told."""
    data = batches(72, lambda number, name: {"task": name})
    both = pair(0.5, data=data, task=task)
    callback, fit = both.callback, both.budgeted
    assert sum(record.sheltered for record in callback.records[-12:]) <= 1
    assert sum(record.sheltered for record in callback.records) <= 40
    assert any(record.actions for record in callback.records[-12:] if not record.sheltered)
    for record, peak in list(zip(callback.records, fit.peaks, strict=True))[40:]:
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


class Waves(nn.Module):
    """A block that does more to the tokens that are real, which no shape tells."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, real: int) -> torch.Tensor:
        """Adds to its input."""
        waves = self.up(x)[:, :real]
        for _ in range(8):
            waves = torch.sin(waves)
        return x + nn.functional.pad(self.down(waves), (0, 0, 0, x.shape[1] - real))


class Real(Task):
    """Has such blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.layers = nn.ModuleList(Waves() for _ in range(4))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        hidden = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            hidden = layer(hidden, int(batch["real"].sum()))
        return nn.functional.cross_entropy(self.model.head(hidden.mean(1)), batch["labels"])


def test_what_no_shape_tells_is_told_of() -> None:
    """Once, and in the report, with what to do; who has done that hears nothing."""
    chance, data = random.Random(1), []
    for number in range(56):
        length = chance.randrange(40, 100, 4)
        real = torch.arange(length) < chance.randint(int(0.85 * length), length)
        data.append({**text_batch(4, length, number), "real": real.long()})
    budget, hints = run(task=Real, data=data).budget(0.8), []
    for size_fn in (None, lambda batch: {"all": len(batch["real"]), "real": int(batch["real"].sum())}):
        callback = mimose(budget, size_fn=size_fn)
        run(callback, task=Real, data=data)
        hints.append([hint for hint in callback.report().hints if "size_fn=" in hint])
    assert len(hints[0]) == 1
    assert hints[1] == []


def test_words_that_tell_nothing_cost_nothing() -> None:
    """Steps are learnt as if they were not there."""
    data = batches(30, lambda number, name: {"language": name, "name": f"sample {number}", "number": number})
    callbacks = []
    for words in (True, False):
        callback = mimose("1GB")
        run(callback, task=Unread, data=data if words else [{k: b[k] for k in ("input_ids", "labels")} for b in data])
        callbacks.append(callback)
    assert callbacks[0]._advisor is not None
    assert callbacks[0]._advisor.tracker.labels.told == ()
    assert [r.sheltered for r in callbacks[0].records] == [r.sheltered for r in callbacks[1].records]
