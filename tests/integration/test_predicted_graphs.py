"""Peaks where blocks' graphs hold something for longer than it is used, or not even until backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.helpers.architectures import train
from tests.integration.test_predicted_peaks import WIDTH, Block, Net, batches, check, loss, planned_peaks

LAYERS = (), (0,), (2,), (0, 1, 2)
ACTIONS = "lean", "lean+expansions", "recompute", "recompute+lean"


class Checkpointing(Block):
    """Checkpoints a part of itself by hand: attention, of projections that it makes outside of it."""

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Block`."""

        def attend(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities = (queries @ keys.transpose(2, 3)).softmax(-1)
            return (probabilities @ values).transpose(1, 2).flatten(2), probabilities

        projected = functional.linear(x, torch.cat([each.weight for each in (self.queries, self.keys, self.values)]))
        heads = projected.unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out, probabilities = checkpoint(attend, *heads, use_reentrant=False, preserve_rng_state=False)
        return x + out, probabilities


class Reading(torch.autograd.Function):
    """Reads what it saved long before its backward is over."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        """Saves a copy."""
        squared = x.square()
        ctx.save_for_backward(squared)
        return squared.sum(-1, keepdim=True) + x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        """Takes much for a moment, once it needs what it saved no more."""
        (squared,) = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = squared.sqrt().mean()
        del squared
        wide = torch.cat([grads[0]] * 24, -1).sum(-1, keepdim=True)
        return grads[0] * scale + wide


class Custom(Block):
    """Has such a function in it."""

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Block`."""
        out, probabilities = super().attention(x)
        return Reading.apply(out), probabilities  # type: ignore[no-untyped-call]


class TwoStreams(nn.Module):
    """Two results, each with an MLP of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(wide * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for wide in (1, 2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        return x + self.one(x + y), y + self.other(torch.cat([x, y], -1))


class Judging(nn.Module):
    """Returns probabilities that it saves, and what a loss would make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.other = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three."""
        probabilities = self.other(x).sigmoid()
        return x + self.one(x), probabilities, probabilities.square().sum()


class Judged(Net):
    """Lets go of the probabilities at once, and collects the rest for nothing."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Net`."""
        x, found = sum(embedding(ids) for embedding in self.embeddings), []
        for layer in self.layers:
            x, probabilities, judged = layer(x)
            del probabilities
            found.append(judged)
        x = x + torch.cat([x] * 24, -1).exp().sum(-1, keepdim=True).detach() * 0
        del found, judged
        out: torch.Tensor = self.head(x).square().mean()
        return out


class ThreeStreams(nn.Module):
    """A small result and a large one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)
        self.one, self.large = (
            nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH)) for wide in (4, 16)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three."""
        return x + self.one(x), self.small(x * 2), self.large(x * 3)


class AtTwoMoments(Net):
    """Lets go of the small one first, and of the large one after something that takes much."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Net`."""
        x = sum(embedding(ids) for embedding in self.embeddings)
        for layer in self.layers:
            x, small, large = layer(x)
        del small
        x = x + torch.cat([x] * 24, -1).exp().sum(-1, keepdim=True).detach() * 0
        del large
        out: torch.Tensor = self.head(x).square().mean()
        return out


class Dropping(Net):
    """Wants nothing of the second result of the last block, which goes before something that takes much."""

    late = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Net`."""
        x = sum(embedding(ids) for embedding in self.embeddings)
        y: torch.Tensor | None = x.flip(-1)
        for layer in self.layers:
            x, y = layer(x, y)
        y = y if self.late else None
        x = x + 0 * torch.cat([x] * 24, -1).exp().sum(-1, keepdim=True)
        y = None
        out: torch.Tensor = self.head(x).square().mean()
        return out


class DroppingLate(Dropping):
    """Which goes after that."""

    late = True


class Collecting(Net):
    """Collects a result of every block for nothing, in a list that goes before the head's work."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Net`."""
        x = sum(embedding(ids) for embedding in self.embeddings)
        y, found = x.flip(-1), list[torch.Tensor]()
        for layer in self.layers:
            x, other = layer(x, y)
            found.append(other)
        x = x + torch.cat([x] * 8, -1).exp().sum(-1, keepdim=True).detach() * 0
        del found, other
        x = x + torch.cat([x] * 24, -1).exp().sum(-1, keepdim=True).detach() * 0
        out: torch.Tensor = self.head(x).square().mean()
        return out


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("block", [Checkpointing, Custom])
def test_what_is_asked_for_early_is_there_for_as_long_as_the_graph(
    block: Callable[[], nn.Module], action: str, layers: tuple[int, ...]
) -> None:
    """Of a block that is kept; in one that runs again it goes when nobody works with it."""
    check(block, {f"layers.{index}": action for index in layers})


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("make", [Dropping, DroppingLate])
def test_what_only_a_result_needs_that_nobody_wants_goes_with_it(
    make: Callable[..., nn.Module], action: str, layers: tuple[int, ...]
) -> None:
    """And takes nothing of the rest of the forward, nor of backward; but all of it until then."""
    check(TwoStreams, {f"layers.{index}": action for index in layers}, make=make)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("action", ["lean", "recompute"])  # others would rebuild it, which is not counted: too high
def test_a_result_that_went_is_none_any_more(action: str, layers: tuple[int, ...]) -> None:
    """What a block has returned, saves, and nobody has any more is there for as long as its graph is."""
    check(Judging, {f"layers.{index}": action for index in layers}, make=Judged)


@pytest.mark.parametrize("layers", [(), (0,)])
def test_what_goes_bit_by_bit_is_there_until_the_last_of_it(layers: tuple[int, ...]) -> None:
    """In one stretch between blocks: no prediction is too low."""
    planned = planned_peaks_of(AtTwoMoments, ThreeStreams, {f"layers.{index}": "recompute" for index in layers})
    assert all(0 <= predicted - peak <= 0.01 * peak for predicted, peak in planned)


@pytest.mark.parametrize("layers", [*LAYERS, (0, 1)])
@pytest.mark.parametrize("action", ACTIONS)
def test_what_goes_together_never_spares_more_than_all_of_it(action: str, layers: tuple[int, ...]) -> None:
    """Of which block it is tells less than how much of it there is: nothing is too low, and little too high."""
    planned = planned_peaks_of(Collecting, TwoStreams, {f"layers.{index}": action for index in layers})
    assert all(0 <= predicted - peak <= 0.01 * peak for predicted, peak in planned)


def planned_peaks_of(
    make: Callable[[Callable[[], nn.Module]], nn.Module], block: Callable[[], nn.Module], actions: dict[str, str]
) -> list[tuple[int, int]]:
    """What was predicted of planned steps, and what they took."""
    done = train(
        lambda: make(block), batches(), "2GB", loss, planner=lambda timeline, budget_bytes: actions, units=["layers.*"]
    )
    planned = planned_peaks(done)
    assert len(planned) >= 3
    return planned
