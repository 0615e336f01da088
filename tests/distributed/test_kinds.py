"""DDP in the ways people use it, on two and on four real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed
KINDS = {2: ("find_unused", "static", "norms", "words", "talking"), 4: ("default",)}
Ranks = list[dict[str, Any]]
Launched = dict[int, tuple[Ranks, list[str]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Every kind of fit, without and with a budget; what each rank found and said."""
    made = {}
    for ranks, kinds in KINDS.items():
        made[ranks] = launch("fits.py", ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), ",".join(kinds))
    return made


def check(ranks: Ranks, kind: str) -> None:
    """Every rank stays inside its own budget, and ends where it ends without one, as the others do."""
    if kind != "norms":  # buffers are broadcast before a forward, and then written
        assert len({rank[kind]["mimose"]["weights"] for rank in ranks}) == 1
    for rank in ranks:
        plain, found, budget = rank[kind]["plain"], rank[kind]["mimose"], rank[kind]["budget"]
        assert found["weights"] == plain["weights"]
        assert len(found["records"]) == len(found["peaks"]) == 10
        assert max(found["peaks"]) + found["buckets"] <= budget


def planned(ranks: Ranks, kind: str) -> list[dict[str, str]]:
    """Actions of the planned steps that recompute something, over all ranks."""
    records = [record for rank in ranks for record in rank[kind]["mimose"]["records"]]
    return [record["actions"] for record in records if not record["sheltered"] and record["actions"]]


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        pytest.param(ranks, kind, marks=pytest.mark.conformance("Several ranks", what, "works"), id=f"{kind}-{ranks}")
        for ranks, kind, what in (
            (2, "find_unused", "DDP with find_unused_parameters"),
            (2, "static", "DDP with static_graph"),
            (2, "norms", "DDP with gradient accumulation (no_sync), BatchNorm and broadcast buffers"),
            (2, "words", "DDP, batches without tensors: sizes are read where the model is called"),
            (4, "default", "DDP on four ranks, other sizes on each"),
        )
    ],
)
def test_every_rank_keeps_its_budget(launched: Launched, ranks: int, kind: str) -> None:
    """With plans of its own, and bit-equal results."""
    found = launched[ranks][0]
    check(found, kind)
    assert planned(found, kind)
    assert any(max(r[kind]["plain"]["peaks"]) + r[kind]["plain"]["buckets"] > r[kind]["budget"] for r in found)
    first, second = ([r["actions"] for r in rank[kind]["mimose"]["records"]] for rank in found[:2])
    assert first != second


@pytest.mark.conformance("Several ranks", "a unit that talks to other ranks in its forward", "guarded")
def test_units_that_talk_are_kept(launched: Launched) -> None:
    """From the first step on, though one rank would recompute all it may and the other nothing."""
    found, said = launched[2]
    check(found, "talking")
    assert {len(actions) for actions in planned(found[:1], "talking")} == {3}
    assert not planned(found[1:], "talking")
    for rank in found:
        records = rank["talking"]["mimose"]["records"]
        assert not any("model.layers.1" in record["actions"] for record in records)
        assert "model.layers.1.body" in records[0]["actions"]  # the part of it that talks to nobody
    assert said[0].count("never recomputed: model.layers.1 (its forward talks to other ranks)") == 1
