"""Models that call their blocks the more often the longer a text is: plans begin as early as for any other."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import Trained, equal, recompute_all, train
from tests.helpers.models import Batch
from tests.helpers.rounds import (
    CHUNK,
    Chunked,
    Nested,
    Remembering,
    Truncated,
    Within,
    Writing,
    document_of,
    loss_of,
    text_of,
)

STEPS, LEARNING = 40, 14


@cache
def batches(model: type[nn.Module]) -> list[Batch]:
    """Of any number of rounds; a writer's source texts vary as well."""
    rnd = random.Random(0)
    least, most = (6, 24) if model in (Writing, Within) else (1, 6)
    return [text_of(model, rnd.randint(least, most), number) for number in range(STEPS)]


@cache
def plainly(model: type[nn.Module]) -> Trained:
    """Trained without a budget."""
    return train(model, batches(model), loss_fn=loss_of)


def assert_planned(plain: Trained, ours: Trained) -> None:
    """Equal, within the budget, and never sheltered once loops are known."""
    assert ours.mimose is not None
    assert equal(plain, ours)
    assert max(ours.peaks) <= ours.mimose.budget_bytes < max(plain.peaks)
    assert not any(record.sheltered for record in ours.mimose.records[LEARNING:])


@pytest.mark.parametrize(("model", "share"), [(Writing, 0.8), (Within, 0.8), (Chunked, 0.6), (Remembering, 0.7)])
def test_lengths_that_were_never_seen_are_planned(model: type[nn.Module], share: float) -> None:
    """Within the budget, with the same weights, and as predicted."""
    plain = plainly(model)
    ours = train(model, batches(model), plain.budget(share), loss_of)
    assert_planned(plain, ours)
    assert ours.mimose is not None
    records = ours.mimose.records
    assert any(record.actions for record in records[LEARNING:])
    seen = {tuple(sorted(record.size.items())) for record in records[:LEARNING]}
    assert model in (Chunked, Remembering) or any(tuple(sorted(r.size.items())) not in seen for r in records[LEARNING:])


def recompute_rounds(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
    """A planner that recomputes what is called in every round."""
    return {unit: action for unit, action in recompute_all(timeline, budget_bytes).items() if unit != "reader"}


@pytest.mark.parametrize("model", [Writing, Chunked, Remembering])
def test_peaks_are_predicted_where_every_round_runs_again(model: type[nn.Module]) -> None:
    """What is recomputed is so in every round."""
    ours = train(model, batches(model), 10 * max(plainly(model).peaks), loss_of, planner=recompute_rounds)
    assert ours.mimose is not None
    planned = [
        (record, peak)
        for record, peak in zip(ours.mimose.records, ours.peaks, strict=True)
        if not record.sheltered and record.predicted_peak_bytes
    ]
    assert len(planned) > STEPS // 2
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01), record.size
    assert equal(plainly(model), ours)


def test_loops_inside_of_loops_are_planned() -> None:
    """Words of sentences: of any lengths, with the same weights, and never predicted too low."""
    rnd = random.Random(0)
    texts = [document_of(rnd.randint(3, 9), rnd.randint(4, 10), number) for number in range(STEPS)]
    plain = train(Nested, texts, loss_fn=loss_of)
    ours = train(Nested, texts, plain.budget(0.6), loss_of)
    assert_planned(plain, ours)
    assert ours.mimose is not None
    records = ours.mimose.records
    assert any(record.actions for record in records[LEARNING:])
    for record, peak in zip(records, ours.peaks, strict=True):
        if not record.sheltered and record.predicted_peak_bytes:
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.002), record.size


def test_truncated_backpropagation_is_planned() -> None:
    """Only the last rounds have a backward, of however many."""
    rnd = random.Random(0)
    texts = [text_of(Truncated, rnd.randint(6, 14), number) for number in range(STEPS)]
    plain = train(Truncated, texts, loss_fn=loss_of)
    ours = train(Truncated, texts, plain.budget(0.8), loss_of)
    assert_planned(plain, ours)
    assert ours.mimose is not None
    for record, peak in zip(ours.mimose.records, ours.peaks, strict=True):
        if not record.sheltered and record.predicted_peak_bytes:
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01), record.size


def test_a_last_chunk_may_be_shorter() -> None:
    """Whether a length takes another chunk is known from those around it."""
    rnd = random.Random(1)
    texts = []
    for number in range(60):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 64, (4, rnd.randrange(4, 6 * CHUNK, 2)), generator=generator)
        texts.append({"input_ids": ids, "labels": torch.randint(0, 2, (4,), generator=generator)})
    plain = train(Chunked, texts, loss_fn=loss_of)
    ours = train(Chunked, texts, plain.budget(0.7), loss_of)
    assert ours.mimose is not None
    assert equal(plain, ours)
    assert max(ours.peaks) <= ours.mimose.budget_bytes
    assert sum(record.sheltered for record in ours.mimose.records) < len(texts) // 2
    for record, peak in zip(ours.mimose.records, ours.peaks, strict=True):
        if not record.sheltered and record.predicted_peak_bytes:
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.02), record.size
