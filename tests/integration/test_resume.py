"""Checkpoints carry what was learnt, as plain data; what does not belong to this model is dropped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mimose import MimoseCallback
from tests.helpers.fits import batches, run, same
from tests.helpers.models import Task, TinyText, TinyVision, loader, quiet_trainer

KEY = "MimoseCallback"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run that learnt all it needs."""
    fit = run(MimoseCallback("1GB"), metered=False)
    fit.trainer.save_checkpoint(tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def resume(callback: MimoseCallback, path: Path, kind: str = "text", **options: Any) -> list[bool]:
    """Fit on from a checkpoint; which of the new steps were sheltered."""
    task = Task(TinyVision() if kind == "vision" else TinyText(), **options.pop("task", {}))
    trainer = quiet_trainer(callback, max_epochs=2, **options)
    trainer.fit(task, loader(batches(kind)), ckpt_path=path)
    return [record.sheltered for record in callback.records]


def test_a_resumed_run_plans_from_its_first_step(checkpoint: Path) -> None:
    """Under another budget too: what was learnt is about the model."""
    sheltered = resume(MimoseCallback("2GB"), checkpoint)
    assert len(sheltered) == 12
    assert not any(sheltered)


def test_model_checkpoints_carry_it_too(tmp_path: Path) -> None:
    """Those of Lightning's own callback, in the middle of a run."""
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1)
    run(MimoseCallback("1GB"), keep, metered=False, enable_checkpointing=True)
    path = next(iter(tmp_path.glob("*step=8.ckpt")))
    callback = MimoseCallback("1GB")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # ModelCheckpoint's own state
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        sheltered = resume(callback, path)
    assert sheltered
    assert not any(sheltered)


def test_it_is_plain_data(checkpoint: Path) -> None:
    """`weights_only=True` loads it: numbers and strings, no classes of this package."""
    assert torch.load(checkpoint, weights_only=True)["callbacks"][KEY]["version"] == 26


def test_a_resumed_run_is_exact(checkpoint: Path) -> None:
    """As if there were no plugin."""
    weights = []
    for callback in (None, MimoseCallback("1GB")):
        fit_on = Task(TinyText())
        torch.manual_seed(3)
        trainer = quiet_trainer(*([callback] if callback else []), max_epochs=2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")  # a state nobody asks for
            trainer.fit(fit_on, loader(batches()), ckpt_path=checkpoint)
        weights.append({name: tensor.clone() for name, tensor in fit_on.state_dict().items()})
    assert same(*weights)


def stale(path: Path, callback: MimoseCallback, **options: Any) -> tuple[list[bool], int]:
    """Resume with everything that is shown; (which steps were sheltered, number of the plugin's warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sheltered = resume(callback, path, **options)
    return sheltered, sum("is not used" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        ({}, {"precision": "bf16-mixed"}),
        ({"units": ["Block"]}, {}),
    ],
    ids=["another precision", "other units"],
)
def test_a_stale_state_is_dropped_with_one_warning(
    checkpoint: Path, callback: dict[str, Any], options: dict[str, Any]
) -> None:
    """And the run learns again."""
    sheltered, warned = stale(checkpoint, MimoseCallback("1GB", **callback), **options)
    assert sheltered[0]
    assert warned == 1


@pytest.mark.parametrize("change", [{"version": 0}, {"fingerprint": "another model"}])
def test_other_models_and_versions_are_stale(checkpoint: Path, change: dict[str, Any]) -> None:
    """A checkpoint of another model could not load its weights here, so the state is changed instead."""
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"][KEY].update(change)
    torch.save(content, checkpoint)
    sheltered, warned = stale(checkpoint, MimoseCallback("1GB"))
    assert sheltered[0]
    assert warned == 1


def test_a_state_that_was_never_used_is_handed_on() -> None:
    """A run that could not use it does not lose it."""
    first, second = MimoseCallback("1GB"), MimoseCallback("1GB")
    run(first, metered=False)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
