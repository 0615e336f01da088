"""Steps that make their inputs themselves: their sizes are read where the model is called."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mimose import Mimose, MimoseCallback, SharedBudget
from lightning_mimose.errors import BudgetInfeasibleError, DeviceMemoryError, SizeError
from tests.helpers.allocator import play
from tests.helpers.fits import condition, same
from tests.helpers.inside import (
    CASES,
    STEPS,
    classified,
    labels_of,
    sgd,
    texts,
    tokens,
    trained,
)
from tests.helpers.loops import plain_step
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Block, Task, TinyText, loader, quiet_trainer, text_batch
from tests.helpers.recording import model_loss

WAYS = "How people train"
CONFORMING = {
    "two texts, one model": "two texts that the training step tokenises, one encoder for both",
    "resized": "images that the training step resizes, each time to another resolution",
    "the longer of two": "a better and a worse answer, which the training step pads to the longer one",
    "masked out": "words that the step masks out, in a share that it draws, and that come back in a decoder",
    "at the resolution of the classes": "images that the step resizes, with a loss at the resolution of the labels",
    "lists of images": "lists of images of any sizes that the model pads itself, as detectors do",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.conformance(WAYS, CONFORMING[name], "works"))
        if name in CONFORMING
        else name
        for name in CASES
    ],
)
def test_budgets_hold_and_steps_are_planned(name: str) -> None:
    """On a meter of its own; predictions within 1 %, results bit for bit."""
    case = CASES[name]
    plain = trained(case)
    budget = plain.budget(0.75)
    ours = trained(case, budget)
    assert max(plain.peaks) > budget >= max(ours.peaks)
    planned = [(r.predicted_peak_bytes, p) for r, p in zip(ours.records, ours.peaks, strict=True) if not r.sheltered]
    assert len(planned) >= case.planned
    assert all(predicted == pytest.approx(peak, rel=0.01) for predicted, peak in planned)
    assert any(record.actions for record in ours.records if not record.sheltered)
    assert same(plain.weights, ours.weights)


def test_what_the_model_is_given_is_named_in_records() -> None:
    """By the names of its arguments; further calls by their number."""
    records = trained(CASES["two texts, one model"], 10**9).records
    assert records[0].size.keys() <= {"batch", "input_ids:1"}
    assert records[-1].size.keys() == {"batch", "input_ids:1", "2.input_ids:1"}


def test_an_input_of_another_shape_is_sheltered_at_once() -> None:
    """The size of a batch was known and its plan made, when the first block is given more than ever."""
    case = CASES["growing"]
    plain = trained(case)
    ours = trained(case, plain.budget(0.75))
    first = STEPS // 2
    assert not ours.records[first - 1].sheltered
    assert ours.records[first].sheltered
    assert ours.records[first].size != ours.records[-1].size
    assert ours.records[-1].size["pixel_values:2"] == 48


class TextTask(Task):
    """Tokenises in its training step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        return classified(self.model, batch)


def fitted(*callbacks: pl.Callback, **options: Any) -> tuple[pl.Trainer, Task, MeterCallback]:
    """A fit on texts."""
    pl.seed_everything(0, verbose=False)
    task, chance, meter = TextTask(TinyText()), random.Random(0), MeterCallback()
    data: list[Any] = [{"texts": texts(chance), "labels": labels_of(chance)} for _ in range(24)]
    trainer = quiet_trainer(meter, *callbacks, **options)
    trainer.fit(task, loader(data))
    return trainer, task, meter


@pytest.mark.conformance(WAYS, "texts that the training step tokenises", "works")
def test_under_lightning() -> None:
    """No size_fn, no tensor in any batch; answers about sizes by the names of the model's arguments."""
    _, task, meter = fitted()
    resident = max(meter.residents)
    budget = int(resident + 0.75 * (max(meter.peaks) - resident))
    callback = MimoseCallback(budget)
    _, ours, measured = fitted(callback)
    assert same(task.state_dict(), ours.state_dict())
    assert max(measured.peaks) <= budget < max(meter.peaks)
    assert sum(record.sheltered for record in callback.records) <= 6
    assert callback.plan({"batch": 4, "input_ids:1": 64}).predicted_peak_bytes <= budget
    with pytest.raises(SizeError, match=r"where the model is called, in \['batch', 'input_ids:1'\]"):
        callback.plan({"texts": ["abc"], "labels": [1]})
    assert condition(ours) == condition(task)


def test_it_is_in_checkpoints(tmp_path: Any) -> None:
    """A run that goes on reads sizes where they were read, and plans from its first step."""
    trainer, _, _ = fitted(MimoseCallback("1GB"))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = MimoseCallback("1GB")
    torch.manual_seed(0)
    chance = random.Random(0)
    data: list[Any] = [{"texts": texts(chance), "labels": labels_of(chance)} for _ in range(2)]
    quiet_trainer(callback, max_epochs=2).fit(TextTask(TinyText()), loader(data), ckpt_path=tmp_path / "last.ckpt")
    assert [record.sheltered for record in callback.records] == [False, False]


@pytest.mark.parametrize("where", ["texts", "model"])
def test_out_of_memory_before_and_after_the_size_is_known(where: str) -> None:
    """The step runs again; one that fails twice before it says so."""
    case, faults = CASES["texts"], [12]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        faults[0] -= 1
        fails = not faults[0]
        if where == "texts" and fails:
            raise torch.OutOfMemoryError("injected")
        found = classified(model, batch)
        if fails:
            raise torch.OutOfMemoryError("injected")
        return found

    failing = case._replace(loss=loss)
    ours = trained(failing, 10**9)
    assert [record.retried for record in ours.records].count(True) == 1
    assert same(ours.weights, trained(case).weights)


@pytest.mark.parametrize("name", ["texts", "two texts, one model", "resized"])
def test_on_an_accelerator_that_is_played(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is measured there, by counters that cannot be read twice."""
    case, found = CASES[name], []
    for plain in (True, False):
        with play(monkeypatch, fragments=False):
            torch.manual_seed(0)
            model, chance = case.make(), random.Random(0)
            optimizer = sgd(model)
            mimose = None if plain else Mimose(model, budget=10**9, optimizer=optimizer, loss_fn=case.loss)
            for number in range(case.steps):
                batch = case.batch(chance, number)
                if mimose is not None:
                    mimose.step(batch)
                else:
                    plain_step(model, optimizer, batch, case.loss)
            if mimose is not None:
                mimose.close()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(*found)
    assert mimose is not None
    planned = [record for record in mimose.records if not record.sheltered]
    assert len(planned) >= case.planned
    for record in planned:
        assert record.measured_peak_bytes is not None
        assert record.predicted_peak_bytes == pytest.approx(record.measured_peak_bytes, rel=0.01)


def test_a_batch_that_cannot_be_kept_is_refused_before_its_blocks_run() -> None:
    """The error comes from within the forward, and the next batch trains."""
    case, ran = CASES["texts"], []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = classified(model, batch)
        ran.append(max(map(len, batch["texts"])))
        return found

    torch.manual_seed(0)
    model, chance = TinyText(), random.Random(0)
    with Mimose(model, budget=10**9, loss_fn=classified) as mimose:
        for number in range(8):
            mimose.step(case.batch(chance, number))
        budget = mimose.smallest_feasible_bytes({"batch": 4, "input_ids:1": 100})
    with Mimose(model, budget=budget, loss_fn=loss) as mimose:
        for number in range(12):
            mimose.step(case.batch(chance, number))
        with pytest.raises(BudgetInfeasibleError, match="input_ids:1"):
            mimose.step({"texts": ["a" * 130] * 4, "labels": [0, 1, 0, 1]})
        mimose.step(case.batch(chance, 12))
    assert len(ran) == 13
    assert not mimose.records[-1].sheltered


def test_copies_and_pickles_made_meanwhile_are_plain() -> None:
    """A copy for averaged weights, a model that is saved whole."""
    torch.manual_seed(0)
    model = TinyText()
    ids, labels = tokens(["abab", "ab"]), torch.tensor([0, 1])
    with Mimose(model, budget="1GB", loss_fn=classified) as mimose:
        mimose.step({"texts": ["abab", "ab"], "labels": [0, 1]})
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in others:
            assert torch.isfinite(other(ids, labels).loss)
        assert len(mimose.records) == 1


def test_out_of_memory_twice_before_the_size_is_known() -> None:
    """Nothing was planned that could be planned leaner."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    with (
        Mimose(TinyText(), budget="1GB", loss_fn=loss) as mimose,
        pytest.raises(DeviceMemoryError, match="before the model was called"),
    ):
        mimose.step({"texts": ["abc"], "labels": [0]})


class Sampling(TinyText):
    """Runs without gradients before it is trained, on texts of another length each time."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        with torch.no_grad():
            super().forward(input_ids[:, : int(input_ids[0, 0])], labels)
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("texts_only", [False, True], ids=["tensors", "texts"])
def test_calls_without_gradients_tell_nothing(texts_only: bool) -> None:
    """A sample that is drawn, a teacher: what they are given is not what memory depends on."""
    torch.manual_seed(0)
    chance = random.Random(0)
    with Mimose(Sampling(), budget="1GB", loss_fn=classified if texts_only else None) as mimose:
        for number in range(10):
            if texts_only:
                mimose.step({"texts": [chr(64 + number) + text for text in texts(chance)], "labels": labels_of(chance)})
            else:
                ids = torch.full((4, 40), 5 + number)
                mimose.step({"input_ids": ids, "labels": torch.tensor(labels_of(chance))})
        assert mimose._advisor.tracker.level == int(texts_only)
        assert not mimose._advisor.tracker.entries
        assert sum(record.sheltered for record in mimose.records) <= 6


class Critic(pl.LightningModule):
    """By hand: a loss of something else runs backward before the model is called."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.critic = TinyText(), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Two backward passes, one update."""
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.critic(torch.ones(2, 4)).sum())
        self.manual_backward(classified(self.model, batch))
        optimizer.step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all."""
        return sgd(self)


def test_a_backward_before_the_model_is_called() -> None:
    """The size is read all the same, and the results are those of the plain run."""
    found = []
    for callbacks in ([], [MimoseCallback("1GB")]):
        pl.seed_everything(0, verbose=False)
        task, chance = Critic(), random.Random(0)
        data: list[Any] = [{"texts": texts(chance), "labels": labels_of(chance)} for _ in range(6)]
        quiet_trainer(*callbacks).fit(task, loader(data))
        found.append({name: value.clone() for name, value in task.state_dict().items()})
    assert same(*found)
    assert "input_ids:1" in callbacks[0].records[-1].size


def test_who_asks_for_a_signature_gets_the_models_own() -> None:
    """`generate` of transformers asks whether forward takes a mask."""
    model = TinyText()
    own = inspect.signature(model.forward)
    with Mimose(model, budget="1GB", loss_fn=classified) as mimose:
        mimose.step({"texts": ["abc"], "labels": [0]})
        assert inspect.signature(model.forward) == own
        assert inspect.signature(model.layers[0].forward) == inspect.signature(Block(8).forward)


def test_a_model_that_is_dropped_is_gone() -> None:
    """Without a word, in a step whose size was read at its call."""
    model = TinyText()
    mimose = Mimose(model, budget="1GB", loss_fn=classified)
    mimose.step({"texts": ["abc"], "labels": [0]})
    gone = weakref.ref(model)
    del model, mimose
    gc.collect()
    assert gone() is None


def test_what_a_run_learnt_elsewhere_is_no_use_where_sizes_are_fixed() -> None:
    """A checkpoint of a run without a size_fn: sizes are read by that, and learnt anew."""
    with Mimose(TinyText(), budget="1GB", loss_fn=classified) as mimose:
        mimose.step({"texts": ["abc"], "labels": [0]})
        state = mimose._advisor.state_dict()
    with Mimose(TinyText(), budget="1GB", loss_fn=classified, size_fn=lambda batch: len(batch["texts"][0])) as mimose:
        assert mimose._advisor.load_state_dict(state)
        for _ in range(3):
            mimose.step({"texts": ["abc"], "labels": [0]})
        assert mimose.records[-1].size == {"size": 3}


def test_a_later_call_that_is_larger_than_ever_is_recomputed() -> None:
    """Its blocks are, those of the first call were kept; where that breaks the budget it is told, not refused."""
    advisors: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        questions = model.questions(tokens(batch["questions"]))  # type: ignore[operator]
        if advisors:  # what was there for the first call is not there for the second
            advisors[0].budget_bytes = 10**5
        answers = model.answers(tokens(batch["answers"]))  # type: ignore[operator]
        return functional.cross_entropy(questions @ answers.T, torch.arange(len(questions)))

    case = CASES["two texts, one model"]
    torch.manual_seed(0)
    model, chance = case.make(), random.Random(0)
    with Mimose(model, budget=10**9, loss_fn=loss) as mimose:
        number = 0
        while number < 15 or mimose.records[-1].sheltered:
            mimose.step(case.batch(chance, number))
            number += 1
        advisors.append(mimose._advisor)
        with pytest.warns(UserWarning, match="a plan for less than the model was called with in the end"):
            mimose.step({"questions": ["ab" * 20] * 4, "answers": ["ab" * 60] * 4})
        record = mimose.records[-1]
        assert record.sheltered
        assert record.actions
        assert record.size["2.input_ids:1"] == 120


class Routed(nn.Module):
    """Between blocks, experts take the tokens that their contents send them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Block(32), Block(32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """`x` is batch x tokens x hidden."""
        x = self.before(x)
        first = x[..., 0] > 0
        routed = torch.zeros_like(x)
        for expert, mask in zip(self.experts, (first, ~first), strict=True):
            routed = routed.masked_scatter(mask[..., None], expert(x[mask]))
        x = self.after(x + routed)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))


def test_what_follows_from_no_size_is_no_reason_to_read_further_inside() -> None:
    """It is tried once, and given up for good: batches tell their sizes."""
    torch.manual_seed(0)
    with Mimose(Routed(), budget="1GB", units=["before", "experts.?", "after"]) as mimose:
        for number in range(40):
            x = torch.randn(4, (16, 24, 32)[number % 3], 32)
            mimose.step({"x": x, "labels": torch.tensor([0, 1, 0, 1])})
        assert mimose._advisor.tracker.level == 0
        assert not any(record.sheltered for record in list(mimose.records)[-10:])


class Padded(nn.Module):
    """Pads a list of texts to the longest of them: a maximum of three sizes, which no polynomial follows."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TinyText(layers=2, hidden=32)

    def forward(self, texts: list[torch.Tensor], labels: torch.Tensor) -> Any:
        """As the model inside."""
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return self.text(input_ids=ids, labels=labels)


def test_lists_of_a_few_tensors_are_planned() -> None:
    """Their sizes are read behind the padding once forty of them have told nothing about the next."""
    torch.manual_seed(0)
    sizes = random.Random(0)
    with Mimose(Padded(), budget="1GB") as mimose:
        for _ in range(60):
            lengths = sizes.choices(range(8, 64), k=3)
            mimose.step({"texts": [torch.randint(32, (n,)) for n in lengths], "labels": torch.tensor([0, 1, 1])})
        assert not any(record.sheltered for record in list(mimose.records)[-8:])


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_known_before_sizes_were_read_inside_in_vain_is_taken_up_again(forgotten: bool) -> None:
    """The first step after that is planned; not if what was measured holds no more for another reason."""
    torch.manual_seed(0)
    with Mimose(Routed(), budget="1GB", units=["before", "experts.?", "after"]) as mimose:
        tracker, levels = mimose._advisor.tracker, list[int]()
        for number in range(40):
            if forgotten and levels and levels[-1] and not levels[-2]:
                mimose._advisor.forget()
            x = torch.randn(4, (16, 20, 24, 28, 32)[number % 5], 32)
            mimose.step({"x": x, "labels": torch.tensor([0, 1, 0, 1])})
            levels.append(tracker.level)
        back = max(step for step in range(1, len(levels)) if levels[step - 1] and not levels[step])
        first, *others = list(mimose.records)[back:]
    assert first.sheltered == forgotten
    assert not others[-1].sheltered


class Words(nn.Module):
    """A block that takes texts, and leaves no other block anything to do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Worded() for _ in range(3))

    def forward(self, batch: list[str]) -> torch.Tensor:
        """The loss."""
        return torch.stack([block(batch) for block in self.blocks]).mean()


class Worded(nn.Module):
    """Makes a tensor of texts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.GELU())

    def forward(self, batch: list[str]) -> torch.Tensor:
        """Of batch x features, their mean."""
        x: torch.Tensor = self.body(tokens(batch)).mean()
        return x


@pytest.mark.parametrize("wrap", [lambda number: number, lambda number: {"seed": number, "name": "ab"}])
def test_batches_of_single_numbers_tell_no_size(wrap: Callable[[torch.Tensor], Any]) -> None:
    """A seed, say: sizes are read where the model is called, as where there is no tensor at all."""
    model, lengths = TinyText(), (24, 40, 32, 56, 48, 64)

    def drawn(model: nn.Module, batch: Any) -> torch.Tensor:
        number = batch if isinstance(batch, torch.Tensor) else batch["seed"]
        return model_loss(model, text_batch(4, lengths[int(number)]))

    with Mimose(model, budget="1GB", loss_fn=drawn) as mimose:
        for number in range(len(lengths)):
            mimose.step(wrap(torch.tensor(number)))
    assert [record.size for record in mimose.records] == [{"batch": 4, "input_ids:1": each} for each in lengths]
    assert not mimose.records[-1].sheltered


def test_where_nothing_is_given_a_tensor_the_error_says_so() -> None:
    """Neither the batch nor what any block is called with."""
    model = Words()
    before = [parameter.clone() for parameter in model.parameters()]
    with (
        Mimose(
            model, budget="1GB", loss_fn=lambda model, batch: model(batch), units=["blocks.?"], optimizer=sgd(model)
        ) as mimose,
        pytest.raises(SizeError, match="nor in what the blocks of Words are called with"),
    ):
        mimose.step(["abc", "ab"])
    assert all(map(torch.equal, before, model.parameters()))


def test_who_has_to_know_the_size_before_is_told() -> None:
    """Jobs that share a budget plan before the step begins."""
    shared, model = SharedBudget("1GB"), TinyText()
    with (
        Mimose(model, budget=shared, loss_fn=classified) as mimose,
        pytest.raises(SizeError, match="Pass size_fn"),
    ):
        mimose.step({"texts": ["abc"], "labels": [0]})


def test_masks_that_come_and_go_are_no_other_input() -> None:
    """Batches of one size, with padding and without: the first block gets a mask only where there is some."""

    class Masked(TinyText):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            x, mask = self.embed(input_ids), (input_ids == 0) * -1e4
            for layer in self.layers:
                x = layer(x, mask if bool(mask.any()) else None)
            return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean(1)), labels))

    torch.manual_seed(0)
    model = Masked()
    with Mimose(model, budget="1GB") as mimose:
        for number in range(8):
            ids = torch.randint(1, 64, (4, 32))
            ids[:, 30:] = number % 2
            mimose.step({"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1])})
        assert "input_ids:1" in mimose.records[-1].size
        assert mimose._advisor.tracker.level == 0
    assert isinstance(model.layers[0], Block)
