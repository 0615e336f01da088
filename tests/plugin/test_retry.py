"""What a closure may have logged is put back, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_mimose.plugin.retry import keep_logged


class Results(dict[str, Any]):
    """What Lightning collects, as far as it is read."""

    batch_size: int | None = 4


def trainer_with(results: Results) -> Any:
    """A trainer that has collected some."""
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_results=results)))


def test_values_of_the_closure_are_put_back() -> None:
    """What a failed attempt has logged is as it was; what is new goes."""
    results = Results({"training_step.loss": SimpleNamespace(value=1.0)})
    undo = keep_logged(trainer_with(results))
    results["training_step.loss"].value = 9.0
    results["training_step.loss"].cached = True
    results["training_step.new"] = SimpleNamespace(value=2.0)
    results.batch_size = 7
    undo()
    assert list(results) == ["training_step.loss"]
    assert vars(results["training_step.loss"]) == {"value": 1.0}
    assert results.batch_size == 4


def test_values_that_no_closure_logs_are_not_copied() -> None:
    """Those of a batch's or an epoch's end, of which this package logs some: they stay, and cost nothing."""

    class Unread(SimpleNamespace):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise AssertionError("copied")

    results = Results({"on_train_batch_end.mimose/peak_bytes": Unread(), "training_step.loss": SimpleNamespace(v=1)})
    before = dict(results)
    keep_logged(trainer_with(results))()
    assert results == before


def test_without_results_there_is_nothing_to_put_back() -> None:
    """Another version of Lightning may keep them elsewhere."""
    keep_logged(SimpleNamespace(fit_loop=SimpleNamespace()))()
