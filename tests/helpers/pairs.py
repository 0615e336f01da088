"""The same fit without and with a budget, and everything that must be true of the second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback

from lightning_mimose import MimoseCallback
from lightning_mimose.report.record import StepRecord
from tests.helpers.fits import Fit, run, same
from tests.helpers.models import Batch, Task, image_batch, text_batch


def few(kind: str = "text", count: int = 6) -> list[Batch]:
    """Batches of two sizes: two steps learn, the others are planned."""
    if kind == "vision":
        return [image_batch(4, side, side, i) for i, side in enumerate([32, 40] * (count // 2))]
    return [text_batch(4, tokens, i) for i, tokens in enumerate([64, 80] * (count // 2))]


def rerun(callback: MimoseCallback) -> int:
    """Steps under a plan that recomputes something."""
    return sum(1 for record in callback.records if not record.sheltered and record.recomputed_units)


def saving(callback: MimoseCallback) -> int:
    """Steps under a plan that recomputes something or keeps recipes in its place."""
    return sum(1 for record in callback.records if not record.sheltered and saving_units(record))


def saving_units(record: StepRecord) -> int:
    """How many units of a step kept less than they would."""
    return record.recomputed_units + record.lean_units


class Runs(Callback):
    """Counts how often parts of units run: a recomputation runs them once more than a plain step does.

    Args:
        part: What the parts' names end with.

    Attributes:
        batches: One figure per training batch.
    """

    def __init__(self, part: str = "qkv") -> None:
        self._part, self._handles, self.batches = part, list[Any](), list[int]()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watches. A pre-hook: a recomputation that is stopped early never reaches the end of its last layer."""
        found = [module for name, module in pl_module.named_modules() if name.endswith(self._part)]
        self._handles = [module.register_forward_pre_hook(self._count) for module in found]

    def _count(self, *_: Any) -> None:
        if self.batches:
            self.batches[-1] += 1

    def on_train_batch_start(self, *_: Any) -> None:
        """Begins at nothing."""
        self.batches.append(0)

    def on_train_end(self, *_: Any) -> None:
        """Lets go."""
        for handle in self._handles:
            handle.remove()


@dataclass
class Pair:
    """Two runs of the same training.

    Attributes:
        plain: Without the plugin.
        budgeted: With it.
        callback: The plugin.
    """

    plain: Fit
    budgeted: Fit
    callback: MimoseCallback


def pair(
    share: float = 0.7,
    others: Callable[[], Iterable[Callback]] = tuple,
    *,
    data: Sequence[Batch] | None = None,
    kind: str = "text",
    task: type[Task] = Task,
    planned: int = 1,
    held: bool = True,
    after: Callable[[], Iterable[Callback]] = tuple,
    actions: Sequence[str] | None = None,
    **options: Any,
) -> Pair:
    """Train twice; the second run must be equal to the bit, inside its budget, and save memory in planned steps.

    The meter shares no code with the plugin. Where the run without a budget goes over it and the run with it does not,
    units kept less and were not only said to.

    Args:
        share: Of the plain run's activation memory, the part that the budget leaves.
        others: Makes the callbacks that stand before the plugin, anew for each run.
        data: The batches.
        kind: Which of the tiny models.
        task: Which LightningModule.
        planned: How many steps must run under a plan that recomputes, or keeps recipes.
        held: Whether every step's peak must be inside the budget.
        after: As `others`, behind the plugin.
        actions: What plans may use, as the plugin takes it.
        options: For the `Trainer`.
    """
    data = few(kind) if data is None else data
    plain = run(*others(), *after(), kind=kind, data=data, task=task, **options)
    callback = MimoseCallback(plain.budget(share), actions=actions)
    budgeted = run(*others(), callback, *after(), kind=kind, data=data, task=task, **options)
    both = Pair(plain, budgeted, callback)
    assert same(plain.weights(), budgeted.weights())
    assert saving(callback) >= planned
    assert callback.budget_bytes is not None
    assert max(plain.peaks) > callback.budget_bytes
    if held:
        assert len(budgeted.peaks) == len(callback.records)
        assert max(budgeted.peaks) <= callback.budget_bytes
    return both
