"""What optimizers have: a part of what is trained, or more from some step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseCallback, SharedBudget
from lightning_mimose.budget import format_bytes
from tests.helpers.fits import run, same
from tests.helpers.models import Batch, Block, Task
from tests.helpers.pairs import few

WAYS = "How people train"
WHEN, STEPS = 6, 14


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), 1e-3)


class HeadAlone(Task):
    """A backbone that was to be frozen: it has gradients, and no optimizer zeroes them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of the head alone."""
        return adam(self.model.head.parameters())


class Thawing(Task):
    """Two layers are unfrozen in mid-epoch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.late = [parameter for layer in self.model.layers[:2] for parameter in layer.parameters()]
        for parameter in self.late:
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what is trained at the start."""
        return adam(parameter for parameter in self.parameters() if parameter.requires_grad)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        if batch_idx == WHEN:
            for parameter in self.late:
                parameter.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": self.late})


class Growing(Task):
    """One layer more in mid-epoch."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        if batch_idx == WHEN:
            self.model.layers.append(Block(32))
            self.trainer.optimizers[0].add_param_group({"params": list(self.model.layers[-1].parameters())})


class JoiningLate(Task):
    """A wide head is trained from the start, and updated later."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.wide = nn.Linear(32, 6000)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """With a second loss."""
        first = self.model.embed(batch["input_ids"][:, :1])
        return super().training_step(batch, batch_idx) + self.wide(first).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of all else."""
        return adam(self.model.parameters())

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        if batch_idx == WHEN:
            self.trainer.optimizers[0].add_param_group({"params": list(self.wide.parameters())})


class Freezing(Task):
    """Two layers are frozen in mid-epoch."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        if batch_idx == WHEN:
            self.model.layers[:2].requires_grad_(False)


class InTurns(Task):
    """Two layers are frozen in every other round of four batches, or in every other batch."""

    every = 4

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        self.model.layers[:2].requires_grad_(batch_idx // self.every % 2 == 0)


class ByTurns(InTurns):
    """In every other batch."""

    every = 1


class InEpochs(Task):
    """Two layers are frozen in every other epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch."""
        self.model.layers[:2].requires_grad_(self.current_epoch % 2 == 0)


class InItself(Task):
    """Two layers are unfrozen inside a step."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss."""
        self.model.layers[:2].requires_grad_(batch_idx >= WHEN)
        return super().training_step(batch, batch_idx)


def planned(callback: MimoseCallback, peaks: Sequence[int]) -> int:
    """Checks what was predicted; returns how many steps were planned."""
    found = 0
    for record, peak in zip(callback.records, peaks, strict=True):
        if not record.sheltered:
            found += 1
            assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    return found


@pytest.mark.parametrize(
    ("task", "share"),
    [
        pytest.param(task, share, id=task.__name__, marks=pytest.mark.conformance(WAYS, what, "works"))
        for task, share, what in [
            (HeadAlone, 0.55, "an optimizer of the head alone, with a backbone that is not frozen"),
            (Thawing, 0.4, "layers unfrozen and given to the optimizer in mid-epoch"),
            (Growing, 0.6, "a layer more in mid-epoch (progressive growing)"),
            (JoiningLate, 0.75, "parameters that an optimizer gets when they were trained for a while"),
            (Freezing, 0.5, "layers frozen in mid-epoch, by a hook after the callback's"),
        ]
    ],
)
def test_no_step_is_over_and_most_are_planned(task: type[Task], share: float) -> None:
    data = few(count=STEPS)
    plain = run(task=task, data=data)
    callback = MimoseCallback(budget := plain.budget(share))
    fit = run(callback, task=task, data=data)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget < max(plain.peaks)
    assert planned(callback, fit.peaks) >= STEPS - 7


@pytest.mark.parametrize(
    ("task", "share", "learns"),
    [
        pytest.param(task, 0.5, learns, id=task.__name__, marks=pytest.mark.conformance(WAYS, what, "works"))
        for task, learns, what in [
            (InTurns, 10, "layers frozen and unfrozen in turns, some batches each"),
            (ByTurns, 10, "layers frozen and unfrozen in turns, one batch each"),
            (InItself, 11, "layers unfrozen by the step itself"),
        ]
    ],
)
def test_what_is_trained_in_turns_is_learnt_once(task: type[Task], share: float, learns: int) -> None:
    """Each time that it comes again what was learnt of it holds."""
    data = few(count=2 * STEPS)
    plain = run(task=task, data=data)
    callback = MimoseCallback(budget := plain.budget(share))
    fit = run(callback, task=task, data=data)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget < max(plain.peaks)
    assert planned(callback, fit.peaks) >= 2 * STEPS - learns


class Alternating(Task):
    """Two halves of a model, of which every step trains one, as networks are that play against each other."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """What is trained is put back at the end, as `untoggle_optimizer` does."""
        half = self.model.layers[:2] if batch_idx % 2 else self.model.layers[2:]
        half.requires_grad_(False)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After backward."""
        self.model.layers.requires_grad_(True)


@pytest.mark.parametrize("door", ["callback", "size_fn", "shared"])
@pytest.mark.parametrize("task", [InItself, Alternating])
def test_a_step_that_turns_is_decided_about_once_more(task: type[Task], door: str) -> None:
    """Once, although its units' parts are called after them, and wherever its size is read."""
    data = few(count=2 * STEPS)
    plain = run(task=task, data=data)
    budget = plain.budget(0.5)
    callback = {
        "callback": lambda: MimoseCallback(budget),
        "size_fn": lambda: MimoseCallback(budget, size_fn=lambda batch: batch["input_ids"].shape[1]),
        "shared": lambda: MimoseCallback(SharedBudget(budget, device="cpu")),
    }[door]()
    fit = run(callback, task=task, data=data)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget < max(plain.peaks)
    assert not callback.report().guarded
    assert sum(not record.sheltered for record in callback.records) >= STEPS


def test_what_is_trained_in_every_other_epoch_is_learnt_once() -> None:
    data = few(count=8)
    plain = run(task=InEpochs, data=data, max_epochs=6)
    callback = MimoseCallback(budget := plain.budget(0.5))
    fit = run(callback, task=InEpochs, data=data, max_epochs=6)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget < max(plain.peaks)
    planned(callback, fit.peaks)
    sheltered = sum(record.sheltered for record in list(callback.records)[2 * len(data) :])
    assert sheltered <= 4  # one where an epoch begins, if its fit takes longer than a step may wait


def test_gradients_that_nobody_zeroes_are_told_of() -> None:
    callback = MimoseCallback("1GB")
    fit = run(callback, task=HeadAlone, data=few(), metered=False)
    told = " ".join(str(callback.report()).split())
    staying = [
        each.grad for name, each in fit.task.model.named_parameters() if "head" not in name and each.grad is not None
    ]
    assert f"{len(staying)} parameters are trained that no optimizer has" in told
    assert f"stay ({format_bytes(sum(each.nbytes for each in staying))} so far)" in told


def test_a_plain_loop_whose_optimizer_gets_more() -> None:
    """State of what was added is reserved before the first update makes it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 4096)])
    optimizer = torch.optim.Adam(model[0].parameters())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[0](batch)  # type: ignore[index]
        value: torch.Tensor = model[1](hidden.relu()).square().mean()  # type: ignore[index]
        return value

    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=loss, units=["0"]) as mimose:
        engine = mimose._engine
        assert engine is not None
        for rows in (8, 16, 24):
            mimose.step(torch.randn(rows, 64))
        before = engine.ledger.lasting_bytes()
        optimizer.add_param_group({"params": list(model[1].parameters())})
        mimose.step(torch.randn(8, 64))
        state = sum(each.nbytes for parameter in model[1].parameters() for each in optimizer.state[parameter].values())
        assert engine.ledger.lasting_bytes() == before + state
        assert engine.ledger.watches([optimizer])


class Experts(HeadAlone):
    """Wide heads that no optimizer has take turns: each gets its gradient later than the one before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.wide = nn.ModuleList(nn.Linear(32, 400) for _ in range(STEPS))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """With a second loss."""
        first = self.model.embed(batch["input_ids"][:, :1])
        return super().training_step(batch, batch_idx) + self.wide[batch_idx](first).square().mean()


class FreezingInTurns(Task):
    """What a hook after the callback's freezes in every step, another one unfreezes."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """After the callback's."""
        self.model.layers[:2].requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Before the next one's."""
        self.model.layers[:2].requires_grad_(True)


@pytest.mark.parametrize("task", [Experts, FreezingInTurns])
def test_what_changes_in_every_step_is_not_learnt_anew_for_ever(task: type[Task]) -> None:
    callback = MimoseCallback("1GB")
    run(callback, task=task, data=few(count=STEPS), metered=False)
    assert sum(record.sheltered for record in callback.records) <= STEPS // 2


def test_a_second_fit_beside_gradients_that_stay() -> None:
    """What the first one has learnt was learnt beside them; they come anew in the first step of the second."""
    data = few(count=STEPS)
    plain = [run(task=JoiningLate, data=data[:WHEN]) for _ in range(2)]
    callback = MimoseCallback(budget := plain[0].budget(0.6))
    for _ in range(2):
        fit = run(callback, task=JoiningLate, data=data[:WHEN])
        assert same(plain[0].weights(), fit.weights())
        assert max(fit.peaks) <= budget
