"""Models of `transformers`: results as without the plugin, budgets held, caches and switches as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_mimose import BudgetInfeasibleError, Mimose, MimoseCallback
from lightning_mimose.errors import UnitsError
from tests.helpers.architectures import (
    ARCHITECTURES,
    SOUND,
    Trained,
    equal,
    recompute_all,
    tokens,
    train,
    trained_plainly,
)
from tests.helpers.fits import same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Batch, Task, loader, quiet_trainer
from tests.helpers.pairs import saving, saving_units

AREA = "Hugging Face"


def by_family() -> list[Any]:
    """Every architecture, marked with its family's row."""
    members: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES.values():
        members.setdefault(architecture.family, []).append(architecture.kind)
    rows = {family: f"{family}: {', '.join(sorted(kinds))}" for family, kinds in members.items()}
    return [
        pytest.param(name, marks=pytest.mark.conformance(AREA, rows[each.family], "works"))
        for name, each in ARCHITECTURES.items()
    ]


def budgeted(name: str, plain: Trained, share: float = 0.6) -> tuple[Trained, int]:
    """A run at a share of the activation memory, or at what the refusal names (and a hair), and its budget."""
    architecture, budget = ARCHITECTURES[name], plain.budget(share)
    try:
        return train(architecture.build, architecture.batches(), budget), budget
    except BudgetInfeasibleError as refused:
        budget = int(1.01 * refused.smallest_feasible_bytes)
        return train(architecture.build, architecture.batches(), budget), budget


def recomputed(done: Trained) -> list[int]:
    """How many units each planned step recomputed."""
    assert done.mimose is not None
    return [record.recomputed_units for record in done.mimose.records if not record.sheltered]


def saved(done: Trained) -> list[int]:
    """How many units each planned step recomputed, or kept recipes of."""
    assert done.mimose is not None
    return [saving_units(record) for record in done.mimose.records if not record.sheltered]


@pytest.mark.parametrize("name", by_family())
def test_an_architecture_trains_the_same_in_less_memory(name: str) -> None:
    """Losses, weights and buffers bit for bit; every step within the budget, sheltered or planned."""
    plain = trained_plainly(name)
    done, budget = budgeted(name, plain)
    assert equal(plain, done)
    assert max(done.peaks) <= budget < max(plain.peaks)
    assert any(saved(done))


@pytest.mark.conformance(
    AREA, "layers with and without a checkpointing of their own (GradientCheckpointingLayer)", "works"
)
def test_both_kinds_of_layers_are_units() -> None:
    """What is recomputed does not hang on what a library prepared for it."""
    units: dict[bool, set[str]] = {True: set(), False: set()}
    for name in ("llama", "albert", "funnel", "resnet"):
        architecture = ARCHITECTURES[name]
        done = train(architecture.build, architecture.batches()[:2], "1GB")
        assert done.mimose is not None
        model = done.model
        for unit in done.mimose.records[0].actions:
            units[isinstance(model.get_submodule(unit), GradientCheckpointingLayer)].add(name)
    assert units[True] >= {"llama"}
    assert units[False] >= {"albert", "funnel", "resnet"}


@pytest.mark.conformance(AREA, "layers dropped at random (LayerDrop)", "works")
@pytest.mark.parametrize("layerdrop", [0.1, 0.3])
def test_layers_dropped_at_random(layerdrop: float) -> None:
    """A step that drops no layer needs more than the steps before it that did; the budget holds for it, too."""
    architecture = replace(ARCHITECTURES["wav2vec2"], sizes=SOUND * 4)

    def build() -> nn.Module:
        return architecture.build(layerdrop=layerdrop, num_hidden_layers=4)

    plain = train(build, architecture.batches())
    budget = plain.budget(0.6)
    done = train(build, architecture.batches(), budget)
    assert equal(plain, done)
    assert max(done.peaks) <= budget
    assert any(saved(done))


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_an_architecture_under_lightning(name: str) -> None:
    """The same by the callback."""
    architecture = ARCHITECTURES[name]

    def fit(*callbacks: pl.Callback) -> tuple[Task, MeterCallback]:
        pl.seed_everything(0, verbose=False)
        task, meter = Task(architecture.build()), MeterCallback()
        pl.seed_everything(7, verbose=False)
        quiet_trainer(meter, *callbacks).fit(task, loader(architecture.batches()))
        return task, meter

    plain, plainly = fit()
    resident = max(plainly.residents)
    callback = MimoseCallback(int(resident + 0.6 * (max(plainly.peaks) - resident)))
    task, meter = fit(callback)
    assert same(plain.state_dict(), task.state_dict())
    assert callback.budget_bytes is not None
    assert max(meter.peaks) <= callback.budget_bytes < max(plainly.peaks)
    assert saving(callback)


# --- caches -----------------------------------------------------------------------------------------------------


def switches(model: nn.Module) -> list[bool]:
    """`use_cache` of every config in the tree."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c.use_cache for c in configs.values() if hasattr(c, "use_cache")]


@pytest.mark.conformance(AREA, "use_cache=True by default: off while training, back on afterwards", "works")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "t5", "whisper"])
def test_caches_are_off_in_training_and_back_on_afterwards(name: str) -> None:
    """Also when training ends by an error."""
    architecture = ARCHITECTURES[name]
    batch, model = architecture.batches()[1], architecture.build()
    seen: list[Any] = []

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        out = model(**batch)
        seen.append(out.past_key_values)
        return out.loss

    loss_fn(model, batch)
    before = switches(model)
    assert any(before)
    assert seen.pop() is not None
    with pytest.raises(KeyError), Mimose(model, budget="1GB", loss_fn=loss_fn) as mimose:
        mimose.step(batch)
        assert mimose.records[0].recomputed_units
        assert not any(switches(model))
        raise KeyError
    assert seen.pop() is None
    assert switches(model) == before
    loss_fn(model, batch)
    assert seen.pop() is not None


@pytest.mark.conformance(
    AREA, "use_cache=True asked for in the call: blocks that are given the cache are kept", "guarded"
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_cache_asked_for_in_the_call(name: str) -> None:
    """The caller wins over the config; a recomputation would fill the cache twice."""
    architecture = ARCHITECTURES[name]
    lengths: list[int] = []

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        out = model(**batch, use_cache=True)
        lengths.append(out.past_key_values.get_seq_length())
        return out.loss

    plain = train(architecture.build, architecture.batches(), loss_fn=loss_fn)
    expected, lengths[:] = list(lengths), []
    done = train(architecture.build, architecture.batches(), "1GB", loss_fn, planner=recompute_all)
    assert equal(plain, done)
    assert lengths == expected


class Attention(nn.Module):
    """Attention over what a cache holds and what it is given."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.qkv, self.mlp = (
            layer,
            nn.Linear(16, 48),
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),
        )

    def forward(self, x: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        x = x + functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x + functional.dropout(self.mlp(x), 0.1, self.training)


class Cached(nn.Module):
    """Two passes over one cache: the second attends to the first, as with a learnt prefix."""

    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.by_keyword, self.embedding = by_keyword, nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Attention(i) for i in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        for half in input_ids.chunk(2, dim=1):
            x = self.embedding(half)
            for block in self.blocks:
                x = block(x, cache=cache) if self.by_keyword else block(x, cache)
        assert cache.get_seq_length() == input_ids.shape[1]
        return x.pow(2).mean()


def with_cache(by_keyword: bool) -> tuple[Trained, list[str]]:
    """Trained under a plan that recomputes all there is, and what planned steps recomputed."""
    data = [{"input_ids": tokens(4, length, i)} for i, length in enumerate((96, 48, 64, 80, 56, 88, 72, 60))]

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch)

    plain = train(lambda: Cached(by_keyword), data, loss_fn=loss_fn)
    done = train(lambda: Cached(by_keyword), data, "1GB", loss_fn, planner=recompute_all)
    assert equal(plain, done)
    assert done.mimose is not None
    planned = [record for record in done.mimose.records if not record.sheltered]
    assert planned
    return done, [unit for record in planned for unit in record.actions]


@pytest.mark.conformance(AREA, "a cache with content, given to blocks by position or by keyword", "guarded")
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_block_that_is_given_a_cache_is_never_run_twice(by_keyword: bool) -> None:
    """It would attend to its own keys and values a second time."""
    done, units = with_cache(by_keyword)
    assert not any(isinstance(done.model.get_submodule(unit), Attention) for unit in units)


@pytest.mark.conformance(AREA, "a cache with content, given to blocks by position or by keyword", "guarded")
@pytest.mark.parametrize("by_keyword", [False, True])
def test_parts_of_a_block_that_is_given_a_cache_are_recomputed(by_keyword: bool) -> None:
    """They are given none."""
    _, units = with_cache(by_keyword)
    recomputed = {unit for unit in units if unit.endswith("mlp")}
    assert {"blocks.0.mlp", "blocks.1.mlp"} <= recomputed  # nothing is gained at the end of the network


# --- frozen models ----------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear layer and a trained low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x)))


def adapted(name: str) -> Callable[[], nn.Module]:
    """Builds a model of which nothing but LoRA adapters in its attention is trained; its embeddings are frozen too."""

    def build() -> nn.Module:
        model = ARCHITECTURES[name].build().requires_grad_(False)
        for where, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and where.endswith(("q_proj", "v_proj", "query", "value")):
                model.set_submodule(where, LoRA(module))
        return model

    return build


@pytest.mark.conformance(AREA, "frozen model with LoRA adapters, embeddings frozen too (as PEFT makes it)", "works")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_adapters_on_a_frozen_model(name: str) -> None:
    """No input of the first block needs a gradient, and nobody has to make it need one."""
    build, data = adapted(name), ARCHITECTURES[name].batches()
    plain = train(build, data)
    initial = train(build, [])
    done = train(build, data, plain.budget(0.6))
    assert equal(plain, done)
    trained = {
        key for key, value in done.model.state_dict().items() if not value.equal(initial.model.state_dict()[key])
    }
    assert trained == {key for key in done.model.state_dict() if ".a." in key or ".b." in key}
    assert max(done.peaks) <= plain.budget(0.6) < max(plain.peaks)
    assert any(saved(done))


# --- what else a model returns ----------------------------------------------------------------------------------


@pytest.mark.conformance(AREA, "output_hidden_states=True and output_attentions=True", "works")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart", "vit"])
def test_hidden_states_and_attentions_are_the_same(name: str) -> None:
    """They are returned as without the plugin, and a loss that reads them trains the same."""
    architecture = ARCHITECTURES[name]
    seen: list[tuple[str, torch.Tensor]] = []

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        out = model(**batch, output_hidden_states=True, output_attentions=True)
        extra = [
            (key, tensor)
            for key, value in out.items()
            if key.endswith(("hidden_states", "attentions")) and isinstance(value, tuple)
            for tensor in value
        ]
        seen.extend((key, tensor.detach().clone()) for key, tensor in extra)
        return out.loss + sum(tensor.pow(2).mean() for _, tensor in extra)

    def build() -> nn.Module:
        return architecture.build(attn_implementation="eager")

    plain = train(build, architecture.batches(), loss_fn=loss_fn)
    expected, seen[:] = list(seen), []
    done = train(build, architecture.batches(), "1GB", loss_fn, planner=recompute_all)
    assert equal(plain, done)
    assert {key for key, _ in seen} >= {key for key, _ in expected}
    assert any("attentions" in key for key, _ in seen)
    assert any("hidden_states" in key for key, _ in seen)
    assert [key for key, _ in seen] == [key for key, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(seen, expected, strict=True))
    assert any(recomputed(done))


# --- Hugging Face's own checkpointing ---------------------------------------------------------------------------


def switch(model: nn.Module, on: bool) -> None:
    """Turns the library's own checkpointing on or off, by the name the installed release has for it."""
    which = "enable" if on else "disable"
    method = getattr(model, f"activation_checkpointing_{which}", None) or getattr(
        model, f"gradient_checkpointing_{which}"
    )
    method()


def expected_method() -> str:
    """What the installed release calls the way out."""
    found = hasattr(PreTrainedModel, "activation_checkpointing_disable")
    return "activation_checkpointing_disable" if found else "gradient_checkpointing_disable"


@pytest.mark.conformance(AREA, "Hugging Face's own checkpointing is on in every block", "refused")
def test_a_model_that_checkpoints_itself_names_the_way_out() -> None:
    """The warning names the method of the installed release, and calling it gives the units back."""
    model, batch = ARCHITECTURES["bert"].build(), ARCHITECTURES["bert"].batches()[1]
    switch(model, on=True)
    told = rf"Call {expected_method()}\(\) on BertForSequenceClassification"
    with pytest.warns(UserWarning, match=told) as caught, Mimose(model, budget="1GB") as mimose:
        mimose.step(batch)
        assert not any("encoder.layer" in unit for unit in mimose.records[0].actions)
    assert len([each for each in caught if "checkpointing" in str(each.message)]) == 1
    with pytest.raises(UnitsError, match=told):
        Mimose(model, budget="1GB", units=["*.encoder.layer.*"])
    getattr(model, expected_method())()
    with warnings.catch_warnings(), Mimose(model, budget="1GB") as mimose:
        warnings.simplefilter("error")
        mimose.step(batch)
        assert any("encoder.layer" in unit for unit in mimose.records[0].actions)


@pytest.mark.conformance(
    AREA, "Hugging Face's own checkpointing is on: trains on with those blocks left alone", "guarded"
)
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "swin"])
@pytest.mark.filterwarnings("ignore:Hugging Face gradient checkpointing")
def test_a_model_that_checkpoints_itself_trains_the_same(name: str) -> None:
    """Nothing is recomputed twice; the results are those of the model without the plugin."""
    architecture = ARCHITECTURES[name]

    def build() -> nn.Module:
        model = architecture.build()
        switch(model, on=True)
        return model

    data = architecture.batches()
    plain, done = train(build, data), train(build, data, "1GB", planner=recompute_all)
    assert equal(plain, done)


@pytest.mark.conformance(AREA, "Hugging Face's own checkpointing is on in every block", "refused")
def test_the_way_out_is_named_inside_a_lightning_module() -> None:
    """The method belongs to the model inside, not to the module that Lightning trains; older releases have another."""
    task = Task(ARCHITECTURES["bert"].build())
    switch(task.model, on=True)
    with pytest.raises(UnitsError, match=rf"Call {expected_method()}\(\) on BertForSequenceClassification \('model'\)"):
        Mimose(task, budget="1GB", units=["*.encoder.layer.*"])

    class Older(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
            self.block.gradient_checkpointing = True

        def gradient_checkpointing_disable(self) -> None:
            """The name of Transformers 4."""

    with pytest.raises(UnitsError, match=r"Call gradient_checkpointing_disable\(\) on Older "):
        Mimose(Older(), budget="1GB", units=["block"])
