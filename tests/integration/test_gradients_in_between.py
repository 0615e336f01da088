"""What modules do with gradients between two steps: clip them, keep them, or zero them in another way than before."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import BudgetInfeasibleError, Mimose, MimoseCallback
from tests.helpers.fits import Fit, run, same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Batch, Task, TinyText, loader, quiet_trainer, text_batch


def data(count: int = 20, seed: int = 0) -> list[Batch]:
    """Texts of many lengths."""
    chance = random.Random(seed)
    return [text_batch(2, chance.choice(range(12, 72, 4)), i) for i in range(count)]


class Wide(Task):
    """A model that is large beside its activations."""

    def __init__(self, _: Any = None) -> None:
        super().__init__(TinyText(4, 96))


def train(task: type[Task], budget: int | None = None, batches: list[Batch] | None = None, **options: Any) -> Any:
    """Train: what is left of it, and the callback."""
    callback = MimoseCallback(budget, **options) if budget else None
    return run(*([callback] if callback else []), task=task, data=data() if batches is None else batches), callback


# --- updates that take more than the budget -------------------------------------------------------------------


class Joined(Wide):
    """Clips all gradients as one tensor."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Makes several copies of them."""
        joined = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])
        sum(part.mean() for part in [joined / joined.norm(p) for p in range(1, 7)])
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


def refused(task: type[Task], budget: int) -> tuple[BudgetInfeasibleError, list[int], int]:
    """Train until the budget is refused: the error, peaks on the independent meter, updates that were made."""
    meter, module = MeterCallback(), task(None)  # type: ignore[arg-type]
    trainer = quiet_trainer(meter, MimoseCallback(budget))
    with pytest.raises(BudgetInfeasibleError) as error:
        trainer.fit(module, loader(data()))
    return error.value, meter.peaks, trainer.global_step


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_an_update_that_breaks_the_budget_is_made_twice_at_most(share: float) -> None:
    """Though nothing is known yet of batches of its size; and what is said to do does."""
    fit, _ = train(Joined)
    error, peaks, updates = refused(Joined, budget := fit.budget(share))
    assert 1 <= sum(peak > budget for peak in peaks) <= 2, (
        "one slips, and another one that shows that it was no accident"
    )
    assert max(peaks[updates:]) < budget, "the step that is refused does not run"
    assert "in its update" in str(error)
    assert error.smallest_feasible_bytes is not None
    again, _ = train(Joined, error.smallest_feasible_bytes)
    assert max(again.peaks) <= error.smallest_feasible_bytes
    assert same(fit.weights(), again.weights())


def test_it_is_made_where_only_a_warning_was_asked_for() -> None:
    """One that names what it takes."""
    fit, _ = train(Joined)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        budgeted, _ = train(Joined, fit.budget(0.5), on_infeasible="warn")
    assert same(fit.weights(), budgeted.weights())
    assert any("in its update" in str(each.message) for each in caught)


class Tuned(Wide):
    """Tries things out in its first update."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """As ever, but for that."""
        super().optimizer_step(*args, **kwargs)
        if not self.global_step:
            torch.empty(64 << 20, dtype=torch.uint8).fill_(0)


def test_what_came_once_is_no_reason_to_refuse_anything() -> None:
    """Nobody could show that it does not come again: no update is made any more then."""
    fit, _ = train(Tuned)
    budget = int(1.05 * sorted(fit.peaks)[-2])
    assert fit.peaks[0] > budget
    budgeted, _ = train(Tuned, budget)
    assert len(budgeted.peaks) == len(fit.peaks)
    assert all(peak <= budget for peak in budgeted.peaks[1:])
    assert same(fit.weights(), budgeted.weights())


class Averaged(Wide):
    """Makes copies of the parameters in its first update, and keeps them."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """As ever, then that."""
        super().optimizer_step(*args, **kwargs)
        if not hasattr(self, "average"):
            self.average = [p.detach().clone() for _ in range(4) for p in self.parameters()]


def test_what_an_update_made_for_good_is_not_expected_again() -> None:
    """It is in no later one."""
    fit, _ = train(Averaged)
    budget = int(1.05 * sorted(fit.peaks)[-2])
    assert fit.peaks[0] > budget
    budgeted, _ = train(Averaged, budget)
    assert all(peak <= budget for peak in budgeted.peaks[1:])
    assert same(fit.weights(), budgeted.weights())


# --- gradients that are kept for the next step ----------------------------------------------------------------


class Keeping(Wide):
    """Keeps a copy of every gradient until the next ones are there."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """There are none in the first step."""
        self.kept = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


def check(plain: Fit, share: float, task: type[Task], batches: list[Batch]) -> list[Any]:
    """See that a training stays inside a budget and is equal bit for bit; returns its records."""
    budget = plain.budget(share)
    budgeted, callback = train(task, budget, batches)
    assert same(plain.weights(), budgeted.weights())
    assert max(budgeted.peaks) <= budget
    for record, peak in zip(callback.records, budgeted.peaks, strict=True):
        assert record.predicted_peak_bytes is None or record.predicted_peak_bytes >= 0.985 * peak
    return list(callback.records)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_size_is_not_predicted_by_the_first_step(seed: int) -> None:
    """Which found no gradients to be kept; nor does it keep others from being planned."""
    batches = data(seed=seed)
    batches += batches[:1]
    records = check(train(Keeping, batches=batches)[0], 0.6, Keeping, batches)
    assert sum(record.sheltered for record in records) <= 8
    assert not records[-1].sheltered


def test_a_second_step_like_the_first_one_is_believed() -> None:
    """That is planned by it, and found to take more."""
    batches = [text_batch(2, 64, i) for i in range(12)]
    plain, _ = train(Keeping, batches=batches)
    budget = plain.budget(0.6)
    with pytest.warns(UserWarning, match="above the budget"):
        budgeted, callback = train(Keeping, budget, batches)
    assert sum(peak > budget for peak in budgeted.peaks) == 1
    assert [record.sheltered for record in callback.records] == [True, False, True] + [False] * 9
    assert same(plain.weights(), budgeted.weights())


# --- gradients that are zeroed in another way -----------------------------------------------------------------


class Changing(Wide):
    """Frees its gradients, and later fills them with zeros."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """From step 12 on."""
        optimizer.zero_grad(set_to_none=self.global_step < 12)


def test_gradients_that_stay_from_some_step_on() -> None:
    """The first such step may be over the budget, for nobody can know."""
    plain, _ = train(Changing)
    budget = plain.budget(0.5)
    budgeted, callback = train(Changing, budget)
    assert same(plain.weights(), budgeted.weights())
    for record, peak in list(zip(callback.records, budgeted.peaks, strict=True))[13:]:
        assert peak <= budget
        assert record.predicted_peak_bytes is None or record.predicted_peak_bytes >= 0.995 * peak


# --- gradients of several batches -----------------------------------------------------------------------------


class WideHead(nn.Module):
    """Layers that have many parameters and hardly any activations, at the end: their gradients come first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.widen, self.head = nn.Embedding(64, 64), nn.Linear(64, 512), nn.Linear(512, 2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(3)
        )
        self.wide = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        x = self.wide(self.widen(x.mean(1)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), labels))


class Headed(Task):
    """A model whose steps peak in their backward, when the gradients of its head are there."""

    def __init__(self, _: Any = None) -> None:
        super().__init__(WideHead())

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_first_batch_of_several_is_predicted_by_those_that_add_to_its_gradients(accumulate: int) -> None:
    """It makes them anew, in a backward in which the others, that most is learnt from, make none."""
    chance = random.Random(0)
    batches = [text_batch(4, chance.choice(range(16, 132, 4)), i) for i in range(40)]
    plain = run(task=Headed, data=batches, accumulate_grad_batches=accumulate)
    callback = MimoseCallback(budget := plain.budget(0.6))
    fit = run(callback, task=Headed, data=batches, accumulate_grad_batches=accumulate)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget
    planned = [(r, peak) for r, peak in zip(callback.records, fit.peaks, strict=True) if not r.sheltered]
    assert len(planned) >= 30
    assert {record.batch_idx % accumulate for record, _ in planned} == set(range(accumulate))
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


# --- batches that only add to gradients -----------------------------------------------------------------------


class Greedy(Wide):
    """Its updates take more than the passes of short texts do."""

    def configure_optimizers(self) -> Any:
        """With temporaries as large as all parameters."""
        return torch.optim.AdamW(self.parameters(), foreach=True)


def short_texts() -> list[Batch]:
    """Of few lengths."""
    chance = random.Random(0)
    return [text_batch(2, chance.choice(range(8, 20, 2)), i) for i in range(38)]


def test_a_batch_that_only_adds_to_gradients_is_predicted_without_an_update() -> None:
    """The last one of an epoch updates, however few there were."""
    batches = short_texts()
    plain = run(task=Greedy, data=batches, accumulate_grad_batches=3)
    callback = MimoseCallback(budget := plain.budget(1.1))
    fit = run(callback, task=Greedy, data=batches, accumulate_grad_batches=3)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget
    # When a size was seen once in a batch that made gradients, and once in one that added to them.
    planned = [(r, peak) for r, peak in zip(callback.records, fit.peaks, strict=True) if not r.sheltered][5:]
    assert len(planned) >= 20
    reached: dict[bool, list[int]] = {False: [], True: []}
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
        reached[record.batch_idx % 3 == 2 or record.batch_idx == 37].append(peak)
    assert max(reached[False]) < 0.95 * min(reached[True]), "what is tested: the update is the peak of these"


def test_a_loop_that_only_adds_to_gradients_is_predicted_without_an_update() -> None:
    """What is asked of a size in between is asked of a step with an update, and no plan of others is changed by it."""
    module = Greedy()
    with Mimose(module.model, budget="1GB", optimizer=module.configure_optimizers()) as mimose:
        for number, batch in enumerate(short_texts()):
            mimose.step(batch, update=number % 2 == 1)
            asked = mimose.plan(batch).predicted_peak_bytes if number > 20 else 0
    planned = [r for r in mimose.records if not r.sheltered and r.predicted_peak_bytes is not None][5:]
    predicted = [[r.predicted_peak_bytes or 0 for r in planned if r.batch_idx % 2 == odd] for odd in (0, 1)]
    assert min(map(len, predicted)) >= 8
    assert max(predicted[0]) < 0.95 * min(predicted[1])
    assert asked == pytest.approx(planned[-1].predicted_peak_bytes, rel=0.01)
