"""Offloading (the plain run's bits) and splitting (equal to rounding) from end to end."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseCallback
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import ARCHITECTURES, equal, train, trained_plainly

AREA = "Offloading and splitting"
Planner = Callable[[Timeline, int], dict[str, str]]


def everywhere(action: str) -> Planner:
    """A planner that does the same with every outermost unit that allows it."""

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        chosen: dict[str, str] = {}
        for index, unit in enumerate(timeline.units):
            above, parent = [], timeline.parents[index]
            while parent >= 0:
                above.append(timeline.units[parent])
                parent = timeline.parents[parent]
            if (unit, action) in timeline.option_index and not chosen.keys() & set(above):
                chosen[unit] = action
        return chosen

    return planner


@pytest.mark.conformance(AREA, "BERT, GPT-2, Llama, T5, ViT, Swin, ResNet, Mixtral with every block offloaded", "works")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "swin", "resnet", "mixtral"])
def test_every_block_offloaded(name: str) -> None:
    """Losses, weights and buffers bit for bit. Nothing is spared: on CPU the host is the device."""
    architecture = ARCHITECTURES[name]
    batches, plain = architecture.batches(), trained_plainly(name)
    done = train(architecture.build, batches, "1GB", planner=everywhere("offload"), actions=["offload"])
    assert equal(plain, done)
    assert done.mimose is not None
    planned = [record for record in done.mimose.records if not record.sheltered]
    assert planned
    for record in planned:
        assert set(record.actions.values()) == {"offload"}
    engine_memory = done.mimose._host
    gc.collect()
    assert engine_memory is not None
    assert engine_memory.used_bytes == 0


def test_offloading_is_never_planned_on_a_cpu() -> None:
    """It is asked for, and buys nothing: recomputation alone has to do."""
    architecture = ARCHITECTURES["bert"]
    batches = [*architecture.batches(), *architecture.batches()]
    plain = train(architecture.build, batches)
    done = train(architecture.build, batches, plain.budget(0.5), actions=["offload", "recompute"])
    assert done.mimose is not None
    assert equal(plain, done)
    assert all("offload" not in record.actions.values() for record in done.mimose.records)
    assert any(record.recomputed_units for record in done.mimose.records if not record.sheltered)


def test_a_full_host_keeps_the_rest_where_it_is() -> None:
    architecture = ARCHITECTURES["bert"]
    batches, plain = architecture.batches(), trained_plainly("bert")
    done = train(
        architecture.build, batches, "1GB", planner=everywhere("offload"), actions=["offload"], host_budget=300_000
    )
    assert equal(plain, done)


SPLITTABLE = ["bert", "gpt2", "llama", "t5", "vit"]


def without_dropout(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = ARCHITECTURES[name].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for key, value in vars(module).items():
                if "dropout" in key and isinstance(value, float):
                    setattr(module, key, 0.0)
        return model

    return build


def close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=2e-5) for a, b in pairs)


@pytest.mark.conformance(AREA, "BERT, GPT-2, Llama, T5, ViT without dropout, every block split", "works")
@pytest.mark.parametrize("name", SPLITTABLE)
def test_every_block_split(name: str) -> None:
    """Losses to rounding, in less memory than recomputing whole blocks takes, and never under-predicted."""
    build, batches = without_dropout(name), ARCHITECTURES[name].batches()
    plain = train(build, batches)
    whole = train(build, batches, "1GB", planner=everywhere("recompute"), actions=["recompute"])
    for action in ("split2", "split4"):
        done = train(build, batches, "1GB", planner=everywhere(action), actions=["split"])
        assert done.mimose is not None
        torch.testing.assert_close(torch.stack(done.losses), torch.stack(plain.losses), rtol=1e-4, atol=1e-5)
        assert close(plain.model, done.model)
        planned = [i for i, record in enumerate(done.mimose.records) if not record.sheltered]
        assert planned
        for i in planned:
            record = done.mimose.records[i]
            assert set(record.actions.values()) == {action}
            assert done.peaks[i] < whole.peaks[i]
            assert record.predicted_peak_bytes is not None
            assert done.peaks[i] <= 1.01 * record.predicted_peak_bytes


@pytest.mark.conformance(AREA, "splitting blocks with dropout, BatchNorm or results for the whole batch", "guarded")
@pytest.mark.parametrize(("name", "reason"), [("bert", "random"), ("resnet", "writes state"), ("mixtral", "hooks")])
def test_blocks_that_cannot_be_split_are_named(name: str, reason: str) -> None:
    architecture = ARCHITECTURES[name]
    batches, plain = architecture.batches(), trained_plainly(name)
    done = train(architecture.build, batches, "1GB", planner=everywhere("split2"), actions=["split"])
    assert equal(plain, done)
    assert done.mimose is not None
    told = [text for text in done.mimose.report().guarded.values() if "never split" in text]
    assert told
    assert any(reason in text for text in told)


def test_a_budget_below_what_recomputing_whole_blocks_needs() -> None:
    """Small batches come first and teach; the large ones then need parts."""
    build = without_dropout("bert")
    largest = max(ARCHITECTURES["bert"].batches(), key=lambda batch: batch["input_ids"].numel())
    given = {name: value for name, value in largest.items() if name != "attention_mask"}
    lengths = (16, 16, 24, 32, 40, 48, 56, 64, 96, 96)
    batches = [{k: v[:, :n] if v.dim() > 1 else v for k, v in given.items()} for n in lengths]
    plain = train(build, batches)
    whole = train(build, batches, "1GB", planner=everywhere("recompute"), actions=["recompute"])
    budget = int(0.75 * whole.peaks[-1] + 0.25 * plain.residents[-1])
    done = train(build, batches, budget, actions=["recompute", "split"])
    assert done.mimose is not None
    assert max(done.peaks) <= budget < whole.peaks[-1]
    assert done.mimose.records[-1].split_units


@pytest.mark.parametrize("names", [["offlod"], ["keep"], []])
def test_actions_that_there_are_not(names: list[str]) -> None:
    with pytest.raises(Exception, match="'lean', 'recompute', 'offload', 'split'"):
        MimoseCallback("1GB", actions=names)
    with pytest.raises(Exception, match="'lean', 'recompute', 'offload', 'split'"):
        Mimose(nn.Sequential(nn.Linear(4, 4)), budget="1GB", actions=names)
