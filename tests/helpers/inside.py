"""Steps that make their inputs themselves, and trainings of them, for `tests/integration/test_sizes_inside.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lightning_mimose import Mimose
from tests.helpers.fits import condition
from tests.helpers.loops import Loss, plain_step
from tests.helpers.meter import PeakMeter
from tests.helpers.models import Block, TinyText, TinyVision

STEPS = 30


def texts(chance: random.Random, count: int = 4) -> list[str]:
    """Words of many lengths."""
    return ["ab" * chance.randint(4, 48) for _ in range(count)]


def tokens(batch: list[str]) -> torch.Tensor:
    """One number for every letter, padded to the longest."""
    longest = max(map(len, batch))
    return torch.tensor([[1 + ord(letter) % 60 for letter in text] + [0] * (longest - len(text)) for text in batch])


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    """Texts and labels in a dictionary."""
    loss: torch.Tensor = model(tokens(batch["texts"]), torch.as_tensor(batch["labels"])).loss
    return loss


def samples(model: nn.Module, batch: Any) -> torch.Tensor:
    """A list of samples, as a loader gives that collates nothing."""
    return classified(model, {"texts": [text for text, _ in batch], "labels": [label for _, label in batch]})


class Encoder(TinyText):
    """Gives embeddings of texts."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Of batch x tokens, batch x hidden."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Towers(nn.Module):
    """One encoder for questions, and one for answers, or for both."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.questions = Encoder()
        self.answers = self.questions if shared else Encoder()


def contrasted(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two texts, whose lengths have nothing to do with each other."""
    questions = model.questions(tokens(batch["questions"]))  # type: ignore[operator]
    answers = model.answers(tokens(batch["answers"]))  # type: ignore[operator]
    return functional.cross_entropy(questions @ answers.T, torch.arange(len(questions)))


class Pictured(nn.Module):
    """Looks at a picture, whose size the batch tells, before it reads a text, whose length it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.texts = Backbone(), Encoder()
        self.head = nn.Linear(40, 2)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of batch x classes."""
        x: torch.Tensor = self.head(torch.cat([self.pictures(pixels), self.texts(ids)], 1))
        return x


class Expert(Pictured):
    """Sends what it has seen and read to one of two experts, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40)) for _ in range(2))

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of batch x classes."""
        x = torch.cat([self.pictures(pixels), self.texts(ids)], 1)
        first, routed = torch.rand(len(x)) > 0.5, torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (first, ~first), strict=True):
            routed = routed.masked_scatter(chosen[:, None], expert(x[chosen]))
        out: torch.Tensor = self.head(x + routed)
        return out


def described(model: nn.Module, batch: Any) -> torch.Tensor:
    """Pictures and texts."""
    return functional.cross_entropy(model(batch["pixels"], tokens(batch["texts"])), torch.as_tensor(batch["labels"]))


def resized(model: nn.Module, batch: Any) -> torch.Tensor:
    """Images of one size, brought to another that only the step knows."""
    side = int(batch["side"])
    loss: torch.Tensor = model(functional.interpolate(batch["images"], (side, side)), batch["labels"]).loss
    return loss


class Resizing(TinyVision):
    """Does so within its forward; its stages are called one by one."""

    def forward(self, images: torch.Tensor, side: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:  # type: ignore[override]
        """The loss of one batch."""
        x = self.stem(functional.interpolate(images, (int(side), int(side))))
        for stage in self.stages:
            x = stage(x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x.mean((2, 3))), labels))


class Padding(nn.Module):
    """Makes one tensor of a list of images, as detectors do; has no parameters."""

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Each of channels x height x width."""
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        padded = [functional.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in images]
        return torch.stack(padded)


class Detector(nn.Module):
    """Takes images of any sizes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.backbone = Padding(), Backbone()
        self.head = nn.Linear(8, 2)

    def forward(self, images: list[torch.Tensor], labels: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.backbone(self.transform(images))
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x), labels))


class Backbone(TinyVision):
    """Features of images."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Of batch x channels x height x width, batch x features."""
        x: torch.Tensor = self.stages(self.stem(pixels)).mean((2, 3))
        return x


class Unpadded(nn.Module):
    """Drops what pads its tokens, and hands the others from block to block.

    Args:
        handed: In what: "dict", "tuple" or "packed".
    """

    def __init__(self, handed: str) -> None:
        super().__init__()
        self.handed = handed
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 2)
        self.blocks = nn.ModuleList(Handing() for _ in range(4))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
        """The loss of one batch."""
        x = self.embed(ids)
        given: Any = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        if self.handed != "packed":
            given = {"tokens": given.data} if self.handed == "dict" else (given.data, None)
        for block in self.blocks:
            given = block(given)
        last = given["tokens"] if self.handed == "dict" else given[0]
        return SimpleNamespace(loss=self.head(last).pow(2).mean())


class Handing(nn.Module):
    """A block that takes and gives a container."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, given: Any) -> Any:
        """The same container, with other tokens."""
        if isinstance(given, dict):
            return {"tokens": given["tokens"] + self.mlp(given["tokens"])}
        if isinstance(given, nn.utils.rnn.PackedSequence):
            return given._replace(data=given.data + self.mlp(given.data))
        return given[0] + self.mlp(given[0]), None


def padded(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """Texts that are all padded to one length; those of the first batch are full."""
    lengths = torch.tensor([64] + [chance.randint(5, 64) if number else 64 for _ in range(5)])
    return {"ids": torch.randint(0, 64, (6, 64), generator=torch.Generator().manual_seed(number)), "lengths": lengths}


def labels_of(chance: random.Random, count: int = 4) -> list[int]:
    """One for each sample."""
    return [chance.randrange(2) for _ in range(count)]


def squares(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """Images that are all of one size; the side they are brought to is one of four, large ones first and last."""
    generator = torch.Generator().manual_seed(number)
    side = 48 if number in (0, STEPS - 1) else chance.choice((16, 24, 32, 48))
    images = torch.randn(4, 3, 32, 32, generator=generator)
    return {"images": images, "side": torch.tensor(side), "labels": torch.tensor(labels_of(chance))}


class Masked(nn.Module):
    """Encodes the words that were not masked out, and decodes all of them, as masked autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.encoder = nn.ModuleList(Block(32) for _ in range(3))
        self.decoder = nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, words: torch.Tensor, kept: int) -> torch.Tensor:
        """The loss; the first words are kept."""
        x = self.embed(words)
        rest = torch.zeros_like(x[:, kept:])
        x = x[:, :kept]
        for block in self.encoder:
            x = block(x)
        x = torch.cat([x, rest], 1)
        for block in self.decoder:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def of_any_length(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """As many words as the batch tells, of which the step keeps another share each time."""
    length = 96 if number == 4 else chance.randint(32, 96)
    words = torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(number))
    return {"words": words, "kept": torch.tensor(int(length * chance.uniform(0.2, 0.5)))}


def reconstructed(model: nn.Module, batch: Any) -> torch.Tensor:
    """Only the step knows how many are kept."""
    loss: torch.Tensor = model(batch["words"], int(batch["kept"]))
    return loss


class Segmenter(nn.Module):
    """Tells of each pixel what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 32, 1), nn.GELU(), nn.Conv2d(32, 16, 1)) for _ in range(6)
        )
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Batch x classes x height x width."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def of_any_side(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """Images, classes of their pixels, and what share of their side they are brought to by the step."""
    generator = torch.Generator().manual_seed(number)
    side = 48 if number == 4 else chance.choice((24, 32, 40, 48))
    images = torch.randn(2, 3, side, side, generator=generator)
    classes = torch.randint(0, 4, (2, side, side), generator=generator)
    share = chance.choice((0.5, 0.75, 1.0, 1.25))
    return {"images": images, "classes": classes, "side": torch.tensor(int(side * share) // 4 * 4)}


def segmented(model: nn.Module, batch: Any) -> torch.Tensor:
    """At the resolution of the classes."""
    side = int(batch["side"])
    found = model(functional.interpolate(batch["images"], (side, side), mode="bilinear"))
    found = functional.interpolate(found, batch["classes"].shape[-2:], mode="bilinear")
    return functional.cross_entropy(found, batch["classes"])


def growing(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """The same, small ones until all is learnt."""
    return squares(chance, number) | {"side": torch.tensor(24 if number < STEPS // 2 else 48)}


def lists(chance: random.Random, number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Images each of its own size."""
    generator = torch.Generator().manual_seed(number)
    sides = [(chance.randrange(16, 49, 8), chance.randrange(16, 49, 8)) for _ in range(4)]
    images = [torch.randn(3, height, width, generator=generator) for height, width in sides]
    return images, torch.tensor(labels_of(chance))


class Case(NamedTuple):
    """A training.

    Attributes:
        make: Its model.
        batch: Its nth batch.
        loss: Its loss.
        planned: How many of its steps have to be planned at least.
        steps: How many there are.
        units: What is planned; None finds it.
        actions: What plans may use; None for all that pay.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[random.Random, int], Any]
    loss: Loss
    planned: int
    steps: int = STEPS
    units: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None


def question_and_answer(chance: random.Random, number: int) -> dict[str, list[str]]:
    """Two texts for every sample."""
    return {"questions": texts(chance), "answers": texts(chance)}


def pictures_and_texts(chance: random.Random, number: int) -> dict[str, Any]:
    """The pictures are all of one size."""
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    return {"pixels": pixels, "texts": texts(chance), "labels": labels_of(chance)}


def answers_that_vary_late(chance: random.Random, number: int) -> dict[str, list[str]]:
    """All of one length until all is learnt."""
    return {"questions": texts(chance), "answers": ["ab" * (20 if number < 14 else chance.randint(20, 90))] * 4}


def pair(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """A better and a worse answer to the same questions, each padded for itself."""
    generator, lengths = torch.Generator().manual_seed(number), [chance.randrange(16, 97, 4) for _ in range(2)]
    ids = [torch.randint(1, 64, (3, length), generator=generator) for length in lengths]
    return {"chosen": ids[0], "rejected": ids[1]}


def question_and_pair(chance: random.Random, number: int) -> dict[str, torch.Tensor]:
    """With the questions in front."""
    length, generator = chance.randrange(8, 41, 4), torch.Generator().manual_seed(1000 + number)
    return {"question": torch.randint(1, 64, (3, length), generator=generator), **pair(chance, number)}


def preferred(model: nn.Module, batch: Any) -> torch.Tensor:
    """Both answers in one batch of the model's, as long as the longer one."""
    answers = [batch["chosen"], batch["rejected"]]
    longest = max(answer.shape[1] for answer in answers)
    ids = torch.cat([functional.pad(answer, (0, longest - answer.shape[1])) for answer in answers])
    if "question" in batch:
        ids = torch.cat([batch["question"].repeat(2, 1), ids], 1)
    loss: torch.Tensor = model(ids, torch.arange(len(ids)) // 3).loss
    return loss


CASES = {
    "texts": Case(TinyText, lambda c, n: {"texts": texts(c), "labels": labels_of(c)}, classified, 20),
    "texts beside tensors": Case(
        TinyText, lambda c, n: {"texts": texts(c), "labels": torch.tensor(labels_of(c))}, classified, 18
    ),
    "samples": Case(TinyText, lambda c, n: list(zip(texts(c), labels_of(c), strict=True)), samples, 20),
    "two texts, one model": Case(lambda: Towers(shared=True), question_and_answer, contrasted, 12),
    "two texts, two models": Case(lambda: Towers(shared=False), question_and_answer, contrasted, 12),
    "pictures and texts": Case(Pictured, pictures_and_texts, described, 16),
    "answers that vary late": Case(lambda: Towers(shared=True), answers_that_vary_late, contrasted, 18, 40),
    "pictures, texts and experts": Case(
        Expert, pictures_and_texts, described, 16, units=("pictures.stages.?", "texts.layers.?", "experts.?")
    ),
    "resized": Case(TinyVision, squares, resized, 20),
    "resized inside": Case(Resizing, squares, lambda model, batch: model(**batch).loss, 20),
    "growing": Case(TinyVision, growing, resized, 24),
    "masked out": Case(Masked, of_any_length, reconstructed, 24, 48),
    "at the resolution of the classes": Case(Segmenter, of_any_side, segmented, 24, 48),
    **{
        f"unpadded in a {handed}": Case(
            lambda handed=handed: Unpadded(handed),  # type: ignore[misc]
            padded,
            lambda model, batch: model(**batch).loss,
            16,
            40,
        )
        for handed in ("dict", "tuple", "packed")
    },
    "the longer of two": Case(TinyText, pair, preferred, 24, 40),
    "a question and the longer of two": Case(TinyText, question_and_pair, preferred, 24, 48),
    "lists of images": Case(Detector, lists, lambda model, batch: model(*batch).loss, 10, 48),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For all of its parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Trained(NamedTuple):
    """What a training came to."""

    weights: dict[str, torch.Tensor]
    peaks: list[int]
    resident_bytes: int
    records: list[Any]

    def budget(self, share: float) -> int:
        """The budget at which this share of the activation memory may be used."""
        return int(self.resident_bytes + share * (max(self.peaks) - self.resident_bytes))


def trained(case: Case, budget: int | None = None) -> Trained:
    """Train, each step on the independent meter."""
    torch.manual_seed(0)
    model, chance = case.make(), random.Random(0)
    optimizer = sgd(model)
    asked = {"loss_fn": case.loss, "units": case.units, "actions": case.actions}
    mimose = Mimose(model, budget=budget, optimizer=optimizer, **asked) if budget else None  # type: ignore[arg-type]
    before, peaks, resident = condition(case.make()), [], 0
    for number in range(case.steps):
        batch = case.batch(chance, number)
        with PeakMeter(model, optimizer, batch) as meter:
            if mimose is not None:
                mimose.step(batch)
            else:
                plain_step(model, optimizer, batch, case.loss)
        peaks.append(meter.peak_bytes)
        resident = max(resident, meter.resident_bytes)
    if mimose is not None:
        mimose.close()
    assert condition(model) == before
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(weights, peaks, resident, list(mimose.records) if mimose is not None else [])
