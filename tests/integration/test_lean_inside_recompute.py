"""Recomputation that is itself lean: the plain run's bits, a smaller working set in backward, as predicted."""

from __future__ import annotations

import pytest

from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import ARCHITECTURES, equal, train

AREA = "Lean saves"


def everywhere(action: str):  # type: ignore[no-untyped-def]
    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        units = [unit for index, unit in enumerate(timeline.units) if timeline.parents[index] < 0]
        return {unit: action for unit in units if (unit, action) in timeline.option_index}

    return planner


@pytest.mark.conformance(AREA, "BERT, GPT-2, Llama, T5, ViT, Mixtral, blocks recomputed leanly", "works")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "mixtral"])
def test_every_block(name: str) -> None:
    architecture = ARCHITECTURES[name]
    batches = [*architecture.batches(), *architecture.batches()]
    plain = train(architecture.build, batches)
    whole = train(architecture.build, batches, "1GB", planner=everywhere("recompute"))
    done = train(architecture.build, batches, "1GB", planner=everywhere("recompute+lean"))
    assert equal(plain, done)
    assert done.mimose is not None
    assert whole.mimose is not None
    planned = [
        (record, peak, without)
        for record, peak, without in zip(done.mimose.records, done.peaks, whole.peaks, strict=True)
        if not record.sheltered and "recompute+lean" in record.actions.values()
    ]
    assert planned
    for record, peak, without in planned:
        assert peak <= without
        assert record.predicted_peak_bytes is not None
        assert peak <= 1.02 * record.predicted_peak_bytes
        assert record.recomputed_units == len(record.actions)
    if name in ("bert", "gpt2", "llama", "vit"):
        assert all(peak < 0.97 * without for _, peak, without in planned)
