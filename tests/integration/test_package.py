"""The package from outside, in processes of its own: its names, what importing it does, what a script's user sees."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_mimose

ROOT = Path(__file__).parents[2]

SCRIPT = """
import warnings
import torch
from {package} import LightningModule, Trainer
import lightning_mimose

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        block = lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
        self.net = torch.nn.Sequential(*(block() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

warnings.simplefilter("ignore")
data = [torch.randn(8 * (i % 5 + 1), 32) for i in range(12)]
data = torch.utils.data.DataLoader(data, batch_size=None)
for callbacks in {callbacks}:
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar={bar}, log_every_n_steps=1, callbacks=callbacks,
    )
    trainer.fit(Net(), data)
    records = [len(callback.records) for callback in trainer.callbacks if hasattr(callback, "records")]
    print(sorted(records), "mimose/budget_bytes" in trainer.logged_metrics)
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "2", **variables}
    if "MIMOSE_BUDGET" not in variables:
        environment.pop("MIMOSE_BUDGET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done


def test_all_names_are_there() -> None:
    """And none that is not named, but for the modules."""
    for name in lightning_mimose.__all__:
        assert getattr(lightning_mimose, name) is not None
    public = {
        name
        for name, value in vars(lightning_mimose).items()
        if not name.startswith("_") and not hasattr(value, "__path__") and not hasattr(value, "__file__")
    }
    assert public == set(lightning_mimose.__all__)
    assert list(lightning_mimose.__all__) == sorted(lightning_mimose.__all__)


def test_the_door_has_the_names_that_programs_are_written_against() -> None:
    """Those of the design."""
    promised = {"MimoseCallback", "Mimose", "MimoseStrategyMixin", "MimoseSingleDeviceStrategy", "MimoseDDPStrategy"}
    promised |= {"StepRecord", "Plan", "Report", "MimoseError", "BudgetInfeasibleError"}
    assert promised <= set(lightning_mimose.__all__)


IMPORT = """
import json, logging, os, random, sys, threading
import lightning.pytorch, torch
from lightning.pytorch.strategies import StrategyRegistry
heavy = ("sklearn", "scipy", "matplotlib", "rich", "jsonargparse", "transformers", "pynvml")

def state():
    loggers = [logging.getLogger(name) for name in (None, "lightning", "lightning.pytorch", "lightning_mimose")]
    return {
        "environment": dict(os.environ), "threads": threading.active_count(), "torch": torch.get_num_threads(),
        "handlers": [(len(logger.handlers), logger.level, logger.disabled) for logger in loggers],
        "random": hash(random.getstate()), "rng": torch.get_rng_state().sum().item(),
        "cuda": torch.cuda.is_initialized(), "filters": len(__import__("warnings").filters),
        "heavy": sorted({m.split(".")[0] for m in sys.modules} & set(heavy)), "scipy": "scipy.optimize" in sys.modules,
        "bench": [m for m in sys.modules if m.startswith("lightning_mimose.bench")],
    }

names, before = set(StrategyRegistry.available_strategies()), state()
import lightning_mimose.command
after, new = state(), sorted(set(StrategyRegistry.available_strategies()) - names)
print(json.dumps([before == after, {k: [before[k], after[k]] for k in before if before[k] != after[k]}, new]))
"""


def test_importing_registers_two_names_and_does_nothing_else() -> None:
    """No variable, handler, thread, random number, filter or heavy module beyond what Lightning itself brings."""
    same, difference, names = json.loads(python(IMPORT).stdout)
    assert same, difference
    assert names == ["mimose", "mimose_ddp"]


def test_a_script_without_logging_shows_two_lines() -> None:
    """On the terminal, with nothing configured; and the progress bar shows the peak."""
    callbacks = '[[lightning_mimose.MimoseCallback("500MB")]]'
    done = python(SCRIPT.format(package="lightning.pytorch", callbacks=callbacks, bar=True))
    lines = [line for line in done.stderr.splitlines() if line.startswith("mimose: ")]
    assert len(lines) == 2, done.stderr
    assert "budget 500,000,000 bytes" in lines[0]
    assert "planning begins" in lines[1]
    assert "mimose/peak_bytes" in done.stdout + done.stderr
    assert "[12] True" in done.stdout


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_names_of_lightning(package: str, tmp_path: Path) -> None:
    """A Trainer of either package takes the callback from its arguments, or from the environment by entry point."""
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    # What an installation leaves, here first on the path: of several distributions of one name the first counts.
    info = tmp_path / "lightning_mimose-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-mimose\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{package}.callbacks_factory]\nmimose = lightning_mimose.plugin.entry:callbacks\n"
    )
    callbacks = '[[], [lightning_mimose.MimoseCallback("400MB")]]'
    variables = {"MIMOSE_BUDGET": "500MB", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = python(SCRIPT.format(package=package, callbacks=callbacks, bar=False), **variables)
    shown = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert shown == ["[12] True", "[0, 12] True"]  # the environment's steps aside for an explicit one
    assert "budget 500,000,000 bytes" in done.stderr
    assert "budget 400,000,000 bytes" in done.stderr
