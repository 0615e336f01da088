"""Blocks that write state, use their own randomness, or cannot be run twice; and a net and a loop to put them in."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from lightning_mimose import Mimose

WIDTH = 64


class Base(nn.Module):
    """An MLP with a residual connection; `before` and `after` are for what a block does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.down(torch.tanh(self.up(self.before(x)))))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x


class BatchNormed(Base):
    """Running statistics, written without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class SpectralNormed(Base):
    """Power iteration in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = spectral_norm(self.up)


class OldSpectralNormed(Base):
    """The same by a forward pre-hook, which also writes a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)


class Codebook(Base):
    """Vector quantisation: a codebook that moves with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("counts", torch.ones(8))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 8).float()
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.data.lerp_(chosen.T @ x.detach() / self.counts[:, None], 0.1)
        return x + (self.codes[nearest] - x).detach() * 0.1


class Average(Base):
    """An exponential moving average that is another object after every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Counting(Base):
    """Python state: a count that changes what is computed, a list, a dictionary, a deque, one made on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.seen, self.recent = 0, [], {}, deque(maxlen=3)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.seen[self.calls % 5] = len(x)
        self.recent.append(self.calls)
        self.late = getattr(self, "late", 0) + 1
        return x * (1 + 0.01 * self.calls + 0.001 * self.late)


class Experts(Base):
    """Counts how many samples every expert gets, to balance them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.register_buffer("load", torch.zeros(4))
        self.bias = torch.zeros(4)  # a plain attribute

    def before(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias).argmax(-1)
        counts = torch.bincount(chosen, minlength=4).float()
        self.load += counts
        self.bias -= 0.01 * (counts - counts.mean()).sign()
        return x * scores.gather(1, chosen[:, None])


class WarmingUp(Base):
    """Writes nothing but a count in its first nine forwards; then a buffer, `.data`, a list, a late attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, []
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("replaced", torch.ones(WIDTH))
        self.started = False

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 9:
            self.started = True
            self.log.append(self.calls)
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.scale.data.mul_(1.01)
            self.replaced = self.replaced * 1.02
            self.since = getattr(self, "since", 0) + 1
            x = x * (1 + 0.01 * self.since)
        return (x - self.mean) * self.scale * self.replaced


class Metered(Base):
    """A metric inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.all = torchmetrics.CatMetric()

    def after(self, x: torch.Tensor) -> torch.Tensor:
        self.metric(x.detach().abs())
        self.all.update(x.detach().mean(1))
        return x


class PythonRandom(Base):
    """Stochastic depth by the generator of `random`."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.uniform(0.5, 1.5)


class NumpyRandom(Base):
    """Noise by NumPy's global generator."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.random.rand(WIDTH).astype("float32"))


class OwnRandom(Base):
    """Generators of its own: torch's, NumPy's, Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.python = random.Random(3)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(WIDTH, generator=self.torch) * float(self.numpy.random()) * self.python.random()
        return x * (1 + noise)


class Dropping(Base):
    """Dropout."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.3)


# --- blocks that cannot be run twice ---------------------------------------------------------------------------------


class RandomLeaky(Base):
    """RReLU saves noise that it fills in only where it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.RReLU()

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


class Outside:
    """State that no module has."""

    def __init__(self) -> None:
        self.calls = 0


class OtherPath(Base):
    """Takes another path by state that nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = Outside()

    def after(self, x: torch.Tensor) -> torch.Tensor:
        self.outside.calls += 1
        return x.exp().log() if self.outside.calls % 2 else x.sigmoid()


class OtherValues(OtherPath):
    """The same number of saved tensors of the same shapes, with other values: no error would be raised."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        self.outside.calls += 1
        return (x * self.outside.calls).tanh()


class InPlace(Base):
    """Changes what it was given."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.9)


class WritesParameter(Base):
    """A moving average that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class LateBuffer(Base):
    """Registers its buffer in its first forward, and has a sparse one and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(WIDTH).to_sparse())
        self.register_buffer("expanded", torch.arange(3).expand(2, 3))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(WIDTH))
        self.late.lerp_(x.detach().mean(0), 0.1)
        return torch.sparse.mm(self.sparse, (x - self.late).T).T


class ChangedLater(Base):
    """Its input, which it does not save, is changed by the net after it has returned."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5


class Net(nn.Module):
    """Blocks of one kind between an embedding and a head; `depth` of them."""

    def __init__(self, block: type[Base], depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x = self.embed(x)
        for block in self.blocks:
            y = block(x)
            if isinstance(block, ChangedLater):
                x.mul_(0.5)
            x = y
        return SimpleNamespace(loss=self.head(x).pow(2).mean())


def data(count: int = 12, seed: int = 0) -> list[torch.Tensor]:
    """Batches of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = random.Random(seed)
    return [torch.randn(sizes.choice(range(24, 96, 4)), 4, generator=generator) for _ in range(count)]


def seeded(seed: int = 5) -> None:
    """Every generator of the process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(
    make: Callable[[], nn.Module],
    batches: Sequence[Any],
    forced: Sequence[str] | None = None,
    **options: Any,
) -> tuple[nn.Module, list[float], Mimose | None]:
    """Trains a seeded model, plainly or under a plan that recomputes the units named.

    Returns:
        The model, its losses, and the loop's `Mimose`, closed.
    """
    seeded()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seeded(9)
    if forced is None:
        losses = []
        for batch in batches:
            loss = model(batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, losses, None
    plan = dict.fromkeys(forced, "recompute")

    def planner(timeline: Any, budget: int) -> dict[str, str]:
        return {unit: action for unit, action in plan.items() if (unit, action) in timeline.option_index}

    with Mimose(model, budget="1GB", optimizer=optimizer, planner=planner, **options) as mimose:
        losses = [mimose.step(batch).item() for batch in batches]
    return model, losses, mimose


def generators() -> list[Any]:
    """What comes next out of every generator of the process."""
    state = np.random.get_state()[1]
    return [random.getstate(), state.tolist(), torch.get_rng_state().tolist()]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.to_dense().detach().numpy().tobytes()


def everything(model: nn.Module) -> dict[str, Any]:
    """All state of a model: parameters, buffers and plain attributes, comparable by ==."""
    found: dict[str, Any] = {name: _bits(tensor) for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                found[f"{name}.{key}"] = _bits(value)
            elif isinstance(value, (int, float, str, list, dict, deque)) and not key.startswith("_"):
                found[f"{name}.{key}"] = repr(value)
            elif isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
                found[f"{name}.{key}"] = repr(
                    value.get_state().tolist()
                    if isinstance(value, torch.Generator)
                    else value.getstate()
                    if isinstance(value, random.Random)
                    else value.bit_generator.state
                )
    return found
