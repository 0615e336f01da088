"""Small trainings that share a budget."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mimose import Mimose, StepRecord


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


@dataclass
class Out:
    digest: str
    records: list[StepRecord]


def train(
    seed: int, budget: Any, steps: int = 14, *, rows: int = 256, told: Callable[[int], object] = lambda step: None
) -> Out:
    """Weights, batches and masks all come from the generators of the process."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(block() for _ in range(4)))
    digest = hashlib.sha256()
    with Mimose(model, budget=budget, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn=loss) as mimose:
        for step in range(steps):
            digest.update(mimose.step(torch.randn(rows - 32 * (step % 3), 32)).numpy().tobytes())
            told(step)
        records = mimose.records
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return Out(digest.hexdigest(), records)


def start(name: str, budget: int, seed: int, steps: int) -> subprocess.Popen[str]:
    """A training in another process, which says when it is ready to begin."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.shared.training", name, str(budget), str(seed), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )


def said(process: subprocess.Popen[str]) -> str:
    """The next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    """Let it begin, as soon as it is ready."""
    assert said(process) == "ready"
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def digest(process: subprocess.Popen[str]) -> str:
    """What came out of it, when it has ended well."""
    lines = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    return lines[-1].removeprefix("digest ")
