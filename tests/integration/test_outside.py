"""Blocks that go by something outside of them, or write to it: weights are those of the plain run, always."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import register_parametrization

from lightning_mimose import MimoseCallback
from tests.helpers import blocks
from tests.helpers.fits import run, same
from tests.helpers.models import Batch, Block, Task
from tests.helpers.pairs import few, pair

GUARDED, PUT_BACK = "Recomputation that would differ", "How people train"
SCALE: list[Any] = [1.0]
CONTEXT: ContextVar[float] = ContextVar("scale", default=1.0)
NOISE = np.random.default_rng(0)
LOSSES: list[torch.Tensor] = []


class Bent(Block):
    """A block that does something more to its result."""

    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.bend(super().forward(x, mask))

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        """Something that is saved."""
        raise NotImplementedError


class Bending(Task):
    """Has such blocks."""

    kind: ClassVar[type[nn.Module]] = Bent

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.layers = nn.ModuleList(self.kind() for _ in range(4))


class ByGlobal(Bent):
    """Goes by a global."""

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * SCALE[0]) + x


class ByContext(Bent):
    """Goes by a context variable."""

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * CONTEXT.get()) + x


class Within(Bending):
    """Sets what its blocks go by for the time of its forward."""

    kind = ByGlobal
    after: ClassVar[Any] = 1.0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        with self.scaled(0.5 + 0.1 * batch_idx):
            return super().training_step(batch, batch_idx)

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Around the forward."""
        SCALE[0] = scale
        yield
        SCALE[0] = self.after


class WithinHolding(Within):
    """Holds what its blocks are given until backward is over, as who uses hidden states does."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        with self.scaled(0.5):
            hidden = [self.model.embed(batch["input_ids"])]
            for layer in self.model.layers:
                hidden.append(layer(hidden[-1]))
            self.__dict__["held"] = hidden
            return nn.functional.cross_entropy(self.model.head(sum(hidden).mean(1)), batch["labels"])

    def on_train_batch_end(self, *_: Any) -> None:
        """Lets go."""
        self.__dict__.pop("held", None)


class WithinOnly(Within):
    """Nothing is there by the time of backward: a recomputation fails."""

    after = None


class WithinContext(Within):
    """The same by a context variable."""

    kind = ByContext

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        token = CONTEXT.set(scale)
        yield
        CONTEXT.reset(token)


class Drawing(Bent):
    """Draws from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 0.9, 1.1])

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * next(self.scales)) + x


class FromIterators(Bending):
    """Has such blocks."""

    kind = Drawing


class Normalised(Bent):
    """Gives a weight other memory in every forward."""

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.out.weight.data = nn.functional.normalize(self.out.weight.data)
        return nn.functional.gelu(self.out(x)) + x


class Normalising(Bending):
    """Has such blocks."""

    kind = Normalised


@pytest.mark.parametrize(
    ("task", "told"),
    [
        pytest.param(task, told, id=task.__name__, marks=pytest.mark.conformance(GUARDED, what, "guarded"))
        for task, told, what in (
            (WithinContext, "something outside", "a block that goes by a context variable"),
            (FromIterators, "the iterator Drawing.scales", "a block that draws from an iterator"),
            (Normalising, "writes parameters", "a block that gives a parameter other memory (`weight.data = ...`)"),
        )
    ],
)
def test_they_are_left_alone(task: type[Task], told: str, caplog: pytest.LogCaptureFixture) -> None:
    """And named, with what they go by."""
    caplog.set_level("INFO")
    plain = run(task=task, data=few())
    callback = MimoseCallback(plain.budget(1.5))
    assert same(run(callback, task=task, data=few()).weights(), plain.weights())
    lines = [line for line in caplog.messages if "never recomputed" in line]
    assert any(told in line for line in lines)
    assert not any(name.endswith("layers.3") for record in callback.records for name in record.actions)


@pytest.mark.conformance(PUT_BACK, "a global that blocks go by, set around the forward alone", "works")
@pytest.mark.parametrize("task", [Within, WithinHolding, WithinOnly])
def test_a_global_is_lent(task: type[Within]) -> None:
    """It has another value by the time of backward, and has that again afterwards."""
    both = pair(0.7, task=task, data=few(count=8), actions=["recompute"])
    assert any(record.recomputed_units for record in both.callback.records if not record.sheltered)
    assert SCALE[0] == task.after


class Noisy(Bent):
    """Draws from a generator that is global, counts on its class, and leaves a loss in a list that is global."""

    calls: ClassVar[int] = 0

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        LOSSES.append(x.square().mean())
        noise = torch.from_numpy(NOISE.standard_normal(x.shape[-1]).astype("float32"))
        return nn.functional.gelu(x + noise * (self.calls % 3)) + x


class Outward(Bending):
    """Has such blocks, and uses the losses up."""

    kind = Noisy

    def on_fit_start(self) -> None:
        """Begins anew."""
        LOSSES.clear()
        NOISE.bit_generator.state = np.random.default_rng(0).bit_generator.state
        Noisy.calls = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        loss = super().training_step(batch, batch_idx) + torch.stack(LOSSES).sum()
        LOSSES.clear()
        return loss

    def on_train_end(self) -> None:
        """As often as there was a block, and a batch."""
        assert Noisy.calls == 4 * 6


@pytest.mark.conformance(PUT_BACK, "blocks that draw, count or collect outside of modules, by names of theirs", "works")
def test_what_they_write_is_put_back() -> None:
    """They are recomputed like any other."""
    pair(0.7, task=Outward)
    assert not LOSSES


class Attending(nn.Module):
    """A block that lets torch choose how it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + nn.functional.gelu(self.out(mixed.transpose(1, 2).flatten(2))) * torch.ones(()).to(x)


class Switched(Bending):
    """Sets how its blocks compute, around the forward."""

    kind = Attending
    switch: ClassVar[Any] = None

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        with type(self).switch():
            return super().training_step(batch, batch_idx)


@contextmanager
def in_doubles() -> Iterator[None]:
    """Other tensors that are made in between."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Products by another library."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


SWITCHES: dict[str, Any] = {
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "torch.backends.mkldnn.enabled": without_onednn,
    "torch.set_default_dtype": in_doubles,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.conformance(PUT_BACK, f"{name} around the forward alone", "works"))
        for name in SWITCHES
    ],
)
def test_switches_are_lent(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They are off again by the time of backward, and other kernels would save other tensors."""
    caplog.set_level("INFO")
    monkeypatch.setattr(Switched, "switch", staticmethod(SWITCHES[name]))
    for actions in (["recompute"], None):
        pair(0.6, task=Switched, data=few(count=8), actions=actions)
    assert not any("never recomputed" in line for line in caplog.messages)


class Kept:
    """A namespace."""

    calls = 0


class Counting(blocks.Base):
    """Goes by how often it was called."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * (1 + 0.1 * (self.count(x) % 5))

    def count(self, x: torch.Tensor) -> int:
        """Once more."""
        type(self).calls += 1
        return self.calls


class Inherited(Counting):
    """Has no count of its own until it is called."""


class Unannounced(Counting):
    """Its class has no such attribute before."""

    def count(self, x: torch.Tensor) -> int:
        kind = type(self)
        kind.seen = getattr(kind, "seen", 0) + 1  # type: ignore[attr-defined]
        return int(kind.seen)  # type: ignore[attr-defined]


class InNamespace(Counting):
    """Counts elsewhere."""

    def count(self, x: torch.Tensor) -> int:
        Kept.calls += 1
        return Kept.calls


class InTally(Counting):
    """Counts in a container of another kind."""

    def count(self, x: torch.Tensor) -> int:
        TALLY[type(self).__name__] += 1
        return TALLY[type(self).__name__]


class Late(Counting):
    """Begins to count only with larger batches, and makes what it counts in."""

    def count(self, x: torch.Tensor) -> int:
        global latest
        if len(x) > 60:
            latest = [len(x), *latest][:3] if latest else [len(x)]
        return len(latest or ())


def made() -> type[Counting]:
    """A class, of which there is another one with the same name."""

    class Made(Counting):
        calls = 0

    return Made


TALLY: Counter[str] = Counter()
latest: list[int] | None = None


def counts() -> tuple[Any, ...]:
    """All that they write."""
    own = [vars(kind).get("calls") for kind in (Counting, Inherited, Unannounced, InNamespace, *MADE)]
    return own, vars(Unannounced).get("seen"), Kept.calls, dict(TALLY), latest


def begin() -> None:
    """As when nothing was called."""
    global latest
    latest = None
    TALLY.clear()
    for kind in (Inherited, InNamespace):
        if "calls" in vars(kind):
            del kind.calls
    if "seen" in vars(Unannounced):
        del Unannounced.seen  # type: ignore[attr-defined]
    for kind in (Counting, Kept, *MADE):
        kind.calls = 0


MADE = made(), made()


@pytest.mark.parametrize("parametrized", [False, True])
@pytest.mark.parametrize("kind", [Counting, Inherited, Unannounced, InNamespace, InTally, Late, *MADE])
def test_counts_are_those_of_the_plain_run(kind: type[Counting], parametrized: bool) -> None:
    """Wherever they are; also of blocks to which torch gives another class."""

    def make() -> nn.Module:
        net = blocks.Net(kind)
        for block in net.blocks if parametrized else ():
            register_parametrization(block, "scale", nn.Identity())
        return net

    found, batches = [], sorted(blocks.data(), key=len)
    for names in (None, ["blocks.0", "blocks.1", "blocks.2"]):
        begin()
        model, losses, mimose = blocks.train(make, batches, names)
        found.append((losses, blocks.everything(model), counts()))
    assert found[0] == found[1]
    assert mimose is not None
    assert any(record.recomputed_units == 3 and not record.sheltered for record in mimose.records)


class Differentiating(blocks.Base):
    """Runs a backward pass in its forward, as force fields do."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        given = x if x.requires_grad else x.detach().requires_grad_()
        found: torch.Tensor = torch.autograd.grad(self.up(given).square().sum(), given, create_graph=True)[0]
        return x + 0.01 * found


@pytest.mark.conformance(GUARDED, "torch.autograd.grad in a block's forward", "guarded")
def test_a_backward_pass_in_a_forward_is_left_alone() -> None:
    """It cannot be tried beside the step."""
    plain, losses, _ = blocks.train(lambda: blocks.Net(Differentiating), blocks.data())
    names = ["blocks.0", "blocks.1", "blocks.2"]
    model, ours, mimose = blocks.train(lambda: blocks.Net(Differentiating), blocks.data(), names)
    assert mimose is not None
    assert ours == losses
    assert blocks.everything(model) == blocks.everything(plain)
    assert not any(record.recomputed_units for record in mimose.records)


def collecting() -> nn.Module:
    """What hooks of layers inside blocks note in forward, hooks in backward take away (Opacus, K-FAC)."""

    def take(layer: nn.Module, *_: Any) -> None:
        layer.noted.pop()  # type: ignore[operator,union-attr]

    net = blocks.Net(blocks.Base)
    for layer in net.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.noted = []  # type: ignore[assignment]
            layer.register_forward_hook(lambda module, given, _: module.noted.append(given[0].detach()))
            layer.register_full_backward_hook(take)
    return net


@pytest.mark.conformance("Other people's hooks", "hooks that note activations in a layer, and take them away", "works")
def test_nothing_that_hooks_note_is_left() -> None:
    """A recomputation notes it once more, and that goes again."""
    plain, losses, _ = blocks.train(collecting, blocks.data())
    names = ["blocks.0", "blocks.1", "blocks.2"]
    model, ours, mimose = blocks.train(collecting, blocks.data(), names)
    assert mimose is not None
    assert any(record.recomputed_units == 3 and not record.sheltered for record in mimose.records)
    assert ours == losses
    assert blocks.everything(model) == blocks.everything(plain)
    assert not any(layer.noted for layer in model.blocks.modules() if isinstance(layer, nn.Linear))  # type: ignore[union-attr,operator]
