"""FSDP2 on real processes over gloo: one plan for all ranks, every budget kept, the weights those of plain FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed
Ranks = list[dict[str, Any]]
Launched = dict[int, tuple[Ranks, list[str]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """What each of two and of four ranks found and said."""
    make = tmp_path_factory.mktemp
    return {ranks: launch("sharded.py", ranks, make(f"ranks{ranks}"), what) for ranks, what in ((2, "all"), (4, "fit"))}


def check(ranks: Ranks, kind: str) -> None:
    """Every rank stays inside its own budget, ends where it ends without one, and does what the others do."""
    for rank in ranks:
        plain, found, budget = rank[kind]["plain"], rank[kind]["mimose"], rank[kind]["budget"]
        records, peaks = found["records"], found["peaks"]
        assert found["weights"] == plain["weights"]
        assert max(peaks) <= budget
        assert len(records) == len(peaks) == 8
        assert [record["resident_bytes"] for record in records] == found["residents"]
        for record, peak in zip(records, peaks, strict=True):
            # What another rank has planned may be predicted by a bound.
            assert record["sheltered"] or peak <= 1.01 * record["predicted_peak_bytes"]
    assert any(max(rank[kind]["plain"]["peaks"]) > rank[kind]["budget"] for rank in ranks)
    for step in zip(*(rank[kind]["mimose"]["records"] for rank in ranks), strict=True):
        assert len({(record["sheltered"], *record["actions"].items()) for record in step}) == 1


def planned(ranks: Ranks, kind: str) -> list[dict[str, str]]:
    """Actions of the planned steps that do anything."""
    records = ranks[0][kind]["mimose"]["records"]
    return [record["actions"] for record in records if not record["sheltered"] and record["actions"]]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=pytest.mark.conformance("Several ranks", "FSDP2 by ModelParallelStrategy", "works")),
        pytest.param(4, marks=pytest.mark.conformance("Several ranks", "FSDP2 on four ranks", "works")),
    ],
)
def test_every_rank_keeps_its_budget(launched: Launched, ranks: int) -> None:
    """Sizes and budgets differ from rank to rank; plans do not. The share of the others is no part of a rank."""
    found, said = launched[ranks]
    check(found, "fit")
    assert planned(found, "fit")
    assert len({rank["fit"]["budget"] for rank in found}) == ranks
    assert said[0].count("mimose: budget") == 1


@pytest.mark.conformance("Several ranks", "FSDP2 in a plain loop, with evaluations in between", "works")
def test_a_plain_loop(launched: Launched) -> None:
    """An evaluation leaves the outermost module's parameters gathered."""
    found, _ = launched[2]
    check(found, "loop")
    assert planned(found, "loop")


@pytest.mark.conformance("Several ranks", "a unit with fully_shard inside it", "guarded")
def test_units_that_gather_inside_are_kept(launched: Launched) -> None:
    """To recompute one would gather its parts again."""
    for rank in launched[2][0]:
        report = " ".join(rank["loop"]["mimose"]["report"].split())
        assert "layers.0 never recomputed: its parts gather their parameters from other ranks" in report
        for record in rank["loop"]["mimose"]["records"]:
            assert not any(
                unit.startswith("layers.0") for unit, action in record["actions"].items() if "recomp" in action
            )


@pytest.mark.conformance("Several ranks", "tensor parallel, FSDP2 over a mesh of several dimensions", "refused")
def test_other_sharding_is_refused(launched: Launched) -> None:
    """In one clear line."""
    for rank in launched[2][0]:
        assert "tensor parallel" in rank["tensor parallel"]
        assert "Supported is fully_shard(module)" in rank["tensor parallel"]


@pytest.mark.conformance("Several ranks", "FSDP2: one rank refuses a batch, and so do all", "refused")
def test_a_refusal_is_everybodys(tmp_path: Path) -> None:
    """Before any update; nobody waits, and the script may go on with another budget."""
    first, second = launch("sharded.py", 2, tmp_path, "refusal")[0]
    assert first["refused"].startswith("BudgetInfeasibleError: The budget of 1,400,000 bytes")
    assert second["refused"].startswith("BudgetInfeasibleError: Rank 0 refuses its batch")
    assert first["then"] == second["then"] == "done"


@pytest.mark.conformance("Several ranks", "FSDP2: a rank that is out of memory does not retry, and all fail", "refused")
def test_out_of_memory_on_one_rank(tmp_path: Path) -> None:
    """The error says why; the rank that failed lives on until the other has noticed."""
    first, second = launch("sharded.py", 2, tmp_path, "alone")[0]
    assert second["alone"].startswith("DeviceMemoryError: ")
    assert "a sharded model gathers parameters from the other ranks" in second["alone"]
    assert second["noticed"]
    assert "closed by peer" in first["alone"]
