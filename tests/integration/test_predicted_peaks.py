"""What is held by others, goes early, or is next to nothing: peaks of planned steps are predicted to a few bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from lightning_mimose import Mimose, StepRecord
from lightning_mimose.predict.checking import EXACT_ERROR
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import ARCHITECTURES, Trained, recompute_all, train
from tests.helpers.models import Batch, TinyText, text_batch

WIDTH = 48
LENGTHS = (40, 17, 33, 26, 21, 37, 30)
RNG_STATE_BYTES = torch.get_rng_state().nbytes
JUDGED = (), (0,), (2,), (0, 1, 2)


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is attended to, and the probabilities."""
        scores = self.queries(x) @ self.keys(x).transpose(1, 2)
        probabilities = functional.dropout(scores.softmax(-1), 0.1)
        return x + probabilities @ self.values(x), probabilities

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The result first."""
        x, _ = self.attention(x)
        return (x + self.down(functional.gelu(self.up(x))),)


class Returning(Block):
    """Returns the probabilities, too, as older encoders do: the loop around it holds them until the next block's."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, probabilities = self.attention(x)
        return x + self.down(functional.gelu(self.up(x))), probabilities


class Dropping(Block):
    """Ends in a dropout of something wide, so that nothing is as high as its backward."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, _ = self.attention(x)
        wide = functional.dropout(self.up(x).repeat(1, 1, 4), 0.1).relu_()
        return (x + wide.unflatten(-1, (-1, WIDTH)).sum(-2),)


class Attending(Block):
    """Attends with many heads, whose masks have bits beside them where its backward takes the most."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, keys, values = (
            linear(x).unflatten(-1, (8, -1)).transpose(1, 2) for linear in (self.queries, self.keys, self.values)
        )
        probabilities = functional.dropout((queries @ keys.transpose(2, 3)).softmax(-1), 0.1)
        return (x + self.down(functional.gelu(self.up((probabilities @ values).transpose(1, 2).flatten(2)))),)


class Scaling(Block):
    """Saves what was made of keys before it saves the keys themselves, as attention by relative positions does."""

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.keys(x)
        scores = self.queries(x) @ (-keys).transpose(1, 2) + keys @ self.values(x).transpose(1, 2)
        probabilities = functional.dropout(scores.softmax(-1), 0.1)
        return x + probabilities @ x, probabilities


class Choosing(Block):
    """Chooses by scores with gradients to which nothing leads from the result, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = self.scores(x).square().sigmoid().argmax(-1, keepdim=True)
        x, _ = self.attention(x)
        return (x + self.down(functional.gelu(self.up(x)) * (chosen % 2)),)


class Relative(Block):
    """Uses a table that belongs to the model around it, with dropout of its own."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, _ = self.attention(x)
        x = x + self.values(functional.dropout(table, 0.1)).square().mean(0)
        return (x + self.down(functional.gelu(self.up(x))),)


class Gate(nn.Module):
    """An activation of several operations, whose backward takes more than anything else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x.sigmoid()).tanh() * x


class Telling(Returning):
    """Returns the probabilities, and takes the most where those are saved and not used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, probabilities = self.attention(x)
        return x + self.down(self.gate(self.up(x))), probabilities


class Mixing(nn.Module):
    """Mixes positions before anything saves one, as FNet does: only a region holds what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH), Gate(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = functional.layer_norm(x + x.flip(1), (WIDTH,))
        return (x + self.down(self.gate(self.up(x))),)


class Flipping(nn.Module):
    """Its last operation asks for nothing that was saved, and makes a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            largest = x.repeat(1, 1, 32).abs().amax()
        return (functional.gelu((x / largest).repeat(1, 1, 8)) * self.scale).flip(1)


class Flipped(nn.Module):
    """Has such a part, whose gradient is another one's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.down = Flipping(), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + self.down(x.repeat(1, 1, 8) + self.part(x)),)


class Normed(Block):
    """Adds norms of what it made, so that its result is rebuilt from what it saves, and handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + self.norms[0](self.values(x))
        return (x + self.norms[1](self.down(functional.gelu(self.up(x)))),)


class Watching(Block):
    """Replaces a buffer while it runs, as modules do that watch a range: its memory is another tensor's then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(1))

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        self.low = torch.minimum(self.low, queries.detach().min())
        probabilities = functional.dropout((queries @ keys.transpose(1, 2)).softmax(-1), 0.1)
        return x + probabilities @ values, probabilities


class Stepping(nn.Module):
    """Goes through one wide tensor position by position: what takes the most is the sum of its parts' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide, state = self.up(x), torch.zeros(len(x), 8 * WIDTH)
        for position in range(4):
            state = state * 0.9 + wide[:, position]
        return (x + self.down(state)[:, None],)


class Widening(nn.Module):
    """A product with what is as wide in one dimension more, as state spaces have: its gradient is summed to that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rates = nn.Parameter(torch.linspace(0.1, 1, 4))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        steps, values = functional.softplus(self.up(x)), self.down(x)
        return (x + (steps[..., None] * self.rates * values[..., None]).sum(-1),)


class Quantizing(nn.Module):
    """Looks up the nearest of some codes, by a graph that is gone when they are found."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH).sin())
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nearest = torch.cdist(x.transpose(0, 1).reshape(-1, WIDTH), self.codes).argmin(1)
        found = self.codes[nearest].view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)
        missed = functional.mse_loss(x, found.detach(), reduction="none")
        return (self.out(x + (found - x).detach()) + missed,)


class Matching(nn.Module):
    """Compares what it makes with some codes, by a graph that is gone then, and has a recipe that is made from it."""

    far = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).sin())
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.down(functional.gelu(self.up(x)))
        (torch.cdist(x.flatten(0, 1), self.codes) if self.far else x * x).argmax(-1)
        return (torch.relu(x),)


class Near(Matching):
    """By an operation whose result nothing saves."""

    far = False


class Moving(Near):
    """Changes it in place after that, as autograd allows: nothing that is there has saved it."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.down(functional.gelu(self.up(x)))
        (x * x).argmax(-1)
        found = torch.relu(x)
        return (found + x.add_(1).sin(),)


class Mixed(nn.Module):
    """Saves two values before their source, whose own operation comes first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.up(x)
        return (x + self.down(self.gated(hidden) + hidden * hidden.tanh()),)

    def gated(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sigmoid()


class Drawing(Mixed):
    """Draws by one of them, of which nothing else is made: it is not there again before its own operation comes."""

    def gated(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(hidden.sigmoid())


class Net(nn.Module):
    """Embeddings and norms, which save next to nothing, and blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(16, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(256, WIDTH))
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = sum(embedding(ids) for embedding in self.embeddings)
        for layer in self.layers:
            found = layer(x, self.table)
            x = found[0]
        return self.head(x).square().mean()


class Masking(Block):
    """Is given a mask, which nothing saves, beside a table, which is saved."""

    def forward(self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.queries(x * table) @ self.keys(x).transpose(1, 2) + mask
        probabilities = functional.dropout(scores.softmax(-1), 0.1)
        x = x + probabilities @ self.values(x)
        return (x + self.down(functional.gelu(self.up(x))), *self.more(probabilities))

    def more(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What it returns besides."""
        return ()


class MaskingAndReturning(Masking):
    """Returns the probabilities, too."""

    def more(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (probabilities,)


class Decoder(Net):
    """Lets go of the mask before a wide head, which takes the most."""

    def __init__(self, block: Callable[[], nn.Module], made: bool = True) -> None:
        super().__init__(block)
        self.made = made
        self.register_buffer("waves", torch.linspace(0, 1, 64 * WIDTH).view(64, WIDTH).cos())
        self.widen, self.head = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.widen(self.decoded(ids)))).square().mean()

    def decoded(self, ids: torch.Tensor) -> torch.Tensor:
        """By all blocks, which are given the same tensors."""
        length = ids.shape[1]
        x = sum(embedding(ids) for embedding in self.embeddings)
        table = self.waves[:length] * 1 if self.made else self.waves[:length]
        mask = torch.full((len(ids), length, length), -1e9).triu(1)
        for layer in self.layers:
            found = layer(x, table=table, mask=mask)
            x = found[0]
        return x


def squared(*found: torch.Tensor) -> torch.Tensor:
    """A loss of probabilities."""
    return torch.stack([each.square().mean() for each in found]).sum()


class Judged(Net):
    """Looks at the probabilities of all blocks in its loss, which lets go of them before any block runs again."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, found = sum(embedding(ids) for embedding in self.embeddings), []
        for layer in self.layers:
            x, *probabilities = layer(x, self.table)
            found += probabilities
        return self.head(x).square().mean() + self.judged(found)

    def judged(self, found: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the probabilities."""
        return squared(*found)


class Overheard(Judged):
    """Takes them by hooks inside of blocks, which return nothing of them."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.heard: list[torch.Tensor] | None = None
        for layer in self.layers:
            layer.looks.register_forward_hook(lambda module, args, out: self.hear(out[1]))

    def hear(self, probabilities: torch.Tensor) -> None:
        """Only in a forward, not when blocks run again."""
        if self.heard is not None:
            self.heard.append(probabilities)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.heard = []
        return super().forward(ids)

    def judged(self, found: list[torch.Tensor]) -> torch.Tensor:
        heard, self.heard = self.heard, None
        return super().judged(heard or found)


class Judge(nn.Module):
    """Looks at probabilities."""

    def forward(self, *found: torch.Tensor) -> torch.Tensor:
        return squared(*found)


class Refereed(Judged):
    """Has a module for that, which is over before any block runs again."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.judge = Judge()

    def judged(self, found: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.judge(*found)
        return loss


class Looks(Block):
    """Attention alone."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.attention(x)


class Nesting(nn.Module):
    """Attention in a module of its own, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, _ = self.looks(x)
        return (x + self.mlp(x),)


class Holding(Net):
    """Holds what it made for one batch until the next; its optimizer's update takes the most."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.words = nn.Embedding(30_000, WIDTH)
        self.held: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.held = None
        x: torch.Tensor = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.table)[0]
        self.held = x.detach().repeat(1, 1, 4)
        return self.head(x).square().mean()


class Aside(Holding):
    """Keeps the graph of its last block to the next batch, and nothing that comes of it is in the loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.held = None
        x: torch.Tensor = self.words(ids)
        for layer in self.layers[:2]:
            x = layer(x, self.table)[0]
        self.held = self.layers[2](x.detach(), self.table)[0]
        return self.head(x).square().mean()


class Plotted(Net):
    """Keeps the probabilities of all blocks for plots, until the next batch's come; its head looks at few positions."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.plotted: dict[str, torch.Tensor] = {}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, self.plotted = sum(embedding(ids) for embedding in self.embeddings), {}
        for index, layer in enumerate(self.layers):
            x, self.plotted[f"{index}"] = layer(x, self.table)
        return self.head(x[:, :2]).square().mean()


class Undropped(Returning):
    """Saves the probabilities as they are, and attends with many heads: nothing takes as much."""

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys, values = (
            linear(x).unflatten(-1, (16, -1)).transpose(1, 2) for linear in (self.queries, self.keys, self.values)
        )
        probabilities = (queries @ keys.transpose(2, 3)).softmax(-1)
        return x + (probabilities @ values).transpose(1, 2).flatten(2), probabilities


def batches() -> list[Batch]:
    """Of every length one."""
    generator = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 16, (8, length), generator=generator)} for length in LENGTHS]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own."""
    return model(batch["ids"])


def planned_peaks(done: Trained) -> list[tuple[int, int]]:
    """What was predicted of every planned step, and its peak."""
    return [
        (record.predicted_peak_bytes or 0, peak)
        for record, peak in zip(done.mimose.records, done.peaks, strict=True)
        if not record.sheltered
    ]


@pytest.mark.parametrize("block", [Block, Returning, Attending, Scaling, Choosing, Relative, Dropping])
@pytest.mark.parametrize("action", [None, "lean", "lean+masks", "lean+products", "recompute", "recompute+lean"])
def test_peaks_of_planned_steps(block: Callable[[], Block], action: str | None) -> None:
    """Within the random state that a sheltered step's region holds in its own backward."""
    layer = "layers.2" if block in (Attending, Dropping) else "layers.0"
    records = check(block, {} if action is None else {layer: action})
    assert action is None or all(layer in record.actions for record in records)


@pytest.mark.parametrize("block", [Telling, Normed])
def test_blocks_that_all_run_again_leanly(block: Callable[[], Block]) -> None:
    """What they return is not there in their own backward, nor has another one's made some of what they save."""
    check(block, {f"layers.{index}": "recompute+lean" for index in range(3)})


@pytest.mark.parametrize("layers", [(2,), (0, 1, 2)])
def test_parts_whose_backward_makes_something_before_they_run_again(layers: tuple[int, ...]) -> None:
    """They run again when something is asked for that they saved, beside what was made of the gradient by then."""
    check(Flipped, {f"layers.{index}.part": "recompute" for index in layers}, ("layers.*.part",))


@pytest.mark.parametrize("action", ["recompute", "recompute+lean"])
def test_what_is_handed_on_to_a_block_that_runs_again(action: str) -> None:
    """It is given what was rebuilt, in other memory than before, and may rebuild from that in turn."""
    check(Normed, {"layers.0": "lean", "layers.1": action, "layers.2": "lean"})


@pytest.mark.parametrize("action", [None, "recompute"])
def test_gradients_that_are_summed(action: str | None) -> None:
    """In place, as autograd does it in a step that nobody measures."""
    check(Stepping, {} if action is None else {"layers.1": action})


@pytest.mark.parametrize("action", ["lean", "recompute", "recompute+lean"])
def test_gradients_that_are_summed_to_what_was_expanded(action: str) -> None:
    """What is rebuilt for one operation is gone by then, as what a recomputation saved is."""
    check(Widening, {"layers.2": action})


@pytest.mark.parametrize("action", ["lean", "lean+masks"])
def test_buffers_that_a_block_replaces(action: str) -> None:
    """What is made where one was is nobody's: it is not taken for what somebody holds anyway."""
    check(Watching, dict.fromkeys(("layers.0", "layers.1", "layers.2"), action))


@pytest.mark.parametrize("recomputed", [(), ("layers.0",), ("layers.0", "layers.1"), ("layers.2.gate",)])
def test_what_a_block_is_given_and_does_not_save(recomputed: tuple[str, ...]) -> None:
    """Regions hold it until nothing of their graph is left; kept, nobody does."""
    check(Mixing, dict.fromkeys(recomputed, "recompute"), ("layers.*.gate",))


@pytest.mark.parametrize("block", [Masking, MaskingAndReturning])
@pytest.mark.parametrize("action", [None, "lean", "recompute"])
@pytest.mark.parametrize("made", [True, False])
def test_what_is_let_go_of_before_the_most_is_taken(block: Callable[[], Block], action: str | None, made: bool) -> None:
    """In no step: that a table which the same blocks are given is still there says nothing of the mask.

    Whether that is made in the step, or is a buffer.
    """
    check(block, {} if action is None else {"layers.0": action}, make=partial(Decoder, made=made))


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2,), (0, 1, 2)])
@pytest.mark.parametrize("action", ["lean+products", "recompute", "recompute+lean"])
def test_results_that_are_let_go_of_before_the_most_is_taken(layers: tuple[int, ...], action: str) -> None:
    """What blocks save and have returned is there until the loop around them lets go of it, and not to the step's most.

    Of the last two blocks in one stretch between two units, one after the other.
    """
    check(MaskingAndReturning, {f"layers.{index}": action for index in layers}, make=Decoder)


def test_what_only_a_graph_has_saved_that_is_gone_spares_nothing() -> None:
    """Although it could be rebuilt from what is saved after that."""
    options: set[tuple[str, str]] = set()

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        options.update(timeline.option_index)
        return {}

    train(lambda: Net(Quantizing), batches(), "2GB", loss, planner=planner, units=["layers.*"])
    assert {action for unit, action in options if unit == "layers.0"} == {"recompute", "recompute+lean"}


@pytest.mark.parametrize("layers", [(1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("action", ["lean", "recompute+lean"])
@pytest.mark.parametrize("block", [Mixed, Drawing])
def test_sources_that_are_done_before_what_is_rebuilt_from_them(
    block: Callable[[], nn.Module], action: str, layers: tuple[int, ...]
) -> None:
    """They are held until it is there again, and no longer."""
    check(block, {f"layers.{index}": action for index in layers})


@pytest.mark.parametrize("block", [Matching, Near, Moving])
@pytest.mark.parametrize("action", ["lean+expansions", "recompute+lean"])
def test_nothing_is_rebuilt_from_what_only_a_graph_has_saved_that_is_gone(
    block: Callable[[], nn.Module], action: str
) -> None:
    """It would be held for the recipe alone."""
    check(block, {f"layers.{index}": action for index in range(3)})


@pytest.mark.parametrize(("block", "make"), [(Returning, Judged), (Nesting, Overheard)])
@pytest.mark.parametrize(
    ("action", "layers"),
    [
        *((action, layers) for action in ("lean+products", "recompute", "recompute+lean") for layers in JUDGED),
        *(("lean", layers) for layers in JUDGED if layers != (2,)),  # too high by the probabilities of the last block
    ],
)
def test_results_that_a_loss_looks_at(
    block: Callable[[], nn.Module], make: Callable[..., nn.Module], action: str, layers: tuple[int, ...]
) -> None:
    """Blocks that are kept save them to their own backward, longer than the loss; they are there once until then."""
    check(block, {f"layers.{index}": action for index in layers}, make=make)


@pytest.mark.parametrize("layers", JUDGED)
@pytest.mark.parametrize("action", ["lean+products", "recompute", "recompute+lean"])
def test_results_that_a_model_keeps(action: str, layers: tuple[int, ...]) -> None:
    """They are there once where blocks are kept, which save them, and twice where those run again."""
    check(Undropped, {f"layers.{index}": action for index in layers}, make=Plotted)


@pytest.mark.parametrize("layers", JUDGED)
@pytest.mark.parametrize("action", ["lean+products", "recompute"])
def test_results_that_another_unit_looks_at(action: str, layers: tuple[int, ...]) -> None:
    """It is over before any block runs again, and holds them no longer."""
    check(Returning, {f"layers.{index}": action for index in layers}, ("judge",), Refereed)


@pytest.mark.parametrize("action", [None, "recompute"])
def test_what_a_module_holds_is_there_in_the_update(action: str | None) -> None:
    """It is no gradient, nor state, and yet none of the activations that are gone by then."""
    actions = {} if action is None else {"layers.0": action}
    done = train(lambda: Holding(Block), batches(), "2GB", loss, planner=lambda timeline, budget_bytes: actions)
    surplus = {
        (record.predicted_peak_bytes or 0) - peak
        for record, peak in zip(done.mimose.records, done.peaks, strict=True)
        if not record.sheltered
    }
    (surplus_bytes,) = surplus  # of the update alone, and so the same for every length
    assert 0 <= surplus_bytes <= 0.002 * max(done.peaks)


def test_gradients_that_are_set_by_hand_are_gradients() -> None:
    """No hook sees them made, and yet they are nothing that somebody keeps besides gradients."""
    model = Holding(Block)
    parameters = list(model.parameters())

    def backward(total: torch.Tensor) -> None:
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    done = train(lambda: model, batches(), "2GB", loss, backward_fn=backward, planner=lambda timeline, budget_bytes: {})
    planned = planned_peaks(done)
    assert len(planned) >= 2
    assert all(0 <= predicted - peak <= 0.002 * peak for predicted, peak in planned)


def test_what_is_spared_of_a_graph_that_is_kept_is_spared_in_the_update() -> None:
    """A block whose result somebody keeps, undetached, and goes back through in no step."""

    def run(actions: dict[str, str]) -> list[tuple[int, int]]:
        done = train(lambda: Aside(Block), batches(), "2GB", loss, planner=lambda timeline, budget_bytes: actions)
        return planned_peaks(done)

    kept, spared = run({}), run({"layers.2": "recompute"})
    for planned in (kept, spared):
        assert len(planned) >= 2
        assert all(0 <= predicted - peak <= 0.006 * peak for predicted, peak in planned)
    assert max(peak for _, peak in spared) < 0.99 * max(peak for _, peak in kept)


class Halving(nn.Module):
    """Halves images three times, with sides rounded up, and attends over the map that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 16), (16, 16)))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            pixels = stage(pixels).relu()
        x = pixels.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_attention_over_images_of_any_size() -> None:
    """A few sizes tell how both sides are rounded, and that scores go with the square of what is left."""
    draw = random.Random(3)
    images = [{"pixels": torch.ones(2, 3, draw.randrange(64, 144), draw.randrange(64, 144))} for _ in range(16)]
    done = train(Halving, images, "2GB", lambda model, batch: model(batch["pixels"]))
    planned = planned_peaks(done)
    assert len(planned) >= 6
    assert all(-1e-4 <= predicted / peak - 1 <= 0.01 for predicted, peak in planned)


def test_random_states_that_a_meter_does_not_see_are_no_news() -> None:
    """While another profiler runs nobody sees them; steps that were predicted to the byte shelter no others for it."""
    architecture = ARCHITECTURES["modernbert"]
    again = replace(architecture, sizes=(*architecture.sizes, 60, 84, 80, 56, 68, 84, 76, 88, 52))

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        return dict.fromkeys(recompute_all(timeline, budget_bytes), "recompute+lean")

    done = train(again.build, again.batches(), "8GB", planner=planner)
    assert all(predicted == peak for predicted, peak in planned_peaks(done))
    assert not any(record.sheltered for record in list(done.mimose.records)[-8:])


def check(
    block: Callable[[], nn.Module],
    actions: dict[str, str],
    parts: tuple[str, ...] = (),
    make: Callable[[Callable[[], nn.Module]], nn.Module] = Net,
) -> list[StepRecord]:
    """Train under a plan, and hold its steps against what was predicted."""

    def planner(timeline: object, budget_bytes: int) -> dict[str, str]:
        return actions

    done = train(
        lambda: make(block), batches(), "2GB", loss, planner=planner, units=["layers.*", *parts, "embeddings.*"]
    )
    planned = planned_peaks(done)
    assert len(planned) >= 2
    assert all(0 <= predicted - peak <= RNG_STATE_BYTES for predicted, peak in planned)
    assert all(actions.keys() <= r.actions.keys() for r in done.mimose.records if not r.sheltered)
    return list(done.mimose.records)


def test_lengths_whose_peaks_are_of_different_operations() -> None:
    """In short texts the wide layer's, in long ones attention's: learnt exactly from five of them, for all actions."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda model, batch: model(**batch).loss) as mimose:
        for length in (64, 14, 26, 19, 9):
            ids = torch.randint(1, 64, (4, length))
            mask, labels = torch.ones_like(ids), torch.zeros(4, dtype=torch.long)
            mimose.step({"input_ids": ids, "attention_mask": mask, "labels": labels})
        estimator = mimose._engine.advisor.estimator
        *_, (dims, _, _) = estimator.observations()
        prediction = estimator.predict({name: 40 if value == 9 else value for name, value in dims.items()})
    assert prediction is not None
    assert prediction.trusted
    assert prediction.error < EXACT_ERROR
    assert not prediction.doubtful


@pytest.mark.parametrize("order", ["longest first", "shortest first", "nearly the same first"])
def test_lengths_in_any_order(order: str) -> None:
    """Sizes that lie close together are not taken for a line that goes on for ever."""
    draw = random.Random(1)
    lengths = [draw.randint(12, 96) for _ in range(24)]
    lengths.sort(reverse=order == "longest first")
    if order == "nearly the same first":
        lengths = [draw.randint(90, 96) for _ in range(6)] + draw.sample(lengths, len(lengths))
    data = [text_batch(4, length, i) for i, length in enumerate(lengths)]

    build = partial(TinyText, 4)
    plain = train(build, data)
    done = train(build, data, budget := plain.budget(0.4))
    assert max(done.peaks) <= budget < max(plain.peaks)
    planned = [(r, peak) for r, peak in zip(done.mimose.records, done.peaks, strict=True) if not r.sheltered]
    assert len(planned) >= 12
    for record, peak in planned:
        assert record.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


class Tiny(nn.Module):
    """An MLP of few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        out: torch.Tensor = x + self.down(functional.dropout(functional.gelu(self.up(self.norm(x))), 0.1))
        return out


class Tinies(nn.Module):
    """Six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Tiny() for _ in range(6)), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("action", ["lean", "lean+masks", "lean+expansions"])
def test_what_is_spared_goes_by_sizes_however_small(action: str) -> None:
    """Of tensors from 64 bytes to 24 KB, the larger ones learnt from first."""
    torch.manual_seed(0)
    rows = [{"x": torch.randn(count, 16)} for count in (96, 64, 80, 72, 56, 48, 40, 24, 20, 16, 12, 8, 6, 4, 2, 1)]

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        return {f"layers.{index}": action for index in range(6)}

    done = train(Tinies, rows, "2GB", lambda model, batch: model(batch["x"]), planner=planner, units=["layers.*"])
    planned = planned_peaks(done)
    assert len(planned) >= 9
    assert all(abs(predicted - peak) <= 0.003 * peak for predicted, peak in planned)


class Paired(nn.Module):
    """Returns two results, which take more than its own backward does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(both[1] + 1)
        return self.mixed(both[0]), normed


class Pairs(nn.Module):
    """Hands both on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Paired() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        both = x, x.tanh()
        for layer in self.layers:
            both = layer(both)
        return self.head(both[0] + both[1] * 0.1).square().mean()


def test_results_are_not_there_again_while_a_block_goes_back() -> None:
    """A measured recomputation runs to its end, and others stop before."""
    data = [{"x": torch.randn(16, length, 8)} for length in LENGTHS]
    actions = {f"layers.{index}": "recompute" for index in range(3)}
    done = train(Pairs, data, "2GB", lambda model, batch: model(batch["x"]), planner=lambda timeline, budget: actions)
    planned = planned_peaks(done)
    assert len(planned) >= 2
    assert all(abs(predicted - peak) <= 16 for predicted, peak in planned)


class Looking(nn.Module):
    """Looks at its own sequence and at another one, and returns where it has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = (self.own(x) @ x.transpose(1, 2) / 8).softmax(-1)
        other = (self.other(x) @ y.transpose(1, 2) / 8).softmax(-1)
        return self.out(self.norm(x + own @ x + other @ y)), own, other


class Streams(nn.Module):
    """Two streams of such blocks in turns; what the last ones have returned is held while the loss is computed.

    Or one of all blocks' results, longer than the other.
    """

    def __init__(self, *, collects: bool = False) -> None:
        super().__init__()
        self.collects = collects
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 50)
        self.long, self.short = (nn.ModuleList(Looking() for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.stem(x), self.stem(x[:, :17])
        collected = []
        for long, short in zip(self.long, self.short, strict=True):
            results = long(x, y)
            others = short(y, x)
            x, y = results[0], others[0]
            if self.collects:
                collected.append((results[1], others[1]))
        return self.head(x).log_softmax(-1).square().mean() + y.square().mean()


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("action", ["keep", "recompute", "lean"])
def test_results_that_are_let_go_of_one_after_the_other_count_once(action: str, collects: bool) -> None:
    """Those of one block end at two moments, between which the one that is left is there in any case."""

    def planner(timeline: Timeline, budget_bytes: int) -> dict[str, str]:
        return {unit: action for unit in timeline.units if (unit, action) in timeline.option_index}

    data = [{"x": torch.randn(4, length, 8)} for length in (68, 72, 40, 96, 84, 80, 56, 92, 64, 76, 88)]
    build = partial(Streams, collects=collects)
    done = train(build, data, "2GB", lambda model, batch: model(batch["x"]), planner=planner)
    planned = planned_peaks(done)
    assert len(planned) >= 5
    assert all(abs(predicted - peak) <= (0.01 if collects else 0.001) * peak for predicted, peak in planned)


class Encoders(nn.Module):
    """Layers as torch has them: the transposes of a batch of one are no copies; they save what they are given."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        make = partial(nn.TransformerEncoderLayer, 32, 2, 64, dropout, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_batches_of_one_tell_nothing_of_what_others_hold(dropout: float) -> None:
    """Planned as others are, they still have what these let go of."""
    chance = random.Random(0)
    sizes = [(1, 64), (3, 8), (4, 64), (1, 24), (4, 48), (3, 8), (3, 64), (2, 56), (1, 32)]
    sizes += [(chance.randint(1, 4), chance.randrange(8, 65, 8)) for _ in range(17)]
    data = [{"x": torch.randn(*size, 32)} for size in sizes]
    plain = train(partial(Encoders, dropout), data, None, lambda model, batch: model(batch["x"]))
    build, budget = partial(Encoders, dropout), plain.budget(0.7)
    done = train(build, data, budget, lambda model, batch: model(batch["x"]))
    assert max(done.peaks) <= budget
    planned = planned_peaks(done)
    assert len(planned) >= 15
    assert all(abs(predicted - peak) <= 0.01 * peak for predicted, peak in planned)
    assert sum(abs(predicted - peak) > 0.002 * peak for predicted, peak in planned) <= 4
