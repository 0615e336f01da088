"""A hyper-parameter search with Optuna whose parallel trials share one memory budget.

The objective is the one you would write anyway: it builds a model, trains it with a `Trainer`, returns a number. Its
trials run in threads of this process (`n_jobs`), or in several processes, or both.

    python examples/search_optuna.py                      # two trials at a time, in threads
    python examples/search_optuna.py --processes 2        # in two processes, which really train at the same time

Needs `pip install optuna`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path

import optuna
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mimose import MimoseCallback, SharedBudget


class Regressor(LightningModule):
    """A stack of residual blocks."""

    def __init__(self, width: int, dropout: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.enter, self.leave = nn.Linear(32, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
            for _ in range(6)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean squared error."""
        x, y = batch
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.leave(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def objective(trial: optuna.Trial, budget: SharedBudget) -> float:
    """Train one model; nothing in here knows of the other trials."""
    torch.manual_seed(trial.number)
    x = torch.randn(2048, 32)
    data = DataLoader(TensorDataset(x, x[:, :4].prod(1, keepdim=True)), batch_size=256, shuffle=True)
    model = Regressor(
        width=trial.suggest_categorical("width", [64, 128, 192]),
        dropout=trial.suggest_float("dropout", 0.0, 0.3),
        rate=trial.suggest_float("rate", 1e-4, 1e-2, log=True),
    )
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[MimoseCallback(budget=budget)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    with torch.no_grad():
        return float(model.eval().training_step([x, x[:, :4].prod(1, keepdim=True)], 0))


def search(shared: SharedBudget, trials: int, jobs: int, storage: str | None) -> None:
    """Run trials; `wrap` makes each a job of its own, so that building its model counts, and draws, for it alone."""
    study = optuna.create_study(study_name="search", storage=storage, load_if_exists=True)
    run = shared.wrap(partial(objective, budget=shared))
    study.optimize(run, n_trials=trials, n_jobs=jobs)
    print(f"process {os.getpid()}: best of {len(study.trials)} trials {study.best_value:.4f} {study.best_params}")
    print(shared.report())


def in_process(name: str, budget: str, trials: int, storage: str) -> None:
    """What each of several processes does."""
    quiet()
    torch.set_num_threads(1)
    search(SharedBudget.connect(name, budget, device="cpu", when_full="wait"), trials, 1, storage)


def quiet() -> None:
    """Leave the search's own words alone on the screen."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="90MB", help="of all trials together")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time in threads")
    parser.add_argument("--processes", type=int, default=0, help="in so many processes instead")
    given = parser.parse_args()
    quiet()
    if not given.processes:
        search(SharedBudget(given.budget, device="cpu", when_full="wait"), given.trials, given.jobs, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder) / 'study.db'}"
        optuna.create_study(study_name="search", storage=storage)
        context = multiprocessing.get_context("spawn")
        each, name = -(-given.trials // given.processes), f"search-{os.getpid()}"
        workers = [
            context.Process(target=in_process, args=(name, given.budget, each, storage)) for _ in range(given.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
