"""Models that call their blocks the more often the longer a text is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.models import TinyText

CHUNK = 8


class _Writer(nn.Module):
    """One token of a text, from the one before it and what it attends to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.cell = nn.GRUCell(2 * width, width)
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(2 * width, 64)

    def forward(
        self, token: torch.Tensor, state: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share = torch.einsum("bh,bth->bt", self.query(state), memory).softmax(-1)
        context = torch.einsum("bt,bth->bh", share, memory)
        state = self.cell(torch.cat([self.embed(token), context], -1), state)
        return self.out(torch.cat([state, context], -1)), state


class Writing(nn.Module):
    """Reads a text, and writes another one, token by token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.writer = _Writer(width)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, state = self.reader(self.embed(source))
        state, loss = state[-1], memory.new_zeros(())
        for now, following in zip(target.unbind(1), target.unbind(1)[1:], strict=False):
            told, state = self.writer(now, state, memory)
            loss = loss + functional.cross_entropy(told, following)
        return loss


class _Looker(nn.Module):
    """Looks at a memory, and returns by how much at each part of it: attention saves these shares as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = (self.query(state) @ memory.transpose(1, 2)).softmax(-1)
        return state + self.out(share @ memory).tanh(), share


class Looking(nn.Module):
    """Holds what each round returned besides its result until the next one's is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.looker = _Looker(32)
        self.head = nn.Linear(32, 64)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.embed(source)
        state = memory
        for _ in target.unbind(1)[1:]:
            found = self.looker(state, memory)
            state = found[0]
        return functional.cross_entropy(self.head(state).flatten(0, 1), source.flatten())


class Collecting(Looking):
    """Holds what all rounds returned besides their results until the last one is over."""

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.embed(source)
        state, shares = memory, []
        for _ in target.unbind(1)[1:]:
            state, share = self.looker(state, memory)
            shares.append(share)
        return functional.cross_entropy(self.head(state).flatten(0, 1), source.flatten())


class Within(nn.Module):
    """The same inside another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.whole = Writing()
        self.head = nn.Linear(32, 32)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.whole(source, target)
        return loss + self.head(self.embed(source)).square().mean()


class Chunked(nn.Module):
    """A long text in chunks, each of which goes through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TinyText(2, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        means = []
        for chunk in input_ids.split(CHUNK, 1):
            hidden = self.text.embed(chunk)
            for layer in self.text.layers:
                hidden = layer(hidden)
            means.append(hidden.mean(1))
        return functional.cross_entropy(self.head(torch.stack(means, 1).mean(1)), labels)


class Truncated(Chunked):
    """The same with a memory of the chunks before, of which only the last two have a backward."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks, means = input_ids.split(CHUNK, 1), []
        memory = torch.zeros(())
        for number, chunk in enumerate(chunks):
            hidden = self.text.embed(chunk) + memory
            for layer in self.text.layers:
                hidden = layer(hidden)
            memory = hidden.mean(1, keepdim=True)
            if number < len(chunks) - 2:
                memory = memory.detach()
            else:
                means.append(hidden.mean(1))
        return functional.cross_entropy(self.head(torch.stack(means, 1).mean(1)), labels)


class Alternating(Truncated):
    """The same where other ones have none: of every second chunk the result is dropped."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        means = []
        for number, chunk in enumerate(input_ids.split(CHUNK, 1)):
            hidden = self.text.embed(chunk)
            for layer in self.text.layers:
                hidden = layer(hidden)
            means.append((hidden.detach() if number % 2 else hidden).mean(1))
        return functional.cross_entropy(self.head(torch.stack(means, 1).mean(1)), labels)


class _Remembering(nn.Module):
    """Reads a chunk, and writes into a memory; weights are given by a bias that all calls share."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(32, 32)
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.norm = nn.LayerNorm(32)

    def forward(
        self, chunk: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share = (chunk @ self.key(memory).transpose(1, 2) + bias).softmax(-1)
        chunk = self.norm(chunk + share @ memory + self.inner(chunk) * mask)
        return chunk, memory + 0.5 * chunk.mean(1, keepdim=True) * mask


class Remembering(nn.Module):
    """Two blocks carry a memory from chunk to chunk; a mask and a bias are given to all of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(_Remembering() for _ in range(2))
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        memory = hidden.new_zeros(len(hidden), CHUNK, 32)
        mask = (input_ids[:, :1] >= 0).float()[..., None]
        bias = torch.linspace(0, 1, CHUNK * CHUNK).view(CHUNK, CHUNK)
        for chunk in hidden.split(CHUNK, 1):
            now = chunk
            for block in self.blocks:
                now, memory = block(now, memory, mask, bias)
        return functional.cross_entropy(self.head(memory.mean(1)), labels)


class _Word(nn.Module):
    """One word of a sentence, after those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, word: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden, cell = self.cell(word, state)
        return hidden + self.inner(hidden), (hidden, cell)


def _read(unit: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What a unit tells of all inputs in turn, each of which it is given with its state after those before."""
    state = (torch.zeros_like(inputs[:, 0]), torch.zeros_like(inputs[:, 0]))
    found = []
    for each in inputs.unbind(1):
        told, state = unit(each, state)
        found.append(told)
    return torch.stack(found, 1).mean(1)


class _Sentence(nn.Module):
    """All words of a sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = _Word(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return _read(self.word, words)


class Nested(nn.Module):
    """Reads a document sentence by sentence, and each of these word by word."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.word = _Word(width)
        self.across = _Word(width)
        self.head = nn.Linear(width, 2)

    def read(self, words: torch.Tensor) -> torch.Tensor:
        """One sentence."""
        return _read(self.word, words)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        words = self.embed(input_ids)
        state = (torch.zeros_like(words[:, 0, 0]), torch.zeros_like(words[:, 0, 0]))
        found = []
        for sentence in words.unbind(1):
            told, state = self.across(self.read(sentence), state)
            found.append(told)
        return functional.cross_entropy(self.head(torch.stack(found, 1).mean(1)), labels)


class Around(Nested):
    """The same where a sentence is a unit, around its words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.word = _Sentence(width)

    def read(self, words: torch.Tensor) -> torch.Tensor:
        """One sentence."""
        found: torch.Tensor = self.word(words)
        return found


NESTED = (Nested, Around)
DROPPING = (Truncated, Alternating)
MODELS = (Writing, Within, Looking, Collecting, Chunked, Remembering)


def text_of(model: type[nn.Module], rounds: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of which some model calls its blocks so many times."""
    generator = torch.Generator().manual_seed(seed)
    if issubclass(model, (Writing, Within, Looking)):
        source = torch.randint(0, 64, (4, 16 + seed % 7), generator=generator)
        return {"source": source, "target": torch.randint(0, 64, (4, rounds + 1), generator=generator)}
    return {
        "input_ids": torch.randint(0, 64, (4, CHUNK * rounds), generator=generator),
        "labels": torch.randint(0, 2, (4,), generator=generator),
    }


def document_of(sentences: int, words: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of documents."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 64, (16, sentences, words), generator=generator),
        "labels": torch.randint(0, 2, (16,), generator=generator),
    }


def loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of a batch."""
    loss: torch.Tensor = model(**batch)
    return loss
