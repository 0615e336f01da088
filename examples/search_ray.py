"""A hyper-parameter search with Ray Tune whose parallel trials share one memory budget.

Ray runs each trial in a process of its own; they meet under a name. The trainable is the one you would write anyway.

    python examples/search_ray.py

Needs `pip install "ray[tune]"`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from ray import tune
from torch import nn

from lightning_mimose import Mimose, SharedBudget


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean squared error against the first column."""
    error: torch.Tensor = model(x) - x[:, :1]
    return error.pow(2).mean()


def trainable(config: dict[str, Any]) -> None:
    """Train one model; nothing in here knows of the other trials."""
    torch.manual_seed(0)
    width = config["width"]
    model = nn.Sequential(
        nn.Linear(32, width),
        *(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(4)
        ),
        nn.Linear(width, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["rate"])
    budget = SharedBudget.connect(config["name"], config["budget"], device="cpu", when_full="wait")
    with Mimose(
        model, budget=budget, optimizer=optimizer, loss_fn=lambda m, x: (m(x) - x[:, :1]).pow(2).mean()
    ) as mimose:
        for _ in range(20):
            loss = mimose.step(torch.randn(512, 32))
    tune.report({"loss": loss.item()})


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60MB", help="of all trials together")
    parser.add_argument("--trials", type=int, default=4)
    given = parser.parse_args()
    space = {
        "width": tune.choice([64, 128]),
        "rate": tune.loguniform(1e-4, 1e-2),
        "name": f"ray-{os.getpid()}",
        "budget": given.budget,
    }
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(num_samples=given.trials, metric="loss", mode="min"),
    )
    best = tuner.fit().get_best_result()
    print("best", best.metrics["loss"] if best.metrics else None, best.config)


if __name__ == "__main__":
    main()
