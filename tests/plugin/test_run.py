"""One fit: what its engine follows in mid-run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_mimose import BudgetInfeasibleError, MimoseCallback
from lightning_mimose.plugin.run import Run
from tests.helpers.fits import batches, run, same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Batch, Task, TinyText, loader, quiet_trainer


class Changing(Task):
    """SGD without any state, and AdamW from the second epoch on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The one or the other."""
        if self.current_epoch < 1:
            return torch.optim.SGD(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def change(self) -> None:
        """By assignment."""
        self.trainer.optimizers = [self.configure_optimizers()]

    def on_train_epoch_start(self) -> None:
        """Before the epoch's first batch."""
        if self.current_epoch == 1:
            self.change()


class SetUpAgain(Changing):
    """As Lightning does it at the start."""

    def change(self) -> None:
        """With the schedulers."""
        self.trainer.strategy.setup_optimizers(self.trainer)


class InMidEpoch(Changing):
    """When the callback has planned the batch already."""

    def on_train_epoch_start(self) -> None:
        """Nothing yet."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the third batch."""
        if self.current_epoch == 1 and batch_idx == 2:
            self.change()


class ByHand(Changing):
    """Manual optimization."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Zeroes, and updates itself."""
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("task", [Changing, SetUpAgain, InMidEpoch, ByHand])
def test_an_optimizer_that_is_replaced_is_counted(task: type[Changing]) -> None:
    """Its state is reserved before its first update, and resident from then on."""
    data = batches(count=8)
    plain = run(task=task, data=data, max_epochs=2)
    budget = plain.budget(0.4)
    callback = MimoseCallback(budget)
    budgeted = run(callback, task=task, data=data, max_epochs=2)
    assert max(plain.peaks) > budget
    assert max(budgeted.peaks) <= budget
    assert same(plain.weights(), budgeted.weights())
    assert [record.resident_bytes for record in callback.records][11:] == budgeted.residents[11:]
    assert not any(record.sheltered for record in callback.records[8:])


def test_one_whose_state_exceeds_the_budget_is_refused_before_its_update() -> None:
    """It is said what would do."""
    peaks = []
    for callback in ([], [MimoseCallback("14MB")]):
        meter = MeterCallback()
        expected = pytest.raises(BudgetInfeasibleError, match="update alone needs") if callback else nullcontext()
        with expected as refused:
            quiet_trainer(meter, *callback, max_epochs=2).fit(
                Changing(TinyText(vocabulary=20_000)), loader(batches(count=4))
            )
        peaks.append(meter.peaks)
    assert max(peaks[0]) > 14e6 >= max(peaks[1])
    assert len(peaks[1]) == 5
    assert refused is not None
    assert refused.value.smallest_feasible_bytes >= max(peaks[0][5:])


def test_what_is_zeroed_before_a_batch_runs_again_is_the_new_ones() -> None:
    """Gradients of what it does not update stay, and are put back."""
    callback, zeroed = MimoseCallback("1GB"), list[int]()

    class OnlyHead(Changing):
        def change(self) -> None:
            self.trainer.optimizers = [torch.optim.SGD(self.model.head.parameters(), lr=1e-3)]  # type: ignore[union-attr]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if callback._run is not None and callback._run._attempts is not None:
                zeroed.append(len(callback._run._attempts()._zeroed))

    plain = run(task=OnlyHead, data=batches(count=2), metered=False, max_epochs=2)
    budgeted = run(callback, task=OnlyHead, data=batches(count=2), metered=False, max_epochs=2)
    every, head = len(list(plain.task.parameters())), len(list(plain.task.model.head.parameters()))  # type: ignore[union-attr]
    assert zeroed == [every, every, head, head]
    assert same(plain.weights(), budgeted.weights())


def test_optimizers_that_stay_are_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To probe them takes milliseconds."""
    seen = list[bool]()
    original = Run._begin_step

    def begin_step(self: Run, *args: Any, **kwargs: Any) -> None:
        before = self.engine._update.cost
        original(self, *args, **kwargs)
        seen.append(self.engine._update.cost is before)

    monkeypatch.setattr(Run, "_begin_step", begin_step)
    run(MimoseCallback("1GB"), data=batches(count=3), metered=False, max_epochs=2)
    assert len(seen) == 6
    assert all(seen)


Copied = Callable[[MimoseCallback], MimoseCallback]
every_way = pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))]
)


@every_way
def test_a_copy_in_mid_validation_ends_no_measurement(copied: Copied) -> None:
    """Nor does it measure on."""

    def peaks(way: Copied | None) -> tuple[int, list[MimoseCallback]]:
        callback, copies = MimoseCallback("1GB"), list[MimoseCallback]()

        class Validating(Task):
            def validation_step(self, batch: Batch, _: int) -> None:
                """Copies before it takes anything."""
                if way is not None:
                    copies.append(way(callback))
                    copies[-1].teardown(self.trainer, self, "fit")
                self.model(**batch)

        trainer, data = quiet_trainer(callback), batches("text", 3)
        trainer.fit(Validating(TinyText()), loader(data), loader(data))
        return callback._evaluation.peaks["validation"], copies

    expected, _ = peaks(None)
    found, copies = peaks(copied)
    assert found == expected
    assert copies
    assert all(each._evaluation._meter is None for each in copies)


@every_way
def test_the_callback_can_be_copied_in_mid_run(copied: Copied) -> None:
    """As some callbacks copy the trainer's others, or all of a module; the copy has no part in the run."""
    callback, copies = MimoseCallback("1GB"), list[MimoseCallback]()

    class Copying(Task):
        def on_train_batch_end(self, *_: Any) -> None:
            """In every step."""
            copies.append(copied(callback))
            copies[-1].teardown(self.trainer, self, "fit")

    quiet_trainer(callback).fit(Copying(TinyText()), loader(batches("text", 3)))
    assert len(copies) == len(callback.records) == 3
    assert all(record.measured_peak_bytes for record in callback.records)
    size, latest = callback.records[0].size, copies[-1]
    assert latest.plan(size) == callback.plan(size)
    sheltered = []
    for each in (latest, callback):
        quiet_trainer(each).fit(Copying(TinyText()), loader(batches("text", 3)))
        sheltered.append([record.sheltered for record in each.records][-3:])
    assert sheltered[0] == sheltered[1]
    assert not all(sheltered[0])
