"""`lightning-mimose explain`: its answers against real steps, its sources of models and batches, its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, MimoseError
from lightning_mimose.command import main
from lightning_mimose.explain.learn import learn, scaled
from lightning_mimose.explain.samples import batch_maker, build, load, stretch
from tests.helpers.models import Points, TinyText, text_batch
from tests.helpers.projects import write_project

PROJECT = '''
import lightning.pytorch as pl
import torch
from tests.helpers.models import TinyText, TinyVision, image_batch, loader, text_batch

largest = 0

class Text(TinyText):
    """A plain module with a method that makes batches."""

    def make_batch(self, batch, tokens):
        return text_batch(batch, tokens)

    def forward(self, input_ids, labels):
        global largest
        largest = max(largest, input_ids.numel())
        print("noise from the model")
        return super().forward(input_ids, labels)

class Lossless(Text):
    def forward(self, input_ids, labels):
        return self.embed(input_ids)

class Lit(pl.LightningModule):
    """A LightningModule with a loader, which logs."""

    def __init__(self, layers=2):
        super().__init__()
        self.model = TinyText(layers, 32)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"more": loss})
        return {"loss": loss}

    def train_dataloader(self):
        return loader([text_batch(3, n) for n in (11, 12)])

class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

class FixedImages(TinyVision):
    """Only takes images of one size."""

    def forward(self, pixel_values, labels):
        assert pixel_values.shape[2:] == (24, 24), "images must be 24 x 24"
        return super().forward(pixel_values, labels)

class Broken(TinyText):
    def forward(self, input_ids, labels):
        raise RuntimeError("no such luck,\\nreally")

def factory(hidden: int = 32):
    return TinyText(2, hidden)

def images(**dims):
    return image_batch(dims["batch"], dims.get("side", 24), dims.get("side", 24))

def text(batch, tokens):
    return text_batch(batch, tokens)

instance = TinyText(2)
number = 3
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, which is not on the path."""
    return write_project(PROJECT, tmp_path, monkeypatch)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `explain --json` prints."""
    assert main(["explain", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_answer_is_what_training_then_measures(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Peaks within 1 %, at a size four times the largest that was run; the smallest budget holds and less does not."""
    document = answer(capsys, f"{project}:Text", "--size", "batch=8,tokens=96", "--budget", "1GB,1KB")
    (size,) = document["sizes"]
    assert size["trusted"]
    assert sys.modules[project].largest <= 8 * 96 / 4
    as_is, nothing = size["budgets"]
    assert (as_is["fits"], as_is["recomputed_units"], as_is["added_share"]) == (True, 0, 0)
    assert not nothing["fits"]

    torch.manual_seed(0)
    model = TinyText()
    batch = text_batch(8, 96)
    optimizer = torch.optim.AdamW(model.parameters())
    with Mimose(model, budget="1GB", optimizer=optimizer) as mimose:
        for _ in range(3):
            mimose.step(batch)
        plan = mimose.records[2]
        assert not plan.sheltered
        assert plan.measured_peak_bytes == pytest.approx(size["unbudgeted_peak_bytes"], rel=0.01)
    smallest = size["smallest_feasible_bytes"]
    with Mimose(model, budget=int(1.01 * smallest), optimizer=optimizer) as mimose:
        for _ in range(3):
            mimose.step(batch)
    with pytest.raises(MimoseError), Mimose(model, budget=int(0.97 * smallest), optimizer=optimizer) as mimose:
        mimose.step(batch)


def test_sides_that_halvings_divide_stay_divisible() -> None:
    """A U-Net of 64 pixels with three halvings takes multiples of 8 alone."""
    assert scaled("pixel_values:2", [64]) == [16, 24, 32, 40, 48]
    assert all(side % 16 == 0 and 256 / 6 < side <= 192 for side in scaled("pixel_values:2", [256]))
    assert len(scaled("input_ids:1", [256])) >= 5


def test_less_memory_costs_more(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Over falling budgets the added share rises, and every predicted peak is inside its budget."""
    sizes = ["--size", "batch=8,tokens=96", "--size", "batch=8,tokens=64"]
    first = answer(capsys, f"{project}:Text", *sizes)["sizes"]
    assert [size["size"]["tokens"] for size in first] == [96, 64]
    low, high = first[0]["smallest_feasible_bytes"], first[0]["unbudgeted_peak_bytes"]
    budgets = [str(int(high + share * (low - high))) for share in (-0.1, 0.3, 0.6, 1.0)]
    costs = answer(capsys, f"{project}:Text", *sizes, "--budget", ",".join(budgets))["sizes"][0]["budgets"]
    shares = [cost["added_share"] for cost in costs]
    assert shares[0] == 0 < shares[1]
    assert shares == sorted(shares)
    assert all(cost["fits"] and cost["predicted_peak_bytes"] <= cost["budget_bytes"] for cost in costs)
    assert shares[-1] < 0.5  # a forward is a third of a step


def test_a_lightning_module_with_its_own_loader(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its batches are stretched, its logging is off, and text for people comes out."""
    arguments = [
        "explain",
        f"{project}:Lit",
        "--init",
        "layers=3",
        "--size",
        "batch=4,input_ids:1=48",
        "--budget",
        "1GB",
    ]
    assert main([*arguments, "--optimizer", "sgd"]) == 0
    out = capsys.readouterr().out
    assert "fits as is" in out
    assert "(smallest)" in out
    assert "\x1b" not in out


def test_a_dimension_that_cannot_be_scaled_keeps_its_size(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of one size only: the batch is scaled down alone."""
    sizes = ("--size", "batch=16,side=24", "--batch", f"{project}:images")
    document = answer(capsys, f"{project}:FixedImages", *sizes)
    assert {size["side"] for size in document["learnt_sizes"]} == {24}
    assert max(size["batch"] for size in document["learnt_sizes"]) <= 8
    assert document["sizes"][0]["trusted"]


@pytest.mark.parametrize("batch", [8, 16, 17, 24, 33])
def test_a_batch_of_other_kernels_is_learnt_from_such(batch: int) -> None:
    """On one thread, convolutions by a point are others from sixteen rows on."""
    known = learn(
        Points(),
        lambda size: {"x": torch.randn(size["batch"], 16, 12, 12)},
        [{"batch": batch}],
        device=torch.device("cpu"),
    )
    assert known.advisor.timeline(known.batches[0])[1].trusted
    assert all((size["batch"] < 16) == (batch < 16) for size in known.sizes)


def test_batches_of_different_kernels_are_both_learnt() -> None:
    """Each from those on its side."""
    known = learn(
        Points(),
        lambda size: {"x": torch.randn(size["batch"], 16, 12, 12)},
        [{"batch": 8}, {"batch": 33}],
        device=torch.device("cpu"),
    )
    assert all(known.advisor.timeline(batch)[1].trusted for batch in known.batches)
    assert {8, 33}.isdisjoint(size["batch"] for size in known.sizes)


def test_a_model_of_transformers_needs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Built from its configuration, its batches made up; only the document is on stdout."""
    pytest.importorskip("transformers")
    small = ["hidden_size=32", "num_hidden_layers=2", "intermediate_size=64", "num_attention_heads=2", "vocab_size=100"]
    init = [part for option in small for part in ("--init", option)]
    document = answer(
        capsys,
        "transformers:BertForSequenceClassification",
        *init,
        "--size",
        "batch=4,input_ids:1=64",
        "--budget",
        "50%",
    )
    assert document["sizes"][0]["budgets"][0]["fits"]
    assert document["sizes"][0]["trusted"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.at.all:Model", "--size", "batch=2"], "could not be imported"),
        (["{p}:Missing", "--size", "batch=2"], "could not be imported"),
        (["no-colon", "--size", "batch=2"], "package.module:Name"),
        (["{p}:number", "--size", "batch=2"], "is a int"),
        (["{p}:text", "--size", "batch=2"], "could not be built"),
        (["{p}:factory", "--init", "width=3", "--size", "batch=2"], "--init name=value"),
        (["{p}:instance", "--init", "a=3", "--size", "batch=2"], "is a model already"),
        (["{p}:instance", "--size", "batch=2"], "--batch"),
        (["{p}:Manual", "--size", "batch=2,input_ids:1=16"], "automatic_optimization=False"),
        (["{p}:Lossless", "--size", "batch=2,tokens=16"], "Name a LightningModule, or a model that returns its loss"),
        (["{p}:Lit", "--size", "batch=2,words=16"], "it has batch, input_ids:1"),
        (["{p}:Text", "--size", "batch=2,words=16"], "make_batch(batch=2, words=16) failed"),
        (["{p}:Broken", "--batch", "{p}:text", "--size", "batch=2,tokens=16"], "no such luck, really"),
        (["{p}:Text", "--size", "batch=two"], "batch=8,input_ids:1=512"),
        (["{p}:Text", "--size", "batch=2", "--size", "tokens=2"], "same dimensions"),
        (["{p}:Text", "--size", "batch=2,tokens=16", "--budget", "lots"], "could not be read"),
        (["{p}:Text", "--size", "batch=2,tokens=16", "--units", "nothing*"], "nothing*"),
    ],
)
def test_errors_are_one_line_and_code_2(
    project: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """No traceback, nothing on stdout."""
    assert main(["explain", *(argument.replace("{p}", project) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("lightning-mimose: ")
    assert says in line
    assert "Traceback" not in err


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the package's; a missing command is a usage error, and `main` returns either way."""
    import lightning_mimose

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == lightning_mimose.__version__
    assert main([]) == 2
    assert main(["explain", "a:b"]) == 2


def test_models_are_built_from_what_is_named(project: str) -> None:
    """A class, a function with arguments, an instance."""
    assert type(build(f"{project}:Text", {})).__name__ == "Text"
    assert build(f"{project}:factory", {"hidden": 16}).embed.embedding_dim == 16  # type: ignore[union-attr]
    instance = load(f"{project}:instance")
    assert build(f"{project}:instance", {}) is instance


class Pair(NamedTuple):
    """A named tuple batch."""

    x: torch.Tensor
    y: torch.Tensor


def test_stretching_keeps_kinds_values_and_equal_dimensions() -> None:
    """Tuples, named tuples and dicts; content repeats; what was equal in every batch follows."""
    pair = stretch([Pair(torch.arange(6).reshape(2, 3), torch.tensor([0, 1]))], {"batch": 4, "x:1": 2})
    assert isinstance(pair, Pair)
    assert pair.x.tolist() == [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert pair.y.tolist() == [0, 1, 0, 1]
    batches = [(torch.zeros(2, n), {"mask": torch.zeros(2, n), "side": torch.zeros(2, 5)}) for n in (5, 6)]
    first, rest = stretch(batches, {"0:1": 9})
    assert (first.shape[1], rest["mask"].shape[1], rest["side"].shape[1]) == (9, 9, 5)


def test_stretching_an_unknown_dimension_is_refused() -> None:
    """The message names those there are."""
    with pytest.raises(MimoseError, match="it has batch, x:1"):
        stretch([{"x": torch.zeros(2, 3)}], {"length": 4})


def test_an_example_input_array_is_a_batch() -> None:
    """The last resort of a model of one's own."""
    model = nn.Linear(3, 1)
    model.example_input_array = torch.zeros(2, 3)  # type: ignore[assignment]
    assert batch_maker(model, "x:y", None)({"batch": 7}).shape == (7, 3)


def test_a_lightning_module_without_loader_is_not_asked_for_one() -> None:
    """Lightning's own `train_dataloader` raises; that is no answer for a user."""
    with pytest.raises(MimoseError, match="--batch"):
        batch_maker(pl.LightningModule(), "x:y", None)
