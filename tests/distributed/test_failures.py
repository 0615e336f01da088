"""A rank that fails, whose script catches the error and goes on, leaves no other rank waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.mark.conformance("Several ranks", "one rank fails and its script goes on: the others fail at once", "works")
def test_an_error_on_one_rank(tmp_path: Path) -> None:
    """Any error, not only ours; the rank that failed lives on until the other has noticed."""
    first, second = launch("failures.py", 2, tmp_path, "training_step")[0]
    assert second["alone"] == "ZeroDivisionError: a rank's own fault"
    assert second["noticed"]
    assert "closed by peer" in first["alone"]


@pytest.mark.conformance("Several ranks", "one rank refuses a batch: the others fail at once", "refused")
def test_a_refusal_on_one_rank(tmp_path: Path) -> None:
    """And a budget that every rank refuses leaves the process group as it was: the script may try a larger one."""
    first, second = launch("failures.py", 2, tmp_path, "refusal")[0]
    for rank in (first, second):
        assert rank["all"].startswith("BudgetInfeasibleError: ")
        assert rank["then"] == "done"
    assert first["alone"].startswith("BudgetInfeasibleError: ")
    assert first["noticed"]
    assert "closed by peer" in second["alone"]
