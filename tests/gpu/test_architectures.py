"""Architectures of `transformers` at middle size on an accelerator: held at every step, and the plain run's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mimose import Mimose
from lightning_mimose.report.record import StepRecord
from tests.helpers.architectures import ARCHITECTURES, Architecture
from tests.helpers.fits import same
from tests.helpers.models import Batch

pytestmark = pytest.mark.gpu
NAMES = (
    "bert",
    "llama",
    "vit",
    "gpt2",
    "t5",
    "modernbert",
    "bart",
    "whisper",
    "clip",
    "qwen3",
    "falcon",
    "beit",
    "mixtral",
)
HIDDEN, WIDE, LONG, HEAD, LAYERS = 256, 1024, 1024, 128, 6
LARGER = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "moe_intermediate_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), WIDE),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), LONG),
    **dict.fromkeys(("head_dim", "d_kv"), HEAD),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers"), LAYERS),
}
SIZES, SHARE, ROUNDS = 8, 0.6, 3
"""How many times as large batches are as on a CPU, share of the activations that the budget leaves, and epochs."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """With no more than a warning, fused attention would add up in any order."""
    switch: Any = torch.use_deterministic_algorithms
    switch(True)
    yield
    switch(False)


def larger(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of middle size."""
    return {
        name: larger(value) if isinstance(value, dict) else LARGER.get(name, value) for name, value in settings.items()
    }


def batches(architecture: Architecture, device: torch.device) -> list[Batch]:
    """One of every size, with twice the rows where they are texts."""
    texts = architecture.family in ("encoders", "decoders")
    made = []
    for number, size in enumerate(architecture.sizes):
        batch = architecture.batch(SIZES * size, number)
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        rows = {name: torch.cat([value] * 2) if texts else value for name, value in tensors.items()}
        made.append({**batch, **{name: value.to(device) for name, value in rows.items()}})
    return made


def train(
    architecture: Architecture, device: torch.device, budget: int | None
) -> tuple[dict[str, torch.Tensor], list[int], int, list[StepRecord]]:
    """Weights, peaks of what was asked for, what a step begins with at most, and records."""
    settings = larger(architecture.settings)
    if "text_config" in settings:  # captions are as short as ever
        settings["text_config"]["max_position_embeddings"] = 128
    pl.seed_everything(0, verbose=False)
    model = Architecture(**{**vars(architecture), "settings": settings}).build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    lasting = 4 * sum(parameter.nbytes for parameter in model.parameters())  # gradients, and two moments
    data = batches(architecture, device)
    mimose = Mimose(model, budget=budget, optimizer=optimizer) if budget is not None else None
    pl.seed_everything(7, verbose=False)
    peaks = []
    try:
        for batch in data * ROUNDS:
            torch.accelerator.reset_peak_memory_stats()
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = model(**batch).loss
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                del loss
            peaks.append(int(torch.accelerator.max_memory_allocated()))
    finally:
        records = list(mimose.records) if mimose is not None else []
        if mimose is not None:
            mimose.close()
    return {name: value.cpu() for name, value in model.state_dict().items()}, peaks, lasting, records


@pytest.mark.parametrize("name", NAMES)
def test_held_and_the_same(name: str, device: torch.device) -> None:
    """By the allocator's own counters, and bit for bit."""
    plain, peaks, lasting, _ = train(ARCHITECTURES[name], device, None)
    budget = lasting + int(SHARE * (max(peaks) - lasting))
    assert sum(peak > budget for peak in peaks) >= len(peaks) // 3
    ours, _, _, records = train(ARCHITECTURES[name], device, budget)
    assert same(plain, ours)
    assert max(record.reserved_peak_bytes or 0 for record in records) <= budget
    assert any(record.actions for record in records if not record.sheltered)
