"""Two real processes over gloo: every rank keeps its budget, and the weights are those of plain DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed

SCRIPT = """
import json, sys, warnings
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_mimose import MimoseCallback, MimoseDDPStrategy
from tests.helpers.fits import batches
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Task, TinyText, quiet_trainer

warnings.simplefilter("ignore")
torch.set_num_threads(1)
how, budgets, directory = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
shared = {"start_method": "popen", "process_group_backend": "gloo"}


class Data(torch.utils.data.Dataset):
    data = batches(count=24)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def main():
    rank = int(__import__("os").environ.get("LOCAL_RANK", 0))
    budget = budgets[rank] if budgets else "1GB"
    meter, callbacks = MeterCallback(), []
    strategy = DDPStrategy(**shared, gradient_as_bucket_view=how == "views")
    if how == "strategy":
        strategy = MimoseDDPStrategy(budget=budget, **shared)
    elif how == "name":
        strategy = "mimose_ddp"
    elif how != "plain":
        callbacks.append(MimoseCallback(budget))
    pl.seed_everything(0, verbose=False)
    task = Task(TinyText())
    pl.seed_everything(7, verbose=False)
    trainer = quiet_trainer(meter, *callbacks, strategy=strategy, devices=2, log_every_n_steps=4)
    trainer.fit(task, torch.utils.data.DataLoader(Data(), batch_size=None))
    mimose = [c for c in trainer.callbacks if isinstance(c, MimoseCallback)]
    result = {
        "peaks": meter.peaks, "residents": meter.residents, "parameters": sum(p.nbytes for p in task.parameters()),
        "weights": [p.detach().double().sum().item() for p in task.parameters()],
        "epoch": {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("mimose/epoch/")},
        "records": [r.to_dict() for c in mimose for r in c.records],
    }
    with open(f"{directory}/{how}-{trainer.global_rank}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
"""


def launch(how: str, directory: Path, budgets: list[int] | None = None) -> tuple[list[dict[str, Any]], str]:
    """Run the script on two ranks, the second started by Lightning; what each found, and what was written."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), how, json.dumps(budgets or []), str(directory)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{how}-{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A run of plain DDP."""
    return launch("plain", tmp_path_factory.mktemp("plain"))[0]


def budget_of(rank: dict[str, Any], share: float) -> int:
    """A share of this rank's activation memory; gradient buckets, which the meter cannot see, come on top."""
    resident = max(rank["residents"])
    return int(resident + share * (max(rank["peaks"]) - resident)) + rank["parameters"]


@pytest.mark.parametrize("how", ["strategy", "views"])
def test_every_rank_keeps_its_budget(plain: list[dict[str, Any]], how: str, tmp_path: Path) -> None:
    """Each with a plan and a budget of its own, and the weights of both as without."""
    budgets = [budget_of(plain[0], 0.7), budget_of(plain[1], 0.85)]
    ranks, shown = launch(how, tmp_path, budgets)
    for rank, found in enumerate(ranks):
        assert found["weights"] == plain[rank]["weights"]
        assert len(found["records"]) == 12
        assert max(found["peaks"]) + found["parameters"] <= budgets[rank]
        assert {record["budget_bytes"] for record in found["records"]} == {budgets[rank]}
        for record, resident in zip(found["records"], found["residents"], strict=True):
            assert record["resident_bytes"] == resident + found["parameters"]  # the buckets
    assert any(not r["sheltered"] and r["actions"] for found in ranks for r in found["records"])
    assert shown.count("mimose: budget") == 1  # told by rank 0 alone
    assert ranks[0]["epoch"] == ranks[1]["epoch"]
    assert ranks[0]["epoch"]["mimose/epoch/budget_bytes"] == max(budgets)


def test_the_strategy_by_name(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """`Trainer(strategy="mimose_ddp")`: "auto" on every rank, nothing recomputed but to learn."""
    ranks, _ = launch("name", tmp_path)
    for rank, found in enumerate(ranks):
        assert found["weights"] == plain[rank]["weights"]
        assert not any(record["actions"] for record in found["records"] if not record["sheltered"])
