"""Networks beside the one that is trained: teachers, and an average of its weights. They run without gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.helpers.fits import mimose, run, same
from tests.helpers.models import Batch, Task, TinyText, TinyVision, image_batch, text_batch

SIDES = [36, 16, 24, 32, 20, 28, 36, 24]
"""The largest first: nothing is known then."""


class Taught(Task):
    """A student, and three frozen teachers of its kind."""

    blocks, teachers, frozen = 6, 3, True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = TinyVision(self.blocks)
        self.others = nn.ModuleList(copy.deepcopy(self.model) for _ in range(self.teachers))
        self.others.requires_grad_(not self.frozen)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss, and how far it is from theirs."""
        with torch.no_grad():
            goal = torch.stack([other(**batch).loss for other in self.others]).mean()
        loss: torch.Tensor = self.model(**batch).loss
        return loss + (loss - goal).square()


class Averaged(Taught):
    """A network of few blocks, and a moving average of it that could be trained."""

    blocks, teachers, frozen = 2, 1, False

    def on_train_batch_end(self, *_: object) -> None:
        """Moves the average."""
        with torch.no_grad():
            for mean, weight in zip(self.others.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)


@pytest.mark.parametrize(("task", "share"), [(Taught, 0.6), (Averaged, 0.85)], ids=["teachers", "average"])
def test_the_budget_holds_from_the_first_batch(task: type[Task], share: float) -> None:
    """What is trained is recomputed block by block, as if it were alone."""
    data = [image_batch(2, side, side, i) for i, side in enumerate(SIDES)]
    plain = run(kind="vision", task=task, data=data)
    callback = mimose(plain.budget(share))
    fit = run(callback, kind="vision", task=task, data=data)
    assert max(fit.peaks) <= plain.budget(share) < plain.peaks[0]
    assert same(fit.weights(), plain.weights())
    assert any(not record.sheltered for record in callback.records)


class Probe(Task):
    """A frozen network, and one layer on top of it that is trained: no block has a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = TinyVision(3).requires_grad_(False)
        self.probe = nn.Linear(8, 2)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        assert isinstance(self.model, TinyVision)
        features = self.model.stages(self.model.stem(batch["pixel_values"])).mean((2, 3))
        return nn.functional.cross_entropy(self.probe(features), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For what is trained."""
        return torch.optim.AdamW(self.probe.parameters(), 1e-3)


def test_a_frozen_network_below_one_trained_layer_is_learnt() -> None:
    """What there is to keep is known after a few steps, as of any other model."""
    data = [image_batch(4, side, side, i) for i, side in enumerate(SIDES * 3)]
    plain = run(kind="vision", task=Probe, data=data)
    callback = mimose(int(1.01 * max(plain.peaks)))
    fit = run(callback, kind="vision", task=Probe, data=data)
    assert same(fit.weights(), plain.weights())
    assert not any(record.sheltered for record in callback.records[len(SIDES) :])
    for record, peak in zip(callback.records, fit.peaks, strict=True):
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


LENGTHS = [64, 68, 20, 48, 80, 76, 52, 88, 40, 32, 60, 28, 92, 24, 84, 56, 72, 36, 44, 88]


class TextProbe(Task):
    """The same of texts: attention's memory grows with a length's square, the rest with the length."""

    mode: type = torch.no_grad

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = TinyText(layers=3).requires_grad_(False)
        self.probe = nn.Linear(32, 2)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch; the network is called without gradients."""
        with self.mode():
            features = self.model.embed(batch["input_ids"])
            for layer in self.model.layers:
                features = layer(features)
        return nn.functional.cross_entropy(self.probe(features.mean(1).clone()), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For what is trained."""
        return torch.optim.AdamW(self.probe.parameters(), 1e-3)


class InferenceProbe(TextProbe):
    """In inference mode."""

    mode = torch.inference_mode


class TextHead(TextProbe):
    """The head has several layers, and is a unit."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.probe = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))


class GradientProbe(TextProbe):
    """With gradients, of which there are none."""

    mode = nullcontext


@pytest.mark.parametrize("task", [TextProbe, InferenceProbe, TextHead, GradientProbe])
def test_a_network_that_is_called_without_gradients_is_learnt(task: type[Task]) -> None:
    """Its blocks' parts are moments of their own, so that each is a polynomial of the length."""
    data = [text_batch(4, length, i) for i, length in enumerate(LENGTHS)]
    plain = run(task=task, data=data)
    callback = mimose(int(1.01 * max(plain.peaks)))
    fit = run(callback, task=task, data=data)
    assert same(fit.weights(), plain.weights())
    assert sum(record.sheltered for record in callback.records) <= 6
    for record, peak in zip(callback.records, fit.peaks, strict=True):
        assert record.sheltered or record.predicted_peak_bytes == pytest.approx(peak, rel=0.005)


class Routed(nn.Module):
    """A block that sends what it is given through some of four small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By chance, as good as."""
        chosen = int(x.sum().abs() * 1000) % 16
        out = x.clone()
        for i, expert in enumerate(self.experts):
            if chosen >> i & 1:
                out += expert(x)
        return out


class RoutedProbe(TextProbe):
    """The frozen network routes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.layers = nn.ModuleList(Routed() for _ in range(4)).requires_grad_(False)


def test_what_a_router_calls_without_gradients_makes_no_other_step() -> None:
    """Whichever and however many blocks were called, steps are taken for the same."""
    data = [text_batch(4, (64, 32, 80, 48, 72, 56)[i % 6], i) for i in range(36)]
    plain = run(task=RoutedProbe, data=data)
    callback = mimose(int(1.05 * max(plain.peaks)))
    fit = run(callback, task=RoutedProbe, data=data)
    assert same(fit.weights(), plain.weights())
    assert max(fit.peaks) <= callback.records[0].budget_bytes
    assert not any(record.sheltered for record in callback.records[-12:])
