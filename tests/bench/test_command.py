"""`lightning-mimose bench`: a seconds-long form of the real benchmark, and what it says when asked wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_mimose.bench.alternatives import ALTERNATIVES
from lightning_mimose.bench.command import Options
from lightning_mimose.bench.runner import Case, Runner
from lightning_mimose.bench.work import Work
from lightning_mimose.command import main
from lightning_mimose.explain.samples import build, loader_batches
from tests.helpers.projects import write_project

EVERYTHING = ",".join(name for name, alternative in ALTERNATIVES.items() if not alternative.takes_minutes)

PROJECT = '''
import threading
import lightning.pytorch as pl
import torch
from tests.helpers.models import TinyText, loader, text_batch

class Lit(pl.LightningModule):
    """Logs, prints, and brings its own batches."""

    def __init__(self, layers=4):
        super().__init__()
        self.model = TinyText(layers, 32)

    def training_step(self, batch, batch_idx):
        print("noise from the model")
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return loader([text_batch(4, n) for n in (24, 40, 64, 32, 48)])

class Whole(Lit):
    """Makes its layers, data and loaders where Lightning asks for them."""

    def __init__(self):
        super().__init__(0)
        self.configured = 0

    def configure_model(self):
        self.configured += 1
        self.model = TinyText(4, 32)

    def setup(self, stage):
        self.texts = [text_batch(2, n) for n in (24, 40, 64, 32, 48)]
        self.lock = threading.Lock()  # what a file of data has
        self.steps = self.trainer.estimated_stepping_batches

    def training_step(self, batch, batch_idx):
        return sum(super(Whole, self).training_step(each, batch_idx) for each in batch)

    def train_dataloader(self):
        return [loader(self.texts), loader(self.texts[:2])]

class Torn(Whole):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        pass

    def setup(self, stage):
        self.model = TinyText(4, 32)
        super().setup(stage)

def ready():
    model = Whole()
    model.configure_model()
    return model

class Empty(Lit):
    def train_dataloader(self):
        return loader([])

class Text(TinyText):
    def make_batch(self, batch, tokens):
        return text_batch(batch, tokens)

class Bad(Text):
    def forward(self, **batch):
        raise ValueError("wrong\\nshape")
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory."""
    return write_project(PROJECT, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_whole_benchmark_in_seconds(project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every alternative but the compiled one, a LightningModule of the user's, table, JSON and plots.

    A step of this model is all overhead, so its times say nothing; peaks, bits and operations are the real ones.
    """
    arguments = [f"{project}:Lit", "--budget", "0.6", "--repeats", "2", "--output", "out"]
    assert main(["bench", *arguments, "--alternatives", EVERYTHING]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "noise from" not in shown
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {"date", "hardware", "versions", "works"} <= document.keys()
    (work,) = document["works"]
    (budget,) = work["budgets"]
    rows = {row["name"]: row for row in budget["alternatives"]}
    assert list(rows) == EVERYTHING.split(",")
    assert not {name: row["why"] for name, row in rows.items() if row["status"] not in ("ran", "simulated")}
    for name in ("ours", "recompute"):
        figures = rows[name]["figures"]
        assert figures["steps_over"]["high"] == 0
        assert figures["bit_equal"]
        assert figures["sheltered_steps"] > 0
        assert figures["utilisation"]["value"] <= 1
    assert rows["plain"]["figures"]["steps_over"]["high"] > 0
    assert rows["plain"]["figures"]["time"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rows["layers"]["figures"]["added_operations"] > 0
    assert len(rows["ours"]["seconds"]) == len(rows["ours"]["peaks_bytes"]) == 2
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == ["frontier-Lit.png", "peaks-Lit-0.6.png"]


def test_a_module_is_set_up_as_lightning_does(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its hooks have run before batches are taken; of several loaders they are combined as in training."""
    arguments = [f"{project}:Whole", "--steps", "3", "--repeats", "1", "--alternatives", "layers", "--json"]
    assert main(["bench", *arguments]) == 0
    (work,) = json.loads(capsys.readouterr().out)["works"]
    assert "3 batches" in work["description"]
    rows = {row["name"]: row for row in work["budgets"][0]["alternatives"]}
    assert rows["layers"]["figures"]["bit_equal"]


def test_what_a_function_returns_is_not_configured_again(project: str) -> None:
    """It may have been given weights."""
    for name in ("Whole", "ready"):
        model: Any = build(f"{project}:{name}", {})
        assert model.configured == 1
        for loaders, kind in (
            ([0, 1], int),
            ({"a": [0], "b": [1]}, dict),
            (CombinedLoader([[0], [1]], "min_size"), list),
        ):
            type(model).train_dataloader = lambda self, loaders=loaders: loaders
            assert {type(batch) for batch in loader_batches(model, 3)} == {kind}


def test_one_batch_of_each_size(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "batch=4,tokens=40", "--size", "batch=4,tokens=80"]
    asked = ["bench", f"{project}:Text", *sizes, "--init", "layers=4", "--alternatives", "layers", "--repeats", "1"]
    assert main([*asked, "--budget", "0.6", "--json"]) == 0
    (work,) = json.loads(capsys.readouterr().out)["works"]
    assert [len(row["seconds"][0]) for row in work["budgets"][0]["alternatives"]] == [2, 2, 2]


def test_an_alternative_that_fails_has_a_row_that_says_why(
    project: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> Runner:
        raise RuntimeError("no such luck,\nreally")

    monkeypatch.setitem(ALTERNATIVES, "layers", replace(ALTERNATIVES["layers"], make=broken))
    size = ["--size", "batch=2,tokens=16", "--budget", "0.9", "--repeats", "1"]
    assert main(["bench", f"{project}:Text", *size, "--alternatives", "layers"]) == 0
    shown = capsys.readouterr().out
    assert "failed" in shown
    assert "RuntimeError: no such luck, really" in shown


@pytest.mark.parametrize("steps", [1, 4, 6, 7, 10])
def test_an_alternative_that_fails_late_loses_its_row_only(
    steps: int, project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first epoch, at a second timed batch, at either batch of a peaks pass, in the last timed pass."""

    class Late(Runner):
        left = steps

        def step(self, batch: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("enough")
            super().step(batch)

    def no_recording(*_: Any) -> None:
        raise RuntimeError("cannot be recorded")

    monkeypatch.setattr("lightning_mimose.bench.race.recordings", no_recording)
    monkeypatch.setitem(ALTERNATIVES, "layers", replace(ALTERNATIVES["layers"], make=Late))
    asked = ["--size", "batch=2,tokens=8", "--size", "batch=2,tokens=16", "--budget", "0.9,0.90", "--repeats", "2"]
    assert main(["bench", f"{project}:Text", *asked, "--alternatives", "layers,dtr", "--json"]) == 0
    (budget,) = json.loads(capsys.readouterr().out)["works"][0]["budgets"]  # the same budget twice is one
    rows = {row["name"]: row for row in budget["alternatives"]}
    assert {name: row["why"] for name, row in rows.items() if row["status"] == "failed"} == {
        "layers": "RuntimeError: enough",
        "dtr": "RuntimeError: cannot be recorded",
    }
    assert all(len(epoch) == 2 for epoch in rows["layers"]["peaks_bytes"] + rows["layers"]["seconds"])
    assert set(rows["layers"]["figures"].values()) == {None}
    assert rows["plain-again"]["figures"]["bit_equal"]
    assert len(rows["plain"]["gradients"]) == 4  # of the first epoch, and of the last metered one


def test_a_plain_row_that_fails_ends_its_work_in_one_line(
    project: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> Runner:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setitem(ALTERNATIVES, "plain", replace(ALTERNATIVES["plain"], make=broken))
    asked = ["bench", f"{project}:Text", "--size", "batch=2,tokens=8", "--alternatives", "plain"]
    assert main(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use smaller sizes (--size), fewer batches (--steps)" in line


def test_a_work_that_fails_leaves_the_others_running(
    project: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def makes(options: Options, device: torch.device) -> Iterator[Callable[[], Work]]:
        for name, error in (("first", "ValueError: wrong"), ("second", "")):
            yield lambda name=name, error=error: Work(name, "", lambda: Net(error), (torch.ones(2, 4),), loss)  # type: ignore[misc]

    class Net(torch.nn.Linear):
        def __init__(self, error: str) -> None:
            super().__init__(4, 4)
            self.error = error

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model.error:
            raise ValueError(model.error)
        total: torch.Tensor = model(batch).sum()
        return total

    monkeypatch.setattr("lightning_mimose.bench.command._works", makes)
    assert main(["bench", "--alternatives", "plain", "--repeats", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [work["name"] for work in document["works"]] == ["second"]
    assert "first failed: ValueError" in document["left_out"]["first"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alternatives", "ours,magic"], "no alternative magic"),
        (["--work", "bert-squid"], "no work 'bert-squid'"),
        (["--scale", "enormous"], "no scale 'enormous'"),
        (["no.such.module:Model"], "could not be imported"),
        (["{project}:Nothing"], "could not be imported"),
        (["--budget", "much"], "much"),
        (["--budget", "auto"], "has no meaning here"),
        (["--budget", "0"], "share of the plain run's activation memory"),
        (["--size", "batch=8"], "model of your own"),
        (["{project}:Text", "--work", "gpt2"], "Choose one"),
        (["{project}:Text"], "no train_dataloader"),
        (["{project}:Empty"], "or it gives none"),
        (["{project}:Torn"], "cannot be copied any more once its setup() has run"),
        (["./{project}.py:Text"], "and no path"),
        (["{project}:Text", "--size", "batch"], "cannot be read"),
        (["{project}:Text", "--size", "batch=2,tokens=8", "--budget", "1KB"], "resident before a step begins"),
        (["{project}:Bad", "--size", "batch=2,tokens=8"], "of Bad failed: ValueError: wrong shape"),
        (["--output", "{project}.py"], "is a file"),
        (["--output", "{project}.py/below"], "is a file"),
        (["--output", "/proc/nowhere"], "cannot be written to"),
        (["--repeats", "0"], "must be 1 or more"),
        (["--batch-size", "0"], "must be 1 or more"),
        (["{project}:Text", "--batch-size", "4"], "is for built-in works"),
        (["--scale", "paper"], "meant for a GPU"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(argument.format(project=project) for argument in arguments)]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert said in line
    assert not shown.out


def test_without_transformers_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench"]) == 2
    assert "lightning-mimose[bench]" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured_that_could_not_be_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--scale", "tiny", "--output", str(tmp_path / "out")]) == 2
    assert "lightning-mimose[plots]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
