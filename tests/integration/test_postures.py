"""Modules that are switched to another mode in the midst of a training, rates of dropout, and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.actions import recompute
from lightning_mimose.report.record import StepRecord
from tests.helpers.meter import PeakMeter
from tests.helpers.models import TinyText, TinyVision, image_batch, text_batch

STEPS, SWITCH, LEARNING = 40, 18, 8


def text() -> list[Any]:
    """Of six lengths, the longest of them early in either half."""
    return [text_batch(4, (32, 64, 48, 80, 56, 72)[number % 6], number) for number in range(STEPS)]


def vision() -> list[Any]:
    """The same of images."""
    sides = [(24, 40, 32, 48, 28, 44)[number % 6] for number in range(STEPS)]
    return [image_batch(4, side, side, number) for number, side in enumerate(sides)]


def frozen_norms(model: nn.Module, number: int) -> None:
    """Their statistics are those of evaluation from some step on, which save more of what they are given."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(number < SWITCH)


def dropout(model: nn.Module, number: int) -> None:
    """Switched on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1 if number >= SWITCH else 0.0


def evaluation(model: nn.Module, number: int) -> None:
    """A model that was loaded for evaluation, trained as it is for a while."""
    model.train(number >= SWITCH)


def alternating(model: nn.Module, number: int) -> None:
    """Three steps in either mode."""
    model.train(number % 6 >= 3)


def toggling(model: nn.Module, number: int) -> None:
    """Another mode in every step."""
    model.train(number % 2 > 0)


def nothing(model: nn.Module, number: int) -> None:
    """Leaves the model as it is."""


Switch = Callable[[nn.Module, int], None]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], Switch]] = {
    "norms": (lambda: TinyVision(3, 16), vision, frozen_norms),
    "dropout": (lambda: TinyText(layers=3), text, dropout),
    "evaluation": (lambda: TinyText(layers=3), text, evaluation),
    "alternating": (lambda: TinyText(layers=3), text, alternating),
    "toggling": (lambda: TinyText(layers=3), text, toggling),
}


def as_it_comes(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def and_another(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
    """From some step on beside another one, of all pairs of tokens and words: outside of any unit."""
    loss = as_it_comes(model, batch, number)
    if number >= SWITCH:
        assert isinstance(model, TinyText)
        scores = model.embed(batch["input_ids"]).flatten(0, 1) @ model.embed.weight.T
        loss = loss + (scores[:, :, None] * torch.linspace(0.1, 1, 8)).tanh().mean()
    return loss


def train(
    make: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any, int], torch.Tensor],
    before: Switch,
    budget: int | None = None,
) -> tuple[list[int], dict[str, torch.Tensor], list[StepRecord]]:
    """Peaks, weights and records.

    Args:
        make: Makes the model.
        batches: One for each step.
        loss_of: Also given the step's number.
        before: Called before each step.
        budget: None for a plain run.
    """
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(1)
    number, peaks, mimose = 0, list[int](), None
    if budget is not None:
        mimose = Mimose(model, budget=budget, optimizer=optimizer, loss_fn=lambda m, b: loss_of(m, b, number))
    for number, batch in enumerate(batches):
        before(model, number)
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                loss = loss_of(model, batch, number)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                del loss
        peaks.append(meter.peak_bytes)
    records = [] if mimose is None else list(mimose.records)
    if mimose is not None:
        mimose.close()
    return peaks, {name: value.clone() for name, value in model.state_dict().items()}, records


def inside(switch: Switch) -> Callable[[nn.Module, Any, int], torch.Tensor]:
    """A loss that switches modules itself, where nobody sees it beforehand."""

    def loss_of(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
        switch(model, number)
        return as_it_comes(model, batch, number)

    return loss_of


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("kind", CASES)
def test_the_budget_holds_whatever_mode_modules_are_in(kind: str, when: str) -> None:
    """Each mode is learnt by itself, and planned with again when it comes back."""
    make, batches, switch = CASES[kind]
    loss_of, before = (as_it_comes, switch) if when == "before" else (inside(switch), nothing)
    peaks, weights, _ = train(make, batches(), loss_of, before)
    resident = sum(each.nbytes for each in weights.values())
    budget = int(resident + 0.75 * (max(peaks) - resident))
    ours, same, records = train(make, batches(), loss_of, before, budget)
    assert max(ours) <= budget < max(peaks)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    planned = [record for record in records if not record.sheltered]
    assert any(record.actions for record in planned)
    # Nobody can tell when the next switch comes that happens inside of a step.
    surprising = (kind, when) == ("alternating", "inside")
    assert len(planned) >= (STEPS // 3 if surprising else STEPS - 2 * LEARNING), "either mode is learnt once"
    for record in planned:
        if record.measured_peak_bytes:
            assert record.predicted_peak_bytes == pytest.approx(record.measured_peak_bytes, rel=0.01)


def test_what_a_checkpoint_makes_itself_is_no_operation_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.13 makes a node for each region: a step in which fewer of them run again is no other kind."""
    checkpoint = recompute.checkpoint

    def with_a_node(region: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        held = torch.ones((), requires_grad=True).clone()
        return checkpoint(lambda *given: (held, region(*given))[1], *tensors, **options)

    monkeypatch.setattr(recompute, "checkpoint", with_a_node)
    plain, weights, _ = train(lambda: TinyText(layers=3), text(), as_it_comes, nothing)
    budget = int(0.7 * max(plain))
    ours, same, records = train(lambda: TinyText(layers=3), text(), as_it_comes, nothing, budget)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    assert max(ours) <= budget
    planned = [record for record in records if not record.sheltered]
    assert any("recompute" in record.actions.values() for record in planned)
    assert len({len(record.actions) for record in planned}) > 1
    assert not any(record.sheltered for record in records[LEARNING:])


def test_a_loss_that_becomes_another_breaks_the_budget_once_at_most() -> None:
    """That step's plan knows nothing of it; then all is learnt anew, not when a step happens to be measured."""
    make = partial(TinyText, layers=3)
    peaks, weights, _ = train(make, text(), and_another, nothing)
    budget = int(0.85 * max(peaks))
    ours, same, records = train(make, text(), and_another, nothing, budget)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    assert {number for number, peak in enumerate(ours) if peak > budget} <= {SWITCH}
    assert max(peaks[:SWITCH]) < budget
    assert not records[SWITCH].sheltered
    assert records[SWITCH + 1].sheltered
    assert any(record.actions and not record.sheltered for record in records[SWITCH + 2 :])


EVERY = 6


def now_and_then(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
    """In every sixth step beside another loss, of all pairs of tokens and words: outside of any unit."""
    return and_another(model, batch, SWITCH if number % EVERY == 3 else 0)


def twice(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
    """In every sixth step the model runs once more, and both have to be alike."""
    if number % EVERY != 3:
        return as_it_comes(model, batch, number)
    one, other = model(**batch), model(**batch)
    loss: torch.Tensor = one.loss + (one.loss - other.loss).square()
    return loss


def of_seven_lengths() -> list[Any]:
    """One more than there are steps to a period: all come with either loss, the extremes of them soon."""
    return [text_batch(4, (80, 48, 64, 76, 72, 56, 68)[number % 7], number) for number in range(12 * EVERY)]


@pytest.mark.conformance("How people train", "a loss that is added in every so many-th step", "works")
@pytest.mark.filterwarnings("ignore:.*a plan for steps without all of its operations:UserWarning")
@pytest.mark.parametrize("loss_of", [now_and_then, twice])
def test_a_loss_that_is_added_in_every_so_many_th_step_is_foreseen(
    loss_of: Callable[[nn.Module, Any, int], torch.Tensor],
) -> None:
    """After its second time; what such steps take is learnt apart, and the others go on as they were planned."""
    make = partial(TinyText, layers=3)
    peaks, weights, _ = train(make, of_seven_lengths(), loss_of, nothing)
    resident = sum(each.nbytes for each in weights.values())
    usual = max(peak for number, peak in enumerate(peaks) if number % EVERY != 3)
    budget = int(resident + 0.75 * (usual - resident))
    ours, same, records = train(make, of_seven_lengths(), loss_of, nothing, budget)
    assert all(torch.equal(same[name], value) for name, value in weights.items())
    assert {number for number, peak in enumerate(ours) if peak > budget} <= {3, 3 + EVERY}
    rare = [record for record in records if record.step % EVERY == 3]
    others = [record for record in records if record.step % EVERY != 3]
    assert any(record.actions and not record.sheltered for record in rare[-4:])
    # What had run twice is no part of what the others do: they are learnt anew, once.
    assert sum(record.sheltered for record in others) <= (LEARNING if loss_of is now_and_then else 2 * LEARNING)
    for record in records:
        if record.predicted_peak_bytes and record.step > 3 + EVERY:
            assert record.predicted_peak_bytes == pytest.approx(ours[record.step], rel=0.01)
