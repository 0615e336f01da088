"""The entry point: a budget from the environment, or nothing at all."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities import registry

import lightning_mimose
from lightning_mimose import MimoseCallback, MimoseSingleDeviceStrategy
from lightning_mimose.plugin import entry
from tests.helpers.fits import batches, run
from tests.helpers.models import Task, TinyText, loader, quiet_trainer

GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were installed: Lightning finds the entry point exactly once."""
    point = EntryPoint("mimose", "lightning_mimose.plugin.entry:callbacks", GROUPS[0])

    def found(group: str) -> Any:
        others = [p for p in entry_points(group=group) if p.name != "mimose"]
        return [*others, point] if group == GROUPS[0] else others

    monkeypatch.setattr(registry, "entry_points", found)


def mine(trainer: Any) -> list[MimoseCallback]:
    """The callbacks of this package in a Trainer."""
    return [callback for callback in trainer.callbacks if isinstance(callback, MimoseCallback)]


def test_both_names_of_lightning_are_served() -> None:
    """In the package's metadata."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    file = Path(lightning_mimose.__file__).parents[1] / "pyproject.toml"
    points = tomllib.loads(file.read_text())["project"]["entry-points"]
    assert points == {group: {"mimose": "lightning_mimose.plugin.entry:callbacks"} for group in GROUPS}
    assert EntryPoint("mimose", points[GROUPS[0]]["mimose"], GROUPS[0]).load() is entry.callbacks


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("value", [None, ""])
def test_it_is_silent_unless_asked(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Every Trainer in the environment calls it."""
    monkeypatch.delenv(entry.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(entry.VARIABLE, value)
    assert entry.callbacks() == []
    assert mine(quiet_trainer()) == []


@pytest.mark.usefixtures("_installed")
def test_an_unchanged_script_gets_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment alone."""
    monkeypatch.setenv(entry.VARIABLE, "1GB")
    fit = run(metered=False)
    (callback,) = mine(fit.trainer)
    assert callback.budget_bytes == 10**9
    assert len(callback.records) == 12


@pytest.mark.usefixtures("_installed")
def test_it_steps_aside_for_a_callback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Both are in the Trainer, with keys of their own; the explicit one plans, and a line says so."""
    caplog.set_level("INFO")
    monkeypatch.setenv(entry.VARIABLE, "2GB")
    explicit = MimoseCallback("1GB")
    trainer = quiet_trainer(explicit)
    trainer.fit(Task(TinyText()), loader(batches(count=3)))
    assert any("MIMOSE_BUDGET=2GB is not used" in line and "'1GB'" in line for line in caplog.messages)
    (other,) = (callback for callback in mine(trainer) if callback is not explicit)
    assert other.state_key != explicit.state_key
    assert (len(explicit.records), len(other.records)) == (3, 0)
    assert explicit.budget_bytes == 10**9


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("budget", ["1GB", "auto"])
def test_it_steps_aside_for_a_strategy(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    """Whether that names a budget or not: it was chosen in the script."""
    monkeypatch.setenv(entry.VARIABLE, "2GB")
    strategy = MimoseSingleDeviceStrategy(budget=budget)
    fit = run(strategy=strategy, metered=False)
    assert [len(c.records) for c in mine(fit.trainer)].count(0) == 1
    assert len(strategy.mimose_callback.records) == 12


def test_a_bad_value_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script says nothing of a budget, so the error must say where it comes from."""
    monkeypatch.setenv(entry.VARIABLE, "8 parsecs")
    with pytest.raises(lightning_mimose.BudgetError, match=r"MIMOSE_BUDGET.*8 parsecs"):
        entry.callbacks()
