"""Out of memory all the same: the batch runs again as if it had not begun, or the error says where the memory went."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mimose import DeviceMemoryError, Mimose, MimoseCallback
from tests.helpers.blocks import BatchNormed, Net, data, everything, generators, seeded, train
from tests.helpers.faults import STAGES, Faults, Faulty, LoggingTask
from tests.helpers.models import Block, loader, quiet_trainer

AREA = "Out of memory"
LATE = (9, 13, 18)
"""Batches by which sizes are known, so that they run under a plan that keeps everything."""


def fit(task: LoggingTask, callback: MimoseCallback | None, **options: Any) -> dict[str, Any]:
    """Trains, and returns everything that a second run must not have done twice."""
    seeded(9)
    trainer = quiet_trainer(*([callback] if callback else []), **options)
    trainer.fit(task, loader(data(20)))
    logged = {key: float(value) for key, value in trainer.callback_metrics.items() if "mimose" not in key}
    return {"state": everything(task), "logged": logged, "generators": generators(), "steps": trainer.global_step}


def task(*args: Any) -> LoggingTask:
    seeded()
    return LoggingTask(Faults(), *args)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["every batch steps", "accumulation"])
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=pytest.mark.conformance(AREA, f"in the {stage}", "works")) for stage in STAGES],
)
def test_the_batch_runs_again(stage: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Weights, buffers, generators, lists, metrics and logged means as in the run that had memory enough."""
    caplog.set_level(logging.INFO)
    plain = fit(task(), None, **options)
    failing, callback = task(LATE, stage), MimoseCallback("1GB")
    retried = fit(failing, callback, **options)
    assert failing.faults.raised == len(LATE)
    assert retried == plain
    assert tuple(record.step for record in callback.records if record.retried) == LATE
    assert all(record.actions for record in callback.records if record.retried)
    assert sum("runs again" in line for line in caplog.messages) == len(LATE)


@pytest.mark.conformance(AREA, "in a batch of the first steps, which are the most saving ones already", "refused")
def test_when_nothing_leaner_is_left_the_error_says_where_memory_went() -> None:
    failing = task((1,), "backward")
    before = {name: value.clone() for name, value in failing.state_dict().items() if "model" in name}
    with pytest.raises(DeviceMemoryError, match=r"resident .*The most saving plan was in force") as caught:
        fit(failing, MimoseCallback("1GB"), accumulate_grad_batches=4)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.resident_bytes > 0
    after = failing.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if "norm" not in name)


@pytest.mark.conformance(AREA, "again in the second attempt", "refused")
def test_attempts_are_bounded() -> None:
    failing = task((12,), "backward", 100)
    with pytest.raises(DeviceMemoryError, match="The most saving plan was in force already"):
        fit(failing, MimoseCallback("1GB"))
    assert failing.faults.raised == 2


@pytest.mark.conformance(AREA, 'on_oom="raise"', "refused")
def test_raise_is_taken_at_its_word() -> None:
    failing = task((12,), "forward")
    with pytest.raises(DeviceMemoryError, match=r"retained by units .*blocks") as caught:
        fit(failing, MimoseCallback("1GB", on_oom="raise"))
    assert caught.value.retained_bytes
    assert caught.value.smallest_feasible_bytes is not None


class Manual(LoggingTask):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(batch).loss)
        optimizer.step()


@pytest.mark.conformance(AREA, "manual optimization", "refused")
def test_manual_optimization_cannot_run_again() -> None:
    seeded()
    with pytest.raises(DeviceMemoryError, match="manual optimization cannot run again"):
        fit(Manual(Faults(), (12,), "backward"), MimoseCallback("1GB"))


@pytest.mark.filterwarnings("ignore:.*sync_dist=True")
@pytest.mark.conformance(AREA, "under DDP, in the forward", "works")
def test_under_ddp_a_forward_runs_again() -> None:
    def strategy() -> DDPStrategy:
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DDPStrategy(process_group_backend="gloo", **{name: False})

    plain = fit(task(), None, strategy=strategy())
    callback = MimoseCallback("1GB")
    retried = fit(task((12,), "forward"), callback, strategy=strategy())
    assert any(record.retried for record in callback.records)
    assert retried["logged"] == plain["logged"]
    assert {k: v for k, v in retried["state"].items() if "model" in k} == {
        k: v for k, v in plain["state"].items() if "model" in k
    }


@pytest.mark.parametrize("stage", ["backward", "last gradient"])
@pytest.mark.conformance(AREA, "under DDP, once gradients may be reduced", "refused")
def test_under_ddp_a_backward_does_not(stage: str) -> None:
    with pytest.raises(DeviceMemoryError, match="under DDP some gradients"):
        fit(task((12,), stage), MimoseCallback("1GB"), strategy=DDPStrategy(process_group_backend="gloo"))


@pytest.mark.parametrize("stage", STAGES)
def test_in_a_plain_loop(stage: str) -> None:
    """The same without Lightning."""

    def run(fail: bool) -> tuple[dict[str, Any], list[Any]]:
        seeded()
        faults = Faults()
        model = Faulty(faults)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        seeded(9)
        with Mimose(model, budget="1GB", optimizer=optimizer) as mimose:
            for i, batch in enumerate(data(16)):
                if fail and i == 11:
                    faults.arm(stage)
                mimose.step(batch)
        assert [r.step for r in mimose.records if r.retried] == ([11] if fail else [])
        return everything(model), generators()

    assert run(True) == run(False)


def test_the_memory_of_the_failed_attempt_is_free_before_the_next() -> None:
    """No frame of the error holds an activation."""
    faults, alive = Faults(), []

    class Remembering(Faulty):
        def forward(self, x: torch.Tensor) -> Any:
            alive.append([ref() is not None for ref in refs])
            hidden = self.embed(x)
            refs.append(weakref.ref(hidden))
            return super().forward(x)

    refs: list[Any] = []
    model = Remembering(faults)
    with Mimose(model, budget="1GB") as mimose:
        for batch in data(10):
            mimose.step(batch)
        gc.collect()
        refs.clear()
        faults.arm("backward")
        mimose.step(data(1)[0])
    assert alive[-1] == [False]


def test_what_ran_out_is_planned_leaner() -> None:
    """After it, for a while, a share of the budget is kept free."""
    _, _, plain = train(lambda: Net(BatchNormed), data(20), [])
    assert plain is not None
    peak = max(record.predicted_peak_bytes or 0 for record in plain.records)
    seeded()
    faults = Faults()
    model = Faulty(faults)
    with Mimose(model, budget=int(peak * 1.5)) as mimose:
        for batch in data(12):
            mimose.step(batch)
        largest = max(data(12), key=len)
        before = mimose.plan(largest, int(mimose.plan(largest).predicted_peak_bytes * 1.01))
        faults.arm("backward")
        mimose.step(largest)
        assert mimose.records[-1].retried
        after = mimose.plan(largest, int(mimose.plan(largest).predicted_peak_bytes * 1.01))
    assert len(after.choices) > len(before.choices)


class Late(nn.Module):
    """Calls blocks in some steps that no step before has called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.late = (nn.ModuleList(Block(32) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        """The mean square."""
        for block in (*self.blocks, *(self.late if late else ())):
            x = block(x)
        return x.pow(2).mean()


def test_a_step_that_called_what_its_plan_does_not_know_is_tried_leaner_once() -> None:
    """The most saving plan recomputes that, too: nothing is left to try after it."""
    seeded()
    model, calls = Late(), list[bool]()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        late = len(mimose.records) == 12
        calls.append(late)
        found: torch.Tensor = model(batch, late)
        if late:
            raise torch.OutOfMemoryError("the device says so")
        return found

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss) as mimose:
        for number in range(12):
            mimose.step(torch.randn(4, 16 + 8 * (number % 4), 32))
        assert not mimose.records[-1].actions
        with pytest.raises(DeviceMemoryError, match="The most saving plan was in force already"):
            mimose.step(torch.randn(4, 16, 32))
    assert 2 <= sum(calls) <= 3
