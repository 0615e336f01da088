"""The strategies: by name, by class, by mixin; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from lightning_mimose import (
    BudgetError,
    MimoseCallback,
    MimoseDDPStrategy,
    MimoseSingleDeviceStrategy,
    MimoseStrategyMixin,
)
from lightning_mimose.plugin.strategies import register
from tests.helpers.fits import run, same
from tests.helpers.models import quiet_trainer
from tests.helpers.pairs import saving


class MyStrategy(SingleDeviceStrategy):
    """A user's own."""

    def __init__(self, mark: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mark = mark


class Mine(MimoseStrategyMixin, MyStrategy):
    """With a budget."""


def test_the_names_are_registered_once() -> None:
    """Registering again is harmless: the package may be imported a second time."""
    register()
    assert {"mimose", "mimose_ddp"} <= set(StrategyRegistry.available_strategies())
    assert isinstance(quiet_trainer(strategy="mimose").strategy, MimoseSingleDeviceStrategy)
    assert isinstance(quiet_trainer(strategy="mimose_ddp").strategy, MimoseDDPStrategy)


def test_a_strategy_by_name_takes_what_is_free() -> None:
    """`Trainer(strategy="mimose")` plans under "auto"."""
    fit = run(strategy="mimose", metered=False)
    callback = fit.trainer.strategy.mimose_callback  # type: ignore[attr-defined]
    assert callback in fit.trainer.callbacks  # type: ignore[attr-defined]
    assert callback.budget == "auto"
    assert len(callback.records) == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda budget: MimoseSingleDeviceStrategy(budget=budget),
        lambda budget: Mine(mark="mine", device="cpu", budget=budget),
    ],
    ids=["single device", "mixin"],
)
def test_a_strategy_holds_its_budget(make: Any) -> None:
    """With the same weights as without, and its callback answers afterwards."""
    plain = run()
    strategy = make(plain.budget(0.8))
    fit = run(strategy=strategy)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= plain.budget(0.8)
    assert strategy.mimose_callback.report().aggregates.steps == 12
    assert saving(strategy.mimose_callback)


def test_a_strategy_can_be_used_for_a_second_trainer_run() -> None:
    """The callback is added once."""
    fit = run(strategy="mimose", metered=False)
    fit.trainer.fit_loop.max_epochs = 2
    fit.trainer.fit(fit.task, fit.trainer.train_dataloader)
    callbacks = fit.trainer.callbacks  # type: ignore[attr-defined]
    assert sum(isinstance(callback, MimoseCallback) for callback in callbacks) == 1
    assert len(fit.trainer.strategy.mimose_callback.records) == 24  # type: ignore[attr-defined]


def test_every_keyword_reaches_the_callback() -> None:
    """One by one."""
    given = {
        "budget": "2GB",
        "units": ["Block"],
        "size_fn": len,
        "actions": ["recompute"],
        "planner": "greedy",
        "on_infeasible": "warn",
        "on_oom": "raise",
        "host_budget": "1GB",
    }
    for strategy in (MimoseSingleDeviceStrategy(**given), MimoseDDPStrategy(**given, find_unused_parameters=True)):
        assert {name: getattr(strategy.mimose_callback, name) for name in given} == given
        assert strategy.mimose_budget == "2GB"


def test_a_bad_budget_is_refused_at_once() -> None:
    """Before a Trainer exists."""
    with pytest.raises(BudgetError, match="8 parsecs"):
        MimoseSingleDeviceStrategy(budget="8 parsecs")


def test_classes_are_lightnings() -> None:
    """So that what Lightning asks by class holds for them."""
    assert issubclass(MimoseSingleDeviceStrategy, SingleDeviceStrategy)
    assert issubclass(MimoseDDPStrategy, DDPStrategy)
    assert MimoseSingleDeviceStrategy().root_device == torch.device("cpu")


def test_the_accelerators_first_device_is_taken() -> None:
    """The one the Trainer was told to use, not device 0; a device that was named stays."""
    strategy = MimoseSingleDeviceStrategy()
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
    named = MimoseSingleDeviceStrategy(device="cpu")
    named.parallel_devices = [torch.device("cuda", 1)]
    assert named.root_device == torch.device("cpu")
