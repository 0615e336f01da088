"""`Mimose` in a plain loop: held, exact, predicted, refused, and gone without a trace."""

from __future__ import annotations

import copy
import gc
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_mimose import BudgetInfeasibleError, Mimose
from lightning_mimose.errors import (
    BudgetError,
    LossError,
    MimoseError,
    PlanError,
    SizeError,
    UnitsError,
    UnsupportedError,
)
from lightning_mimose.report.record import StepRecord
from tests.helpers.counting import flops
from tests.helpers.hub import HUB, bert, classified_text, gpt2, pixels, resnet
from tests.helpers.loops import Loss, plain_step
from tests.helpers.meter import PeakMeter
from tests.helpers.models import MODELS, Batch, TinyText, TinyVision, image_batch, text_batch
from tests.helpers.pairs import saving_units
from tests.helpers.recording import model_loss, patched

Make = Callable[[], nn.Module]
LENGTHS = (40, 72, 24, 56, 64, 33, 48, 80, 100, 61, 90, 37)
SIDES = (24, 41, 17, 33, 48, 20, 44, 28, 36, 46, 18, 32)


def batches_of(name: str, count: int = 12, batch: int = 8) -> list[Batch]:
    """Batches of random sizes for a model of the hub, the last one shorter."""
    sizes = {"resnet": SIDES, "swin": (32,) * 12}.get(name, LENGTHS)
    made = [HUB[name][1](batch, size, seed) for seed, size in enumerate(sizes[:count])]
    return [*made[:-1], HUB[name][1](batch // 2, sizes[count - 1], count)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of these tests."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def budget_at(share: float, make: Make, batches: Sequence[Batch], loss_fn: Loss = model_loss) -> int:
    """Resident bytes and a share of the activation memory of the largest step."""
    model = make()
    optimizer, peak = adam(model), 0
    for batch in sorted(batches, key=lambda b: sum(t.numel() for t in b.values()))[-2:]:
        with PeakMeter(model, optimizer, batch) as meter:
            plain_step(model, optimizer, batch, loss_fn)
        peak = max(peak, meter.peak_bytes)
    return int(meter.resident_bytes + share * (peak - meter.resident_bytes))


def metered(mimose: Mimose, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """The true peak of one step under a budget."""
    with PeakMeter(model, optimizer, batch) as meter:
        mimose.step(batch)
    return meter.peak_bytes


@pytest.mark.parametrize(
    ("name", "share"),
    # The least that works for so small a ResNet is 0.65: its first layers' working set.
    [(name, share) for name in HUB for share in ((0.9, 0.7) if name == "resnet" else (0.7, 0.4))],
)
def test_every_step_stays_within_the_budget(name: str, share: float) -> None:
    """Sheltered steps, the first update, the shorter last batch: by the independent meter."""
    make, _ = HUB[name]
    batches = batches_of(name)
    budget = budget_at(share, make, batches)
    model = make()
    optimizer = adam(model)
    with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
        peaks = [metered(mimose, model, optimizer, batch) for batch in batches]
        assert max(peaks) <= budget
        assert sum(record.sheltered for record in mimose.records) < len(batches)


def test_one_image_of_another_width_tells_little_of_larger_ones() -> None:
    """Heights vary beside one width; only the first image has another. Sums of both sides describe all of these."""
    sides = [(64, 64), (64, 32), (32, 32), (56, 32), (40, 32), (96, 96), (32, 64), (48, 80), (96, 64), (88, 96)]
    batches = [image_batch(4, *pair, seed=i) for i, pair in enumerate(sides)]
    budget = budget_at(0.7, TinyVision, batches)
    model = TinyVision()
    optimizer = adam(model)
    with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=model_loss) as mimose:
        peaks = [metered(mimose, model, optimizer, batch) for batch in batches]
        assert max(peaks) <= budget
        planned = [(r, peak) for r, peak in zip(mimose.records, peaks, strict=True) if not r.sheltered]
        assert len(planned) >= 2
        assert all(abs(r.predicted_peak_bytes / peak - 1) < 0.01 for r, peak in planned)


def test_a_plan_for_a_size_of_which_nothing_is_sure_leaves_much_free() -> None:
    """Widths that no measured image had: whoever asks is told what saves most, or the least that it takes."""
    model = TinyVision()
    with Mimose(model, budget="1GB", optimizer=adam(model), loss_fn=model_loss) as mimose:
        for height, width in ((64, 64), (64, 32), (32, 32), (56, 32), (40, 32)):
            mimose.step(image_batch(4, height, width))
        for dims in ({"pixel_values:2": 32, "pixel_values:3": 64}, {"pixel_values:2": 33, "pixel_values:3": 65}):
            assert not mimose._advisor.estimator.predict(dict(mimose._advisor.size_of(dims).dims)).trusted
            assert not mimose.plan(dims).choices  # there is room for more than twice as much
            assert mimose.plan(dims, "9MB").choices
            with pytest.raises(BudgetInfeasibleError, match="Give at least"):
                mimose.plan(dims, "1MB")


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_the_peak_is_predicted(name: str) -> None:
    """On planned steps, of sizes never seen before, within 0.5 % of the independent meter's peak."""
    make, batch_of = HUB[name]
    sizes = (24, 40, 16, 64, 48, 72, 80) if name == "resnet" else LENGTHS[:10]
    count = 32 if name == "resnet" else 8  # so that a region's fixed few kilobytes do not matter
    batches = [batch_of(count, size, size) for size in sizes]
    budget = budget_at(0.8 if name == "resnet" else 0.6, make, batches)
    model = make()
    optimizer = adam(model)
    with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
        for batch in batches:
            mimose.step(batch)
        for size in (32, 56) if name == "resnet" else (26, 34, 42):
            batch = batch_of(count, size, size)
            peak = metered(mimose, model, optimizer, batch)
            predicted = mimose.records[-1].predicted_peak_bytes
            assert predicted is not None
            assert predicted == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_one_varying_dimension_is_trusted_after_six_sheltered_steps(name: str) -> None:
    """And stays so."""
    make, _ = HUB[name]
    batches = batches_of(name)[:-1]
    with Mimose(make(), budget=budget_at(0.6, make, batches)) as mimose:
        for batch in batches:
            mimose.step(batch)
        sheltered = [record.sheltered for record in mimose.records]
    assert sum(sheltered) <= 6
    assert not any(sheltered[6:])


def test_two_lengths_are_trusted_after_ten_sheltered_steps() -> None:
    """Source and target of a translation."""
    make, batch_of = HUB["t5"]
    sizes = [
        (40, 12),
        (24, 30),
        (56, 20),
        (32, 16),
        (48, 36),
        (64, 24),
        (20, 10),
        (36, 28),
        (60, 14),
        (44, 22),
        (52, 18),
    ]
    batches = [batch_of(4, n, i, m) for i, (n, m) in enumerate(sizes)]
    with Mimose(make(), budget=budget_at(0.6, make, batches)) as mimose:
        for batch in batches:
            mimose.step(batch)
        assert not mimose.records[-1].sheltered
        assert sum(record.sheltered for record in mimose.records) <= 10


def test_more_budget_never_recomputes_more() -> None:
    """Operations of every planned step, from a tight budget to one that fits everything.

    Of recomputations alone: what lean saves run in backward is no forward's, and is not counted here.
    """
    batches = batches_of("bert")[:-1]
    twin = bert()

    def cost(batch: Batch, record: StepRecord) -> int:
        with patched(twin) as (_, session):
            session.arm(record.actions, None)
            return flops(lambda: model_loss(twin, batch).backward())

    before = [float("inf")] * 5
    for share in (0.4, 0.6, 0.8, 1.1):
        model = bert()
        budget = budget_at(share, bert, batches)
        with Mimose(model, budget=budget, optimizer=adam(model), actions=["recompute"]) as mimose:
            for batch in batches:
                mimose.step(batch)
            last = mimose.records[-5:]
        assert not any(record.sheltered for record in last)
        now = [cost(batch, record) for batch, record in zip(batches[-5:], last, strict=True)]
        assert all(one <= other for one, other in zip(now, before, strict=True)), share
        before = [float(flop) for flop in now]
    assert not any(record.recomputed_units for record in last)


def test_a_batch_that_fits_keeps_everything_and_a_huge_one_little() -> None:
    """The point of planning per batch."""
    batches = batches_of("bert")[:-1]
    model = bert()
    with Mimose(model, budget=budget_at(0.45, bert, batches), optimizer=adam(model)) as mimose:
        for batch in batches:
            mimose.step(batch)
        mimose.step(classified_text(8, 26))
        mimose.step(classified_text(8, 99))
        small, large = mimose.records[-2:]
    assert small.actions == {}
    assert saving_units(large) > 0


def autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        return model_loss(model, batch)


EXACT: dict[str, tuple[Make, list[Batch], Loss]] = {
    "dropout": (TinyText, [text_batch(4, n, n) for n in LENGTHS], model_loss),
    "keywords": (MODELS["keywords"][0], [text_batch(4, n, n) for n in LENGTHS], model_loss),
    "shared": (MODELS["nested"][0], [text_batch(4, n, n) for n in LENGTHS], model_loss),
    "batchnorm": (TinyVision, [image_batch(4, n, n, n) for n in SIDES], model_loss),
    "bf16": (TinyText, [text_batch(4, n, n) for n in LENGTHS], autocast),
    "bf16-batchnorm": (TinyVision, [image_batch(4, n, n, n) for n in SIDES], autocast),
    "gpt2": (gpt2, batches_of("gpt2"), model_loss),
    "t5": (HUB["t5"][0], batches_of("t5", batch=4), model_loss),
}


@pytest.mark.parametrize("name", EXACT)
def test_weights_are_those_of_the_plain_loop(name: str) -> None:
    """After 12 steps, buffers and losses too, bit for bit; with sheltered and planned steps among them."""
    make, batches, loss_fn = EXACT[name]
    found, menus = [], [["recompute"], None]  # alone, and beside lean saves
    budget = budget_at(0.8 if make is TinyVision else 0.5, make, batches, loss_fn)
    for planned, menu in [(False, None), *((True, menu) for menu in menus)]:
        torch.manual_seed(7)
        model = make()
        optimizer, losses = adam(model), []
        if planned:
            with Mimose(model, budget=budget, optimizer=optimizer, loss_fn=loss_fn, actions=menu) as mimose:
                losses = [mimose.step(batch) for batch in batches]
                assert any(saving_units(record) for record in mimose.records if not record.sheltered), menu
        else:
            losses = [plain_step(model, optimizer, batch, loss_fn) for batch in batches]
        found.append([*losses, *(value.clone() for value in model.state_dict().values())])
    plain, *ours = found
    assert all(all(map(torch.equal, plain, each)) for each in ours)


# --- refusing ---------------------------------------------------------------------------------------------------


def test_a_budget_below_what_is_resident_is_refused_at_once() -> None:
    """Before any step; the error says what is resident and what would do; the model is untouched."""
    model = bert()
    weights = sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(BudgetInfeasibleError) as error:
        Mimose(model, budget=weights + 1000, optimizer=adam(model))
    assert error.value.budget_bytes == weights + 1000
    assert error.value.resident_bytes >= weights
    assert error.value.smallest_feasible_bytes is not None
    assert error.value.smallest_feasible_bytes >= 4 * weights
    assert f"{weights + 1000:,}" in str(error.value)
    assert not any("forward" in vars(module) for module in model.modules())


def tight(make: Make, batch: Batch) -> int:
    """A budget that the update fits into, and the step does not."""
    return budget_at(0.12, make, [batch, batch])


def test_a_budget_that_no_plan_keeps_is_refused_before_the_update() -> None:
    """In a sheltered step that is known only after its backward: weights and optimizer state are unchanged."""
    batch = classified_text(16, 120)
    model = bert()
    optimizer = adam(model)
    budget = tight(bert, batch)
    before = [p.detach().clone() for p in model.parameters()]
    with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
        with pytest.raises(BudgetInfeasibleError) as error:
            mimose.step(batch)
        assert mimose.records == []
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    found = error.value
    assert found.budget_bytes == budget
    assert found.smallest_feasible_bytes is not None
    assert found.smallest_feasible_bytes > budget > found.resident_bytes > 0
    for number in (found.budget_bytes, found.smallest_feasible_bytes, found.resident_bytes):
        assert f"{number:,}" in str(found)


def test_a_batch_that_is_predicted_not_to_fit_is_refused_before_its_forward() -> None:
    """The sizes before it taught enough; nothing of it is computed, nothing changed, and smaller ones go on."""
    batches = [classified_text(8, n, n) for n in LENGTHS[:8]]
    model = bert()
    optimizer, calls = adam(model), []
    with Mimose(model, budget=budget_at(0.6, bert, batches), optimizer=optimizer) as mimose:
        for batch in batches:
            mimose.step(batch)
        before = [p.detach().clone() for p in model.parameters()]
        handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
        with pytest.raises(BudgetInfeasibleError) as error:
            mimose.step(classified_text(8, 250))
        assert calls == []
        assert all(map(torch.equal, model.parameters(), before))
        assert error.value.smallest_feasible_bytes is not None
        assert error.value.smallest_feasible_bytes > error.value.budget_bytes
        mimose.step(classified_text(8, 50))
        assert calls == [1]
        handle.remove()


def test_a_warning_instead_goes_on_with_the_most_saving_plan() -> None:
    """`on_infeasible="warn"`: trained, recorded, and said."""
    batch = classified_text(16, 120)
    model = bert()
    with Mimose(model, budget=tight(bert, batch), optimizer=adam(model), on_infeasible="warn") as mimose:
        with pytest.warns(UserWarning, match="cannot be kept"):
            mimose.step(batch)
        (record,) = mimose.records
    assert record.recomputed_units > 0
    assert record.measured_peak_bytes is not None
    assert record.measured_peak_bytes > record.budget_bytes


def test_a_warning_for_a_batch_that_needs_more_than_all_before() -> None:
    """Lengths that vary: not one for each."""
    model = bert()
    budget = tight(bert, classified_text(16, 60))
    with Mimose(model, budget=budget, optimizer=adam(model), on_infeasible="warn") as mimose:
        for tokens in (100, 110, 120):  # learns
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mimose.step(classified_text(16, tokens))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for tokens in (115, 112, 119, 117):
                mimose.step(classified_text(16, tokens))
        assert not any("cannot be kept" in str(each.message) for each in caught)
        with pytest.warns(UserWarning, match="cannot be kept"):
            mimose.step(classified_text(16, 200))


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_the_smallest_feasible_budget_works(name: str) -> None:
    """For a fresh run that meets the longest batch first, with 3 % on top; and the answer names no silly amount."""
    make, _ = HUB[name]
    batches = batches_of(name)[:-1]
    longest = max(batches, key=lambda b: max(t.numel() for t in b.values()))
    model = make()
    with Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        for batch in batches:
            mimose.step(batch)
        smallest = mimose.smallest_feasible_bytes(longest)
    assert budget_at(0.0, make, batches) < smallest < budget_at(0.9, make, batches)
    budget = int(1.03 * smallest)
    model = make()
    optimizer = adam(model)
    with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
        for batch in [longest, *batches]:
            assert metered(mimose, model, optimizer, batch) <= budget


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"budget": "many"}, BudgetError),
        ({"budget": -1}, BudgetError),
        ({"budget": "1000TB"}, BudgetError),
        ({"units": ["nothing.like.this"]}, UnitsError),
        ({"actions": ["teleport"]}, UnsupportedError),
        ({"actions": []}, UnsupportedError),
        ({"actions": "lean"}, UnsupportedError),
        ({"planner": "oracle"}, ValueError),
        ({"on_infeasible": "ignore"}, MimoseError),
        ({"on_oom": "retyr"}, MimoseError),
        ({"optimizer": []}, MimoseError),
    ],
)
def test_bad_arguments_are_typed_errors(keywords: dict[str, Any], error: type[Exception]) -> None:
    """At construction, with the model untouched."""
    model = TinyText()
    with pytest.raises(error):
        Mimose(model, **({"budget": "1GB"} | keywords))
    assert not any("forward" in vars(module) for module in model.modules())


def test_lazy_modules_have_no_size_yet() -> None:
    """The error says what to do; after that it works."""
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(8), nn.ReLU()), nn.Sequential(nn.Linear(8, 1)))
    with pytest.raises(UnsupportedError, match=r"Sequential has lazy modules, .*'0\.0\.weight'.* run it on one batch"):
        Mimose(model, budget="1GB")
    with torch.no_grad():
        model(torch.ones(2, 4))
    with Mimose(model, budget="1GB", loss_fn=lambda model, batch: model(batch).mean()) as mimose:
        mimose.step(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda model, batch: {"loss": model(**batch).loss}, "returned a dict"),
        (lambda model, batch: model(**batch).loss.item(), "returned a float"),
        (lambda model, batch: None, "returned a NoneType"),
        (lambda model, batch: model.embed(batch["input_ids"]), "of shape"),
        (torch.no_grad()(model_loss), "without gradients"),
    ],
)
def test_what_is_no_loss_is_a_loss_error(loss_fn: Loss, said: str) -> None:
    """Before anything is updated; the next step is as if nothing had happened."""
    model = TinyText()
    before = copy.deepcopy(model.state_dict())
    wrong = [True, False]
    with Mimose(
        model,
        budget="1GB",
        optimizer=adam(model),
        loss_fn=lambda module, batch: (loss_fn if wrong.pop(0) else model_loss)(module, batch),
    ) as mimose:
        with pytest.raises(LossError, match=said):
            mimose.step(text_batch(4, 16, 0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        mimose.step(text_batch(4, 16, 0))


def test_the_optimizer_of_another_model_is_noticed() -> None:
    """It trains nothing here."""
    with (
        pytest.warns(UserWarning, match="will not be trained"),
        Mimose(TinyText(), budget="1GB", optimizer=adam(TinyText())),
    ):
        pass


def test_a_batch_without_tensors_is_a_size_error() -> None:
    """And the next one is trained as if nothing had happened."""
    model = TinyText()
    with Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        with pytest.raises(SizeError):
            mimose.step({"text": "words"})
        mimose.step(text_batch())
        assert len(mimose.records) == 1


class Growing(nn.Module):
    """One batch makes twice as much as all others of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))
        self.odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(torch.cat([x, x]) if self.odd else x)[: len(x)]
        return x


def test_one_odd_batch_does_not_shelter_all_that_follow() -> None:
    """What is kept free since it broke the budget shrinks, also while no plan leaves that much."""
    model, x = Growing(), torch.randn(512, 64)
    peaks = []
    for _ in range(2):
        with PeakMeter(model, None, x) as meter:
            model(x).square().mean().backward()
        peaks.append((meter.peak_bytes, meter.resident_bytes))
    peak, resident = peaks[-1]
    budget = resident + int(0.6 * (peak - resident))
    with (
        warnings.catch_warnings(),
        Mimose(model, budget=budget, loss_fn=lambda model, batch: model(batch).square().mean(), size_fn=len) as mimose,
    ):
        warnings.simplefilter("ignore")
        for i in range(40):
            model.odd = i == 3
            mimose.step(x)
        assert mimose.records[3].measured_peak_bytes > budget
        assert not all(record.sheltered for record in list(mimose.records)[-10:])


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_batch_may_have_nothing_of_a_kind(empty: int) -> None:
    """Images without objects, graphs without edges."""
    model = TinyText()

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch["input_ids"], batch["labels"]).loss
        return loss + 1e-3 * batch["boxes"].sum()

    with Mimose(model, budget="1GB", loss_fn=loss_fn) as mimose:
        for i in range(6):
            boxes = torch.ones(0 if i == empty else 3 + i, 4)
            assert torch.isfinite(mimose.step({**text_batch(4, 16 + 8 * i, i), "boxes": boxes}))


def test_a_model_without_a_scalar_loss_is_told_so() -> None:
    """With what to do about it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)))
    with Mimose(model, budget="1GB") as mimose, pytest.raises(TypeError, match="loss_fn"):
        mimose.step(torch.randn(3, 4))


# --- forced plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forced",
    [
        {},
        {"bert.encoder.layer.1": "recompute"},
        {"bert.encoder.layer.0": "recompute", "bert.encoder.layer.2": "recompute"},
        {"bert.encoder.layer.0.attention": "recompute", "bert.encoder.layer.2.output": "recompute"},
    ],
    ids=str,
)
def test_a_forced_plan_is_applied_exactly(forced: dict[str, str]) -> None:
    """What a callable planner returns: operations equal those of exactly these units run twice."""
    model = bert()
    batches = batches_of("bert")[:-1]
    with patched(model) as (_, session):
        session.arm(forced, None)
        expected = flops(lambda: model_loss(model, batches[-1]).backward())
    with Mimose(model, budget="1GB", planner=lambda timeline, budget: forced) as mimose:
        for batch in batches[:-1]:
            mimose.step(batch)
        assert flops(lambda: mimose.step(batches[-1])) == expected
        record = mimose.records[-1]
        assert not record.sheltered
        assert {unit: action for unit, action in record.actions.items() if action != "keep"} == forced


def test_a_forced_plan_that_cannot_be_is_refused() -> None:
    """A unit and its part at once, or a unit that does not exist."""
    for forced in ({"layers.0": "recompute", "layers.0.mlp": "recompute"}, {"layers.7": "recompute"}):
        model = TinyText()
        with Mimose(model, budget="1GB", planner=lambda timeline, budget, f=forced: f) as mimose:
            mimose.step(text_batch())
            with pytest.raises(PlanError, match=r"layers\.[07]"):
                mimose.step(text_batch())


@pytest.mark.parametrize("planner", ["auto", "exact", "greedy"])
def test_every_planner_keeps_the_budget(planner: str) -> None:
    """The paper's, the exact one, and the default."""
    batches = batches_of("bert")
    budget = budget_at(0.5, bert, batches)
    model = bert()
    optimizer = adam(model)
    with Mimose(model, budget=budget, optimizer=optimizer, planner=planner) as mimose:  # type: ignore[arg-type]
        assert max(metered(mimose, model, optimizer, batch) for batch in batches) <= budget


def more(model: TinyText, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [model.head.weight]})


def others(model: TinyText, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = [model.head.bias]


def replaced(model: TinyText, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def new_head(model: TinyText, optimizer: torch.optim.Optimizer) -> None:
    model.head = nn.Linear(32, 2)


@pytest.mark.parametrize(
    ("whose", "change"),
    [
        ("one's", more),
        ("one's", others),
        ("one's", replaced),
        ("one's", new_head),
        ("all", others),
        ("nobody's", replaced),
        ("nobody's", new_head),
    ],
)
def test_gradients_of_everything_are_zeroed_whoever_updates_it(
    whose: str, change: Callable[[TinyText, torch.optim.Optimizer], object]
) -> None:
    """Parameters that no optimizer has, or another one from some step on, and such as are replaced by others."""
    torch.manual_seed(0)
    model = TinyText(dropout=0.0)
    mine = model.parameters() if whose == "all" else [model.embed.weight]
    optimizer = torch.optim.SGD(mine, lr=0.0)
    batch = text_batch(4, 16, 0)
    given = None if whose == "nobody's" else optimizer
    with Mimose(model, budget="1GB", optimizer=given, loss_fn=model_loss) as mimose:
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            mimose.step(batch)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            model_loss(twin, batch).backward()
            for parameter, alone in zip(model.parameters(), twin.parameters(), strict=True):
                assert (parameter.grad is None) == (alone.grad is None)
                assert parameter.grad is None or torch.equal(parameter.grad, alone.grad)


def test_named_units_are_the_only_ones_planned() -> None:
    """`units=[...]`."""
    model, batches = bert(), batches_of("bert")
    with Mimose(model, budget=budget_at(0.7, bert, batches), optimizer=adam(model), units=["BertLayer"]) as mimose:
        for batch in batches:
            mimose.step(batch)
        named = {unit for record in mimose.records for unit in record.actions}
    assert named <= {f"bert.encoder.layer.{i}" for i in range(3)}
    assert named


# --- leaving ----------------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> dict[str, Any]:
    """What must be as before: attributes, classes, hooks, keys, caches, modes."""
    modules = list(model.modules())
    return {
        "vars": [sorted(vars(module)) for module in modules],
        "classes": [type(module) for module in modules],
        "forwards": [type(module).forward for module in modules],
        "hooks": [
            len(getattr(module, name))
            for module in modules
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        ],
        "gradient_hooks": [
            (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in model.parameters()
        ],
        "keys": list(model.state_dict()),
        "caches": [m.config.use_cache for m in modules if hasattr(getattr(m, "config", None), "use_cache")],
        "training": [module.training for module in modules],
        "requires_grad": [p.requires_grad for p in model.parameters()],
    }


class Interrupts(TinyText):
    """Fails on demand, in the middle of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.error is not None:
            self.layers[0](self.embed(input_ids))
            raise self.error
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_nothing_is_left_after_closing(name: str) -> None:
    """Attributes, classes, hooks, keys and caches are as before; closing twice is harmless."""
    make, _ = HUB[name]
    model = make()
    before = traces(model)
    mimose = Mimose(model, budget="1GB", optimizer=adam(model))
    assert list(model.state_dict()) == before["keys"]
    for batch in batches_of(name, 3):
        mimose.step(batch)
    mimose.close()
    mimose.close()
    assert traces(model) == before


@pytest.mark.parametrize("inside", [False, True])
def test_one_that_is_dropped_without_being_closed_leaves_nothing(inside: bool) -> None:
    """Nobody can close it any more; also where sizes are read when the model is called. Another one takes its place."""
    model = gpt2()
    before = traces(model)
    batches = batches_of("gpt2", 3)

    def numbered(model: nn.Module, number: torch.Tensor) -> torch.Tensor:
        return model_loss(model, batches[int(number)])

    def train() -> None:
        mimose = Mimose(model, budget="1GB", optimizer=adam(model), loss_fn=numbered if inside else model_loss)
        for number, batch in enumerate(batches):
            mimose.step(torch.tensor(number) if inside else batch)
        assert traces(model) != before

    train()
    gc.collect()
    assert traces(model) == before
    train()
    with Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        mimose.step(batches[0])
    gc.collect()
    assert traces(model) == before


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("steps", [0, 7])
def test_an_error_in_the_forward_leaves_nothing(error: BaseException, steps: int) -> None:
    """In a sheltered step and in a planned one: raised as it is, and everything is as before."""
    model = Interrupts()
    before = traces(model)
    with pytest.raises(type(error)), Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        for i in range(steps):
            mimose.step(text_batch(4, 16 + 8 * i))
        model.error = error
        mimose.step(text_batch(4, 20))
    model.error = None
    assert traces(model) == before
    assert not torch.autograd._profiler_enabled()
    model_loss(model, text_batch()).backward()


def test_training_goes_on_after_an_error() -> None:
    """Who catches it may take the next batch; the failed step has no record and taught nothing."""
    model = Interrupts()
    optimizer = adam(model)
    with Mimose(model, budget="1GB", optimizer=optimizer) as mimose:
        mimose.step(text_batch(4, 16))
        hooks = traces(model)["gradient_hooks"]
        model.error = RuntimeError("mine")
        for tokens in (16, 24):
            with pytest.raises(RuntimeError, match="mine"):
                mimose.step(text_batch(4, tokens))
        model.error = None
        assert traces(model)["gradient_hooks"] == hooks
        mimose.step(text_batch(4, 24))
        assert [record.sheltered for record in mimose.records] == [True, True]


def test_an_error_in_the_backward_or_in_the_update_leaves_nothing() -> None:
    """Where meters, hooks and recomputations are in full swing."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("in backward")

    class Update(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if any(
                (p.grad is not None and p.grad.numel() > 4096) or broken for g in self.param_groups for p in g["params"]
            ):
                raise RuntimeError("in the update")

    broken = False
    model = TinyText()
    before = traces(model)

    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        x = Backward.apply(model.embed(batch["input_ids"]))
        for layer in model.layers:
            x = layer(x)
        return x.sum()

    with pytest.raises(RuntimeError, match="in backward"), Mimose(model, budget="1GB", loss_fn=failing) as mimose:
        mimose.step(text_batch())
    assert traces(model) == before
    optimizer = Update(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="in the update"), Mimose(model, budget="1GB", optimizer=optimizer) as mimose:
        broken = True
        mimose.step(text_batch())
    assert traces(model) == before
    assert not torch.autograd._profiler_enabled()


def test_a_closed_one_refuses_to_step_and_still_answers() -> None:
    """Records, plans and the report come from numbers alone."""
    model = bert()
    mimose = Mimose(model, budget="1GB", optimizer=adam(model))
    for batch in batches_of("bert")[:8]:
        mimose.step(batch)
    mimose.close()
    with pytest.raises(RuntimeError, match="closed") as refused:
        mimose.step(classified_text())
    assert isinstance(refused.value, MimoseError)
    assert len(mimose.records) == 8
    plan = mimose.plan(classified_text(8, 50))
    assert plan.predicted_peak_bytes > 0
    assert set(plan.actions.values()) <= {"keep", "recompute"}
    assert mimose.smallest_feasible_bytes(classified_text(8, 50)) <= plan.predicted_peak_bytes
    assert "1" in str(mimose.report())
    json.dumps(mimose.report().to_dict())


def test_attaching_draws_no_random_number() -> None:
    """Nor does closing, or asking; so that a seeded run stays what it was."""
    model = bert()
    optimizer = adam(model)
    state = torch.get_rng_state()
    mimose = Mimose(model, budget="1GB", optimizer=optimizer)
    mimose.close()
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_between_steps_is_left_alone() -> None:
    """No gradient, no recomputation, no record."""
    model = TinyText(dropout=0.0)
    with Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        mimose.step(text_batch())
        with torch.no_grad():
            inside = model_loss(model, text_batch())
        records = len(mimose.records)
    with torch.no_grad():
        assert torch.equal(model_loss(model, text_batch()), inside)
    assert records == 1


# --- records ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[list[StepRecord], list[int]]]:
    """Records of a run, with what the independent meter says was resident before each step."""
    torch.set_num_threads(2)  # before the fixtures of single tests
    torch.manual_seed(0)
    batches = [*batches_of("bert"), classified_text(8, 40), classified_text(8, 40)]
    model = bert()
    optimizer, residents = adam(model), []
    with Mimose(model, budget=budget_at(0.5, bert, batches), optimizer=optimizer) as mimose:
        for batch in batches:
            residents.append(PeakMeter(model, optimizer, batch).resident_bytes)
            mimose.step(batch)
        records = mimose.records
    yield records, residents


Run = tuple[list[StepRecord], list[int]]


def test_records_are_numbered_and_name_the_sizes(run: Run) -> None:
    """One per step, in order; the dimension that varies is named by path and axis."""
    records, _ = run
    assert [record.step for record in records] == list(range(len(LENGTHS) + 2))
    assert [record.size["input_ids:1"] for record in records[1:-2]] == list(LENGTHS[1:])
    assert {record.size.get("batch", 8) for record in records} == {8, 4}
    assert len({record.budget_bytes for record in records}) == 1


def test_records_tell_sheltered_steps_from_planned_ones(run: Run) -> None:
    """A prediction exactly for those that are planned; sheltered ones are measured and recompute."""
    records, _ = run
    assert records[0].sheltered
    assert not records[-1].sheltered
    for record in records:
        assert (record.predicted_peak_bytes is None) == record.sheltered
        if record.sheltered:
            assert record.measured_peak_bytes is not None
            assert record.recomputed_units > 0
            assert not record.cache_hit
        assert not record.retried
        assert record.reserved_peak_bytes is None
        assert record.planning_seconds >= 0


def test_resident_bytes_in_records_are_the_meters(run: Run) -> None:
    """Parameters, buffers, gradients, optimizer state, batch: to the byte, before and after Adam's state appears."""
    records, residents = run
    assert [record.resident_bytes for record in records] == residents


def test_measured_peaks_in_records_are_the_meters(run: Run) -> None:
    """Of the whole step, the update included: to the byte by the profiler, nearly so beside one of somebody else's."""
    model, batches = bert(), batches_of("bert")[:4]
    optimizer = adam(model)
    with Mimose(model, budget=run[0][0].budget_bytes, optimizer=optimizer) as mimose:
        peaks = [metered(mimose, model, optimizer, batch) for batch in batches]
        beside = [record.measured_peak_bytes for record in mimose.records]
    assert [record.measured_peak_bytes for record in run[0][:4]] == peaks
    assert beside == pytest.approx(peaks, rel=0.005)


def test_the_same_size_again_takes_its_plan_from_the_cache(run: Run) -> None:
    """With the same actions and the same prediction."""
    records, _ = run
    assert records[-1].cache_hit
    assert records[-1].actions == records[-2].actions
    assert records[-1].predicted_peak_bytes == records[-2].predicted_peak_bytes


def test_records_are_plain_data(run: Run) -> None:
    """They outlive everything and go into JSON."""
    for record in run[0]:
        assert json.loads(json.dumps(record.to_dict()))["step"] == record.step


def test_plans_can_be_asked_for_by_size_and_budget() -> None:
    """By batch or by named dimensions; a larger budget acts on fewer units; an impossible one is an error."""
    model = bert()
    batches = batches_of("bert")[:-1]
    with Mimose(model, budget="1GB", optimizer=adam(model)) as mimose:
        with pytest.raises(MimoseError):
            mimose.plan(classified_text(8, 50))
        for batch in batches:
            mimose.step(batch)
        batch = classified_text(8, 50)
        free = mimose.plan(batch)
        least = mimose.smallest_feasible_bytes(batch)
        plans = [mimose.plan(batch, least + (free.predicted_peak_bytes - least) * i // 4) for i in range(5)]
        seconds = [plan.added_seconds for plan in plans]
        assert seconds == sorted(seconds, reverse=True)
        assert len(free) == 0
        named = {name: value for name, value in mimose.records[-1].size.items() if name != "input_ids:1"}
        assert mimose.plan({**named, "input_ids:1": 50}).predicted_peak_bytes == free.predicted_peak_bytes
        with pytest.raises(BudgetInfeasibleError):
            mimose.plan(batch, 1000)


def test_the_smallest_images_and_a_size_function() -> None:
    """`size_fn` names the dimension; here one number per batch."""
    model = resnet()
    with Mimose(
        model, budget="1GB", optimizer=adam(model), size_fn=lambda batch: {"side": batch["pixel_values"].shape[-1]}
    ) as mimose:
        for side in (24, 40, 16, 32):
            mimose.step(pixels(4, side))
        assert [record.size["side"] for record in mimose.records] == [24, 40, 16, 32]


def test_what_follows_from_the_dimensions_that_are_named_need_not_be() -> None:
    """A target of the double length; one that is named to be of another was never seen."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])

    def loss_fn(module: nn.Module, batch: Batch) -> torch.Tensor:
        out = module(batch["x"])
        return (torch.cat([out, out, out[:, :1]], 1) - batch["y"]).pow(2).mean()

    with Mimose(model, budget="1GB", loss_fn=loss_fn) as mimose:
        for n in (40, 24, 64, 33, 57, 48, 29, 61):
            mimose.step({"x": torch.randn(4, n, 16), "y": torch.randn(4, 2 * n + 1, 16)})
        assert sum(record.sheltered for record in mimose.records) <= 4
        named = mimose.smallest_feasible_bytes({"batch": 4, "x:1": 52})
        assert named == mimose.smallest_feasible_bytes({"batch": 4, "x:1": 52, "y:1": 105})
        assert mimose.plan({"batch": 4, "x:1": 52}).predicted_peak_bytes
        with pytest.raises(MimoseError, match=r"y:1 followed from x:1, and would be 105 here: name both"):
            mimose.plan({"batch": 4, "x:1": 52, "y:1": 52})


class Stiff(TinyText):
    """Of nothing but what lean saves must keep: each tensor is needed, and follows from nothing that is there."""

    def __init__(self) -> None:
        super().__init__(0)
        wide = [(32, 128), (128, 128), (128, 32)]
        self.layers = nn.ModuleList(
            nn.Sequential(*(part for pair in wide for part in (nn.Linear(*pair), nn.Tanh()))) for _ in range(4)
        )


@pytest.mark.parametrize(
    ("actions", "make"), [(["lean"], Stiff), (["split"], partial(TinyText, 4)), (["offload"], partial(TinyText, 4))]
)
def test_where_the_actions_asked_for_do_not_do_a_plan_is_the_shelters(actions: list[str], make: Make) -> None:
    """As in training; a budget may be asked for as it is written, but for a share of a device that nobody named."""
    torch.manual_seed(0)
    model = make()
    with Mimose(model, budget="1GB", optimizer=adam(model), loss_fn=model_loss, actions=actions) as mimose:
        for length in LENGTHS:
            mimose.step(text_batch(4, length))
        size = {"batch": 4, "input_ids:1": 60}
        least = mimose.smallest_feasible_bytes(size)
        assert mimose.plan(size, least).predicted_peak_bytes <= least
        with pytest.raises(BudgetInfeasibleError, match=f"Give at least {least:,} bytes"):
            mimose.plan(size, least - 1)
        assert mimose.plan(size, f"{least} B") == mimose.plan(size, least)
        with pytest.raises(BudgetError, match="depends on the device"):
            mimose.plan(size, 0.5)
        with pytest.raises(BudgetError, match="could not be read"):
            mimose.plan(size, "much")


def test_lean_saves_alone_do_with_less_than_the_shelter() -> None:
    """Where blocks keep next to nothing else, there is a plan for less than what a run starts with; and it holds."""
    torch.manual_seed(0)
    model, size = TinyText(4), {"batch": 4, "input_ids:1": 60}
    optimizer, plans = adam(model), list[dict[str, str]]()
    with Mimose(
        model,
        budget="1GB",
        optimizer=optimizer,
        loss_fn=model_loss,
        actions=["lean"],
        planner=lambda *_: plans[-1] if plans else {},
    ) as mimose:
        for length in LENGTHS:
            mimose.step(text_batch(4, length))
        least = mimose.smallest_feasible_bytes(size)
        plans.append({f"layers.{i}": "lean+expansions" for i in range(4)})
        batch = text_batch(4, 60)
        with PeakMeter(model, optimizer, batch) as meter:
            mimose.step(batch)
        record = mimose.records[-1]
        assert set(record.actions.values()) == {"lean+expansions"}
        assert record.predicted_peak_bytes == pytest.approx(meter.peak_bytes, rel=0.002)
        assert meter.peak_bytes < least


def accumulated(
    budget: int | None, make: Make, batches: Sequence[Batch], every: int = 3
) -> tuple[nn.Module, list[int]]:
    """Trained with several batches to an update, by scaled losses and clipped gradients; the peaks of every step."""
    torch.manual_seed(0)
    model = make()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    peaks = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model_loss(model, batch) / every

    def backward(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()

    def update() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    mimose = None
    if budget is not None:
        mimose = Mimose(
            model, budget=budget, optimizer=optimizer, loss_fn=loss_fn, backward_fn=backward, update_fn=update
        )
    for number, batch in enumerate(batches):
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch, update=number % every == every - 1)
            else:
                loss = loss_fn(model, batch)
                if number % every == 0:
                    optimizer.zero_grad()
                backward(loss)
                if number % every == every - 1:
                    update()
        peaks.append(meter.peak_bytes)
    if mimose is not None:
        planned = [(r, p) for r, p in zip(mimose.records, peaks, strict=True) if not r.sheltered]
        assert len(planned) > len(batches) // 2
        assert any(record.actions for record, _ in planned)
        for record, peak in planned:
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
        mimose.close()
    return model, peaks


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_accumulated_scaled_and_clipped(name: str) -> None:
    """What a loop does between batch and update is its own; bit-equal, held, predicted."""
    make, _ = HUB[name]
    batches = batches_of(name) + batches_of(name)
    model, plain = accumulated(None, make, batches)
    budget = int(0.8 * max(plain))
    planned, peaks = accumulated(budget, make, batches)
    assert max(peaks) <= budget
    assert all(map(torch.equal, model.parameters(), planned.parameters()))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_batch_that_failed_leaves_the_accumulation_as_it_was(accumulates: bool) -> None:
    """Gradients of the batches before it are kept, and updated with; without accumulation nothing of it is left."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    first, bad, last = torch.randn(4, 8), torch.full((4, 8), torch.nan), torch.randn(4, 8)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if batch.isnan().any():
            raise KeyError("label")
        loss: torch.Tensor = model(batch).pow(2).mean()
        return loss

    still = torch.optim.SGD(model.parameters(), lr=0.0)
    with Mimose(model, budget="1GB", loss_fn=loss_fn, optimizer=still) as mimose:
        mimose.step(first, update=not accumulates)
        with pytest.raises(KeyError):
            mimose.step(bad)
        mimose.step(last)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for batch in (first, last) if accumulates else (last,):
        loss_fn(model, batch).backward()
    for one, other in zip(found, model.parameters(), strict=True):
        assert one is not None
        assert other.grad is not None
        assert torch.equal(one, other.grad)


def test_fabric_in_mixed_precision() -> None:
    """`fabric.backward` in place of the loss's own, which Fabric refuses."""
    batches = [text_batch(4, length) for length in LENGTHS]
    weights = []
    for planned in (False, True):
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        torch.manual_seed(0)
        own = TinyText(4)
        model, optimizer = fabric.setup(own, adam(own))
        mimose = None
        if planned:
            mimose = Mimose(model, budget="1GB", optimizer=optimizer, backward_fn=fabric.backward)
        for batch in batches:
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = model(**batch).loss
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
        if mimose is not None:
            assert not mimose.records[-1].sheltered
            mimose.close()
        weights.append([parameter.detach() for parameter in own.parameters()])
    assert all(map(torch.equal, *weights))


def test_a_step_that_accumulates_runs_again() -> None:
    """Out of memory in its backward: gradients of the loss's own parameters are put back, too."""
    batches, weights = [torch.randn(1024, 16) for _ in range(24)], []
    for fails in (None, 22):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)])
        head = nn.Linear(16, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        due = [fails]

        def once_out_of_memory(grad: torch.Tensor, due: list[int | None] = due) -> None:
            if due[0] == len(mimose.records):
                due[0] = None
                raise torch.OutOfMemoryError("as if")

        def loss_fn(model: Any, batch: torch.Tensor, head: nn.Module = head) -> torch.Tensor:
            first, *others = model
            x = first(batch)
            x.register_hook(once_out_of_memory)
            for each in others:
                x = each(x)
            loss: torch.Tensor = head(x).pow(2).mean() / 3
            return loss

        with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss_fn) as mimose:
            for number, batch in enumerate(batches):
                mimose.step(batch, update=number % 3 == 2)
            assert [record.step for record in mimose.records if record.retried] == ([] if fails is None else [fails])
        weights.append([p.detach() for p in [*model.parameters(), *head.parameters()]])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("update", [True, False])
def test_a_refused_batch_is_not_accumulated_with(update: bool) -> None:
    """It may be refused after its backward, in the first steps; the next one begins anew."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    budget = int(2.3 * sum(parameter.nbytes for parameter in model.parameters()))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    small = torch.randn(4, 64)
    with Mimose(model, budget=budget, optimizer=still, loss_fn=lambda m, x: m(x).pow(2).mean()) as mimose:
        with pytest.raises(BudgetInfeasibleError):
            mimose.step(torch.randn(4000, 64), update=update)
        mimose.step(small)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(small).pow(2).mean().backward()
    for one, other in zip(found, model.parameters(), strict=True):
        assert one is not None
        assert other.grad is not None
        assert torch.equal(one, other.grad)


def test_an_update_that_is_skipped_teaches_nothing() -> None:
    """A scaler skips the first ones, which are measured; the later ones need temporaries all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    mimose: Mimose

    def update() -> None:
        if len(mimose.records) >= 6:
            optimizer.step()

    mimose = Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda m, x: m(x).pow(2).mean(), update_fn=update)
    for number in range(20):
        batch = torch.randn(16 + number, 64)
        peak = metered(mimose, model, optimizer, batch)
        predicted = mimose.records[-1].predicted_peak_bytes
        if number >= 6 and predicted is not None:
            assert predicted >= 0.99 * peak
    assert not mimose.records[-1].sheltered
    mimose.close()


def test_several_optimizers() -> None:
    """All of their state is in the budget, and all are stepped."""
    make, _ = HUB["bert"]
    batches = batches_of("bert")

    def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [torch.optim.AdamW(parameters[:40], lr=1e-3), torch.optim.SGD(parameters[40:], lr=0.1, momentum=0.9)]

    torch.manual_seed(0)
    plain, peak = make(), 0
    optimizers = halves(plain)
    for batch in batches:
        with PeakMeter(plain, optimizers[0], batch) as meter:
            model_loss(plain, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
        plain.zero_grad()
        peak = max(peak, meter.peak_bytes)
    torch.manual_seed(0)
    model, resident = make(), 0
    optimizers = halves(model)
    with Mimose(model, budget="1GB", optimizer=optimizers) as mimose:
        for batch in batches:
            mimose.step(batch)
        resident = mimose.records[-1].resident_bytes
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    state = [t for o in optimizers for each in o.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
    held = [*model.parameters(), *state]
    assert resident >= sum(t.nbytes for t in held)
    with pytest.raises(MimoseError, match="optimizer is a Linear"):
        Mimose(model, budget="1GB", optimizer=[optimizers[0], nn.Linear(1, 1)])  # type: ignore[list-item]


def test_an_update_needs_its_optimizer() -> None:
    """Whose state is memory."""
    with pytest.raises(MimoseError, match="update_fn was given without an optimizer"):
        Mimose(TinyText(2), budget="1GB", update_fn=lambda: None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"host_budget": "zz"}, "host_budget='zz'"),
        ({"host_budget": 0}, "host_budget=0"),
        ({"loss_fn": 5}, "loss_fn=5"),
        ({"backward_fn": "loss"}, "backward_fn='loss'"),
        ({"update_fn": 5}, "update_fn=5"),
        ({"loss_fn": nn.CrossEntropyLoss()}, "criterion = CrossEntropyLoss()"),
        ({"loss_fn": nn.MSELoss}, "criterion = MSELoss()"),
    ],
)
def test_what_cannot_be_a_part_of_a_step_is_refused_before_anything_is_touched(asked: Any, said: str) -> None:
    """By its name, with what to write instead."""
    model = TinyText()
    with pytest.raises(MimoseError, match=re.escape(said)):
        Mimose(model, budget="1GB", **asked)
    assert "forward" not in vars(model.layers[0])


def test_sizes_that_no_machine_could_hold_are_refused_in_words() -> None:
    """Not by numpy, which has no such numbers."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda model, x: model(x).square().mean()) as mimose:
        for tokens in (8, 16, 24, 32, 40, 48, 20, 28):
            mimose.step(torch.randn(4, tokens, 32))
        absurd = {"batch": 4, "input:1": 10**30}
        with pytest.raises(BudgetInfeasibleError, match="inside 1,000,000,000 bytes"):
            mimose.plan(absurd)
        assert mimose.smallest_feasible_bytes(absurd) > 10**15
