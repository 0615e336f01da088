"""Steps that go back twice every now and then: second-order optimizers, conflicting gradients, lazy penalties."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_mimose import MimoseCallback
from tests.helpers.faults import InBackward
from tests.helpers.fits import Fit, run, same
from tests.helpers.models import Batch, Task, TinyText, text_batch

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("A step ran backward twice", "A batch of .* above the budget", "Using backward.. with create_graph")
]
FIRST = 5
"""Steps before the first of them may come: by then all of the others is learnt."""


class Now(Task):
    """Does so in every so many-th step."""

    every = 5

    def __init__(self, _: Any = None) -> None:
        super().__init__(TinyText(5, 48))
        self.steps = 0

    @property
    def due(self) -> bool:
        return self.steps % self.every == 0

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Counts."""
        self.steps += 1


class Retained(Now):
    """Takes the gradients of one graph twice."""

    every = 3

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        """Keeps it for the second time."""
        loss.backward(retain_graph=self.due)
        if self.due:
            (0.5 * loss).backward()


class Curved(Now):
    """Looks at the curvature, as Sophia does."""

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        """Makes a graph of the gradients."""
        loss.backward(create_graph=self.due)

    def on_after_backward(self) -> None:
        """And goes back over it."""
        weights = [weight for weight in self.parameters() if weight.grad is not None]
        slopes = [weight.grad for weight in weights if weight.grad is not None]
        if self.due:
            curvatures = torch.autograd.grad(slopes, weights, [torch.ones_like(slope) for slope in slopes])
            for weight, slope, curvature in zip(weights, slopes, curvatures, strict=True):
                weight.grad = slope.detach() / (1 + curvature.abs())


class Flattened(Now):
    """Adds the square of its weights' gradients to its loss, within the forward."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """No input tells: none of them wants a gradient."""
        loss = super().training_step(batch, batch_idx)
        if not self.due:
            return loss
        slopes = torch.autograd.grad(loss, list(self.model.layers.parameters()), create_graph=True)
        return loss + 0.01 * torch.stack([slope.square().sum() for slope in slopes]).sum()


class Lazy(Now):
    """A penalty with a pass and an update of its own, as StyleGAN's critics have."""

    automatic_optimization = False

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Of embeddings."""
        for layer in self.model.layers:
            x = layer(x)
        return x.mean((1, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """The usual pass, and now and then the other one."""
        optimizer: Any = self.optimizers()
        x = self.model.embed(batch["input_ids"]).detach()
        optimizer.zero_grad()
        self.manual_backward(self.score(x).square().mean())
        optimizer.step()
        if self.due:
            x.requires_grad_()
            optimizer.zero_grad()
            (slope,) = torch.autograd.grad(self.score(x).sum(), x, create_graph=True)
            self.manual_backward(10 * slope.square().sum())
            optimizer.step()


class Projected(Now):
    """Takes the gradients of two parts of its loss apart, as PCGrad does, and never those of the sum."""

    every = 3

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Keeps the parts."""
        first = super().training_step(batch, batch_idx)
        self.parts = first, first.square()
        return self.parts[0] + self.parts[1]

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        """One after the other, over one graph."""
        first, second = self.parts
        if self.due:
            first.backward(retain_graph=True)
            second.backward()
        else:
            loss.backward()
        self.parts = first.detach(), second.detach()


def data(count: int) -> list[Batch]:
    """Texts of many lengths."""
    chance = random.Random(3)
    return [text_batch(4, chance.choice(range(12, 72, 4)), i) for i in range(count)]


def trained(task: type[Now], share: float, count: int = 60) -> tuple[Fit, Fit, MimoseCallback, int]:
    """Without and with a share of its activation memory: both, the callback, and the budget."""
    plain = run(task=task, data=data(count))
    callback = MimoseCallback(budget := plain.budget(share))
    with torch.random.fork_rng():
        fit = run(callback, task=task, data=data(count))
    return plain, fit, callback, budget


@pytest.mark.parametrize(
    ("task", "share"),
    [(Retained, 0.5), (Retained, 0.7), (Projected, 0.6), (Curved, 1.0), (Flattened, 1.0), (Lazy, 0.98)],
)
def test_steps_that_go_back_twice_are_foreseen(task: type[Now], share: float) -> None:
    """But for the first two of them; and no other step waits for that."""
    plain, fit, callback, budget = trained(task, share)
    assert same(plain.weights(), fit.weights())
    due = [step for step in range(len(fit.peaks)) if step % task.every == task.every - 1]
    learnt = [step for step in due if step >= FIRST][:2]
    over = {step for step, peak in enumerate(fit.peaks) if peak > budget}
    assert over <= set(learnt)
    assert all(callback.records[step].sheltered for step in due if step > max(learnt))
    others = [record.sheltered for step, record in enumerate(callback.records) if step not in due]
    assert sum(others) <= 12
    assert not any(others[len(others) // 2 :])


def test_steps_that_always_go_back_twice_are_all_alike() -> None:
    """Nothing is foreseen then, and nobody is told of kinds."""

    class Always(Retained):
        every = 1

    plain, fit, callback, budget = trained(Always, 0.7, count=20)
    assert same(plain.weights(), fit.weights())
    assert max(fit.peaks) <= budget
    assert all(record.sheltered for record in callback.records)


@pytest.mark.filterwarnings("ignore:.*out of memory")
def test_steps_that_run_out_of_memory_tell_their_kind() -> None:
    """Else a kind that always does, planned as another, would never be foreseen."""
    callback = MimoseCallback("1GB")
    failed: list[int] = []

    class Added(Now):
        def fail(self) -> None:
            """Be out of memory where the step is planned as the others are."""
            running = callback._run.engine.running.step if callback._run is not None else None
            if not (running is None or running.sheltered or running.retried or running.kind):
                failed.append(self.steps)
                raise torch.OutOfMemoryError("CUDA out of memory.")

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            """Another loss in every fifth step."""
            loss = super().training_step(batch, batch_idx)
            if not self.due:
                return loss
            added = loss + 0.01 * torch.stack([weight.square().sum() for weight in self.parameters()]).sum()
            out: torch.Tensor = InBackward.apply(added, self.fail)
            return out

    run(callback, task=Added, data=data(40))
    assert 1 <= len(failed) <= 2
    assert max(failed) <= 15
