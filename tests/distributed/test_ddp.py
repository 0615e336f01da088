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
Launched = tuple[list[dict[str, Any]], str]

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
options = {"start_method": "popen", "process_group_backend": "gloo"}


class Data(torch.utils.data.Dataset):
    data = batches(count=24)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def fit(strategy, *callbacks):
    meter = MeterCallback()
    pl.seed_everything(0, verbose=False)
    task = Task(TinyText())
    pl.seed_everything(7, verbose=False)
    trainer = quiet_trainer(meter, *callbacks, strategy=strategy, devices=2, log_every_n_steps=4)
    trainer.fit(task, torch.utils.data.DataLoader(Data(), batch_size=None))
    mimose = [c for c in trainer.callbacks if isinstance(c, MimoseCallback)]
    return trainer.global_rank, {
        "peaks": meter.peaks,
        "residents": meter.residents,
        "parameters": sum(p.nbytes for p in task.parameters()),
        "weights": [p.detach().double().sum().item() for p in task.parameters()],
        "epoch": {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("mimose/epoch/")},
        "records": [r.to_dict() for c in mimose for r in c.records],
    }


if __name__ == "__main__":
    rank, plain = fit(DDPStrategy(**options))
    # A share of this rank's activation memory; gradient buckets, which the meter cannot see, come on top.
    resident, share = max(plain["residents"]), (0.7, 0.85)[rank]
    budget = int(resident + share * (max(plain["peaks"]) - resident)) + plain["parameters"]
    found = {
        "budget": budget,
        "plain": plain,
        "strategy": fit(MimoseDDPStrategy(budget=budget, **options))[1],
        "views": fit(DDPStrategy(**options, gradient_as_bucket_view=True), MimoseCallback(budget))[1],
        "name": fit("mimose_ddp")[1],
    }
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Four fits on two ranks, the second started by Lightning; what each rank found, and what was written."""
    directory = tmp_path_factory.mktemp("ddp")
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(directory)], capture_output=True, text=True, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.parametrize("how", ["strategy", "views"])
def test_every_rank_keeps_its_budget(launched: Launched, how: str) -> None:
    """Each with a plan and a budget of its own, and the weights of both as without."""
    ranks = launched[0]
    for rank in ranks:
        found, budget = rank[how], rank["budget"]
        assert found["weights"] == rank["plain"]["weights"]
        assert len(found["records"]) == 12
        assert max(found["peaks"]) + found["parameters"] <= budget
        assert {record["budget_bytes"] for record in found["records"]} == {budget}
        for record, resident in zip(found["records"], found["residents"], strict=True):
            assert record["resident_bytes"] == resident + found["parameters"]  # the buckets
    assert ranks[0]["budget"] != ranks[1]["budget"]
    assert any(not r["sheltered"] and r["actions"] for rank in ranks for r in rank[how]["records"])


def test_metrics_agree_and_one_rank_speaks(launched: Launched) -> None:
    """Epoch values are over all ranks; the start line is told by rank 0 alone, once per fit with a budget."""
    (first, second), shown = launched
    assert first["strategy"]["epoch"] == second["strategy"]["epoch"]
    assert first["strategy"]["epoch"]["mimose/epoch/budget_bytes"] == max(first["budget"], second["budget"])
    assert shown.count("mimose: budget") == 3


def test_the_strategy_by_name(launched: Launched) -> None:
    """`Trainer(strategy="mimose_ddp")`: "auto" on every rank, nothing recomputed but to learn."""
    for rank in launched[0]:
        assert rank["name"]["weights"] == rank["plain"]["weights"]
        assert not any(record["actions"] for record in rank["name"]["records"] if not record["sheltered"])
