"""From columns to a timeline: its peaks are the measured ones, plan by plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.measure.resident import batch_bytes
from lightning_mimose.parts import storage_bytes
from lightning_mimose.predict.assemble import Extras, Link, assemble
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.rows import kept_timeline
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.hub import HUB
from tests.helpers.meter import PeakMeter
from tests.helpers.models import MODELS, TinyText, text_batch
from tests.helpers.recording import model_loss, patched, recorded


def resident_of(model: nn.Module, batch: Any, *, zeroes: bool = True, update: int = 0) -> Resident:
    """What is resident now."""
    old = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    lasting = storage_bytes([*model.parameters(), *model.buffers()]) + batch_bytes(batch)
    return Resident(lasting, old, zeroes, update)


def timeline_of(seen: Observation, resident: Resident, left_out: Iterable[str] = ()) -> Timeline:
    """The timeline of the observed step itself."""
    return assemble(
        seen.structure,
        seen.values,
        resident,
        rates=Rates(1e-9),
        minimum_share=0.0,
        left_out=frozenset(left_out),
    )


def measured(model: nn.Module, batch: Any, actions: Mapping[str, str], *, zeroes: bool = True) -> int:
    """The true peak of forward and backward under some actions, by the independent meter."""
    with patched(model) as (_, session):
        session.arm(actions, None)
        with PeakMeter(model, None, batch) as meter:
            loss = model_loss(model, batch)
            if zeroes:
                model.zero_grad(set_to_none=True)
            loss.backward()
            del loss
    return meter.peak_bytes


def observed(model: nn.Module, batch: Any) -> Observation:
    """A sheltered step, recorded, with no gradients before or after."""
    model.zero_grad(set_to_none=True)
    seen = observe(recorded(model, batch), batch_bytes(batch))
    model.zero_grad(set_to_none=True)
    return seen


def test_each_row_is_written_whole_and_each_recomputation_has_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not cleared before they are filled: what the memory held before must not matter, with all actions."""
    model = TinyText()
    with Mimose(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters(), 0.1), loss_fn=model_loss) as mimose:
        for tokens in (24, 16, 32, 20, 28, 44):
            mimose.step(text_batch(4, tokens))
        _, seen = mimose._advisor.timeline(text_batch(4, 44))
    empty, made = np.empty, []
    extras = Extras(Link(1e9, 1 << 40, frees=True), {2: 0.5 * seen.values, 4: 0.25 * seen.values})
    resident = Resident(1000, 0, zeroes_gradients=True, update_bytes=1000)

    for garbage in (0, 12345):

        def filled(*args: Any, garbage: int = garbage, **options: Any) -> Any:
            array = empty(*args, **options)
            array.fill(garbage)
            return array

        monkeypatch.setattr(np, "empty", filled)
        made.append(assemble(seen.structure, seen.values, resident, rates=Rates(1), minimum_share=0, extras=extras))
    monkeypatch.undo()
    assert {option.action for option in made[0].options} >= {"recompute", "recompute+lean", "offload", "split4"}
    assert (made[0].relief_bytes == made[1].relief_bytes).all()
    again = [label for label in made[0].labels if label.startswith("recomputation of ")]
    assert len(again) == len(set(again)) > 1


def plans(seen: Observation, timeline: Timeline, most: int) -> list[dict[str, str]]:
    """Some plans: none, each top unit, all of them, pairs, and parts of each kind."""
    tops = [
        u
        for u, p in zip(timeline.units, timeline.parents, strict=True)
        if p < 0 and (u, "recompute") in timeline.option_index
    ]
    parts = [timeline.units[o.unit] for o in timeline.options if timeline.parents[o.unit] >= 0]
    chosen = [
        (),
        *((u,) for u in tops[:3]),
        tuple(tops),
        tuple(tops[1:]),
        *combinations(tops, 2),
        *((p,) for p in parts),
    ]
    unique = list(dict.fromkeys(chosen))
    step = max(1, len(unique) // most)
    return [dict.fromkeys(plan, "recompute") for plan in unique[::step]]


@pytest.mark.parametrize("name", ["text", "dict", "nested", "vision"])
def test_peaks_of_tiny_models_are_the_measured_ones(name: str) -> None:
    """Attention, dictionaries, a shared block called twice, BatchNorm: never 1 % too low, nor much too high."""
    make, batch_of = MODELS[name]
    # Large enough that a region's fixed few kilobytes do not matter.
    model, batch = make(), batch_of(32, 24) if name != "vision" else batch_of(32, 20, 20)
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch))
    for actions in plans(seen, timeline, 8):
        model.zero_grad(set_to_none=True)
        true = measured(model, batch, actions)
        # Above: a recomputation stops after its last saved tensor, a measured one runs to its end.
        assert 0.99 * true <= timeline.peak_bytes(actions) <= 1.05 * true, actions


@pytest.mark.parametrize("name", HUB)
def test_peaks_of_hugging_face_models_are_the_measured_ones(name: str) -> None:
    """BERT, GPT-2, T5 with its shared bias, ResNet, Swin: within 1 %."""
    make, batch_of = HUB[name]
    model, batch = make(), batch_of(8, 64 if name != "swin" else 32)
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch))
    for actions in plans(seen, timeline, 6):
        model.zero_grad(set_to_none=True)
        assert timeline.peak_bytes(actions) == pytest.approx(measured(model, batch, actions), rel=0.01), actions


@pytest.mark.parametrize("zeroes", [True, False])
def test_old_gradients_are_alive_until_they_are_zeroed(zeroes: bool) -> None:
    """Through the forward and, when they accumulate, through the backward too."""
    model, batch = TinyText(layers=2, hidden=64), text_batch(2, 8)
    seen = observed(model, batch)
    for actions in ({}, {"layers.0": "recompute", "layers.1": "recompute"}):
        model.zero_grad(set_to_none=True)
        model_loss(model, batch).backward()
        timeline = timeline_of(seen, resident_of(model, batch, zeroes=zeroes))
        predicted, truth = timeline.peak_bytes(actions), measured(model, batch, actions, zeroes=zeroes)
        assert predicted >= 0.995 * truth
        # New gradients are added to old ones and gone, one by one: at most a layer's are counted too many.
        assert predicted <= 1.005 * truth + (0 if zeroes else storage_bytes(model.layers[0].mlp.parameters()))


def test_the_optimizers_update_is_a_position() -> None:
    """If it needs more than the step, no plan helps."""
    model, batch = TinyText(), text_batch()
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch, update=10**9))
    assert timeline.peak_bytes({}) == timeline.peak_bytes({"layers.0": "recompute"}) == 10**9
    assert timeline.peak_position({}) == "optimizer step"


def test_a_step_without_an_update_does_not_come_to_its_peak() -> None:
    """Nor is what such an update holds all through a step part of it; and with an update it is."""
    model, batch = TinyText(), text_batch()
    seen = observed(model, batch)
    with_update = resident_of(model, batch, update=10**9)._replace(again_bytes=10**8)
    without = with_update._replace(updates=False)
    passes = resident_of(model, batch)
    for actions in ({}, dict.fromkeys(("layers.0", "layers.2"), "recompute")):
        assert timeline_of(seen, with_update).peak_bytes(actions) >= 10**9
        assert timeline_of(seen, without).peak_bytes(actions) == timeline_of(seen, passes).peak_bytes(actions)
    kept = [kept_timeline(seen.structure, seen.values, each).peak_bytes({}) for each in (without, passes)]
    assert kept[0] == kept[1]


def test_every_unit_that_frees_memory_is_an_option() -> None:
    """And none that frees nothing."""
    model, batch = TinyText(), text_batch()
    seen = observed(model, batch)
    frees = {call.unit for call in seen.structure.calls if seen.values[call.saved] > 0}
    timeline = timeline_of(seen, resident_of(model, batch))
    assert {unit for unit, _ in timeline.option_index} == frees


def test_units_that_are_left_out_are_no_options() -> None:
    """Those that are checkpointed already, for instance."""
    model, batch = TinyText(), text_batch()
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch), {"layers.1"})
    assert ("layers.1", "recompute") not in timeline.option_index
    assert ("layers.0", "recompute") in timeline.option_index


def test_parents_follow_the_calls() -> None:
    """A part's parent is the unit in whose call it was called."""
    seen = observed(MODELS["nested"][0](), MODELS["nested"][1]())
    structure = seen.structure
    for unit, parent in zip(structure.units, structure.parents, strict=True):
        if unit.endswith(".mlp"):
            assert structure.units[parent] == unit.removesuffix(".mlp")
        else:
            assert parent == -1


def test_costs_are_the_operations_that_run_again() -> None:
    """Equal blocks cost the same, and a block more than its parts."""
    model, batch = TinyText(), text_batch()
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch))
    cost = {timeline.units[o.unit]: o.added_seconds for o in timeline.options}
    assert cost["layers.0"] == pytest.approx(cost["layers.2"])
    assert cost["layers.0"] > cost["layers.0.mlp"] > 0


def test_the_summary_tells_kept_recomputed_and_freed() -> None:
    """What the estimator judges its fits by: without gradients and resident bytes."""
    model, batch = TinyText(), text_batch(4, 32)
    seen = observed(model, batch)
    (summary,) = seen.structure.summary(seen.values[None])
    regions = [call for call in seen.structure.calls if call.region]
    assert len(summary) == 2 + len(regions)
    assert summary[0] > summary[1] > 0
    assert summary[2:].tolist() == [seen.values[call.saved] for call in regions]
    gradients = storage_bytes(model.parameters())
    peak = timeline_of(seen, Resident(0, 0, True, 0)).peak_bytes({})
    assert peak - gradients <= summary[0] <= peak


def test_a_structure_is_a_value() -> None:
    """Equal, hashable, and plain data: what makes steps comparable across runs."""
    model = TinyText(layers=1)
    one, two = observed(model, text_batch(2, 8)).structure, observed(model, text_batch(2, 8)).structure
    assert one == two
    assert hash(one) == hash(two)
    json.dumps(asdict(one))


def test_a_step_without_any_region_has_no_options() -> None:
    """A model that is entirely frozen up to its head: nothing to recompute, and the peak is still known."""
    model, batch = TinyText(layers=1), text_batch(32, 32)
    for parameter in [*model.embed.parameters(), *model.layers.parameters()]:
        parameter.requires_grad_(False)
    seen = observed(model, batch)
    timeline = timeline_of(seen, resident_of(model, batch))
    assert timeline.options == ()
    assert timeline.peak_bytes({}) == pytest.approx(measured(model, batch, {}), rel=0.005)


def test_values_are_rounded_not_cut() -> None:
    """A fitted byte count is a float next to a whole number."""
    model, batch = TinyText(layers=1), text_batch()
    seen = observed(model, batch)
    resident = resident_of(model, batch)
    exact = timeline_of(seen, resident).base_bytes
    nearly = assemble(
        seen.structure, np.maximum(seen.values - 1e-6, 0.0), resident, rates=Rates(1e-9), minimum_share=0.0
    ).base_bytes
    assert (exact == nearly).all()
    assert torch.is_grad_enabled()
