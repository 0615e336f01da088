"""Strategies that are refused before anything runs, by name and with a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)

from lightning_mimose import Mimose, MimoseCallback, UnsupportedError
from lightning_mimose.plugin.support import check_strategy
from tests.helpers.models import Task, TinyText


class Own(FSDPStrategy):
    """A subclass is what its base is."""


class Unknown:
    """Somebody's own strategy."""


def set_up(kind: type[Strategy]) -> None:
    """What `trainer.fit` does first. Of DeepSpeed and FSDP no Trainer can be made without accelerators."""
    callback = MimoseCallback(budget="8GB")
    strategy = kind.__new__(kind)
    strategy._accelerator = strategy._parallel_devices = strategy.cluster_environment = None
    callback.setup(SimpleNamespace(strategy=strategy, callbacks=[callback]), Task(TinyText()), "fit")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        pytest.param(kind, reason, marks=pytest.mark.conformance("Several ranks", what, "refused"), id=kind.__name__)
        for kind, reason, what in (
            (FSDPStrategy, "flat parameters", "FSDPStrategy"),
            (Own, "flat parameters", "FSDPStrategy"),
            (DeepSpeedStrategy, "partitions parameters", "DeepSpeedStrategy"),
        )
    ],
)
def test_by_name(kind: type[Strategy], reason: str) -> None:
    """The error names the strategy, says why, and what to use instead."""
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} is not supported: .*{reason}.* 'ddp'"):
        set_up(kind)


@pytest.mark.conformance("Several ranks", "a strategy that was never tried", "refused")
def test_an_unknown_strategy() -> None:
    """Whatever it is, it is not taken for one that works."""
    with pytest.raises(UnsupportedError, match=r"Unknown was never tried.* 'ddp' or ModelParallelStrategy"):
        check_strategy(Unknown())


class FullyShardedDataParallel(TinyText):
    """Goes by the name of FSDP1's wrapper, which cannot be made without an accelerator."""


class DeepSpeedEngine(TinyText):
    """Goes by the name of DeepSpeed's."""


@pytest.mark.parametrize("wrapper", [FullyShardedDataParallel, DeepSpeedEngine])
@pytest.mark.conformance("Several ranks", "FSDP1 and DeepSpeed in a plain loop", "refused")
def test_in_a_plain_loop(wrapper: type[TinyText]) -> None:
    """There is no strategy to tell them by."""
    with pytest.raises(UnsupportedError, match=f"{wrapper.__name__} is not supported: .* use fully_shard"):
        Mimose(wrapper(), budget="8GB")


def test_what_passes() -> None:
    """And so does a subclass."""
    check_strategy(DDPStrategy())
    check_strategy(ModelParallelStrategy())
    check_strategy(type("Own", (DDPStrategy,), {})())
