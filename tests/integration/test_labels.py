"""Tasks that a word in the batch tells, each with a head of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fits import mimose, run, same
from tests.helpers.models import Batch, Task, TinyText, text_batch

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
    plain = run(task=task, data=data)
    budget = plain.budget(0.5)
    callback = mimose(budget)
    fit = run(callback, task=task, data=data)
    assert same(fit.weights(), plain.weights())
    assert max(fit.peaks) <= budget
    assert sum(record.sheltered for record in callback.records[-12:]) <= 1
    assert sum(record.sheltered for record in callback.records) <= 40
    assert any(record.actions for record in callback.records[-12:] if not record.sheltered)
    for record, peak in list(zip(callback.records, fit.peaks, strict=True))[40:]:
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


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
