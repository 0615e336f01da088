"""The command line: Lightning's own flags, YAML, and `MimoseCLI`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_mimose import MimoseCallback
from lightning_mimose.budget import parse_budget
from lightning_mimose.plan.greedy import plan_greedy
from lightning_mimose.plugin.cli import MimoseCLI
from tests.helpers.fits import batches
from tests.helpers.models import Task, TinyText, loader

QUIET = {
    "logger": False,
    "accelerator": "cpu",
    "max_epochs": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Text(Task):
    """A model without arguments."""

    def __init__(self) -> None:
        super().__init__(TinyText())


class Data(pl.LightningDataModule):
    """A few batches."""

    def train_dataloader(self) -> Any:
        """Four of them."""
        return loader(batches(count=4))


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns of `args` beside arguments of the process, which are pytest's here."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


def cli(kind: type[LightningCLI], *arguments: str, run: bool = True) -> MimoseCallback:
    """Run a program with these arguments; the callback that it used."""
    program = kind(Text, Data, args=list(arguments), trainer_defaults=QUIET, save_config_callback=None, run=run)
    callbacks = program.trainer.callbacks  # type: ignore[attr-defined]
    (callback,) = (callback for callback in callbacks if isinstance(callback, MimoseCallback))
    return callback


def test_lightnings_own_flags() -> None:
    """Nothing in the program knows of the package."""
    callback = cli(
        LightningCLI,
        "fit",
        "--trainer.callbacks+=lightning_mimose.MimoseCallback",
        "--trainer.callbacks.budget=8MB",
        "--trainer.callbacks.on_infeasible=warn",
    )
    assert callback.budget_bytes == 8_000_000
    assert callback.on_infeasible == "warn"
    assert len(callback.records) == 4


@pytest.mark.parametrize(
    ("written", "amount"), [("8GB", 8e9), ("8000000000", 8e9), ("8e9", 8e9), ("0.8", 0.8), ("80%", 0.8), ("auto", 0.95)]
)
def test_budgets_parse_like_the_numbers_they_spell(written: str, amount: float) -> None:
    """On a command line everything is text."""
    callback = cli(MimoseCLI, f"--mimose.budget={written}", run=False)
    assert parse_budget(callback.budget).amount == amount


@pytest.mark.parametrize("budget", ["8MB", "8000000", "8.0e6"])
def test_yaml(tmp_path: Path, budget: str) -> None:
    """With `class_path` and `init_args`; text, int and float."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_mimose.MimoseCallback\n"
        f"      init_args: {{budget: {budget}, units: ['layers.*', Block], planner: exact}}\n"
    )
    callback = cli(LightningCLI, "--config", str(file), run=False)
    assert callback.units == ["layers.*", "Block"]
    assert callback.planner == "exact"
    assert parse_budget(callback.budget).amount == 8_000_000


def test_the_short_flag() -> None:
    """`--mimose.budget`, with everything else there is."""
    callback = cli(
        MimoseCLI,
        "fit",
        "--mimose.budget=8MB",
        "--mimose.units=[model.layers.*]",
        "--mimose.size_fn=builtins.len",
        "--mimose.planner=greedy",
        "--mimose.actions=[recompute]",
        "--mimose.on_oom=raise",
        "--mimose.host_budget=1GB",
    )
    assert callback.budget_bytes == 8_000_000
    assert callback.units == ["model.layers.*"]
    assert callback.planner == "greedy"
    assert callback.size_fn is len
    assert len(callback.records) == 4


def test_a_planner_can_be_a_function() -> None:
    """By its import path."""
    callback = cli(MimoseCLI, "--mimose.planner=lightning_mimose.plan.greedy.plan_greedy", run=False)
    assert callback.planner is plan_greedy


def test_a_strategy_by_flags() -> None:
    """By class path, with a budget."""
    program = LightningCLI(
        Text,
        Data,
        args=["fit", "--trainer.strategy=lightning_mimose.MimoseSingleDeviceStrategy", "--trainer.strategy.budget=8MB"],
        trainer_defaults=QUIET,
        save_config_callback=None,
    )
    assert program.trainer.strategy.mimose_callback.budget_bytes == 8_000_000  # type: ignore[attr-defined]


def test_an_unknown_word_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    """With the words there are."""
    with pytest.raises(SystemExit):
        cli(MimoseCLI, "--mimose.on_infeasible=ignore", run=False)
    assert "warn" in capsys.readouterr().err
