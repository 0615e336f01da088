"""Advice that is given where it would help, and only there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.advise.hints import allocator_hint
from lightning_mimose.measure.counters import Counters
from tests.helpers.architectures import ARCHITECTURES


def report_of(model: nn.Module, batches: list[Any], optimizer: torch.optim.Optimizer, loss: Any) -> Any:
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss) as mimose:
        for batch in batches:
            mimose.step(batch)
        return mimose.report()


@pytest.mark.parametrize("foreach", [True, False])
def test_an_update_that_is_the_peak(foreach: bool) -> None:
    """Large weights, few activations: the temporaries of a foreach update stand out."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    batches = [torch.randn(rows, 256) for rows in (4, 5, 6, 4)]
    report = report_of(model, batches, optimizer, lambda model, batch: model(batch).square().mean())
    assert bool(report.hints) == foreach
    assert ("foreach=False" in str(report)) == foreach
    assert report.to_dict()["hints"] == list(report.hints)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_that_keeps_its_probabilities(kind: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config._attn_implementation = kind
    model = BertForSequenceClassification(config)
    batches = ARCHITECTURES["bert"].batches()[:3]
    batches = [{**batch, "input_ids": batch["input_ids"] % 99} for batch in batches]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    report = report_of(model, batches, optimizer, lambda model, batch: model(**batch).loss)
    assert any("eager" in hint for hint in report.hints) == (kind == "eager")


@pytest.mark.parametrize("named", [False, True])
def test_sizes_in_too_many_dimensions(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once, and in the report; not where a `size_fn` names what decides."""
    monkeypatch.setattr("lightning_mimose.engine.lessons.SHELTERED_STEPS", 6)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)])
    batches = [[torch.randn(int(rows), 8) for rows in torch.randint(8, 64, (4,))] for _ in range(14)]
    told = nullcontext() if named else pytest.warns(UserWarning, match=r"vary in 4 dimensions \(0:0, 1:0, 2:0, 3:0\)")
    with (
        told,
        Mimose(
            model,
            budget="1GB",
            loss_fn=lambda model, batch: model(torch.cat(batch)).square().mean(),
            size_fn=(lambda batch: sum(map(len, batch))) if named else None,
        ) as mimose,
    ):
        said = []
        for batch in batches:
            mimose.step(batch)
            said.append("size_fn=" in str(mimose.report()))
    assert any(said) != named
    assert not any(told and not record.sheltered for told, record in zip(said, mimose.records, strict=True))


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_holds_much_for_nobody(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the advice is followed, in any of the variables that torch reads."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_hint(20, 1000) is None
    assert "50 B" in (allocator_hint(50, 1000) or "")
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    assert allocator_hint(50, 1000) is None


def test_an_allocator_that_others_use_as_well_tells_nothing() -> None:
    """Of several jobs in one process it holds what all of them have."""
    advisor = Advisor(10_000)
    advisor.owns_allocator = False
    advisor.learn_held(1000, 9000)
    advisor.learn_out_of_memory(None, Counters(100, 1000, 9000, 9000, 9000))
    assert advisor.misses.kept_free_bytes == 0
    advisor.owns_allocator = True
    advisor.learn_held(1000, 1400)
    assert advisor.misses.kept_free_bytes == 600


def test_what_the_allocator_must_not_give_out_is_no_part_of_what_it_was_asked_for() -> None:
    """Measured peaks count it, and so would hide as much of what it holds beyond them."""
    advisor = Advisor(10_000)
    advisor.barred_bytes = 100
    advisor.learn_held(1100, 1400)
    assert advisor.misses.kept_free_bytes == 600
