"""Ranks that are forked or spawned: the callback goes with the Trainer, before the fit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_mimose import MimoseCallback
from tests.distributed.launch import environment

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three fits: forked without, forked with and spawned with a budget."""
    result = tmp_path_factory.mktemp("spawned") / "result.json"
    command = [sys.executable, str(Path(__file__).parent / "spawned.py"), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


@pytest.mark.conformance("Several ranks", "DDP with ranks that are forked or spawned", "works")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_results_are_equal(spawned: dict[str, Any], method: str) -> None:
    """And the last step saved memory in part."""
    assert spawned[method]["weights"] == spawned["plain"]["weights"]
    metrics = spawned[method]["metrics"]
    assert metrics["mimose/recomputed_units"] + metrics["mimose/lean_units"] > 0
    assert metrics["mimose/predicted_peak_bytes"] <= metrics["mimose/budget_bytes"] == 1_600_000
    assert not any(name.startswith("mimose/") for name in spawned["plain"]["metrics"])


def test_a_callback_can_be_pickled_before_the_fit() -> None:
    """With every setting."""
    given = {"budget": "2GB", "units": ["Block"], "size_fn": len, "planner": "greedy", "on_infeasible": "warn"}
    copy = pickle.loads(pickle.dumps(MimoseCallback(**given)))
    assert {name: getattr(copy, name) for name in given} == given
    assert copy.records == []
