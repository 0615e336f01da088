"""The callback by itself: what it refuses and when, what it leaves behind, what it answers afterwards."""

from __future__ import annotations

import copy
import gc
import json
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_mimose import (
    BudgetError,
    BudgetInfeasibleError,
    MimoseCallback,
    MimoseError,
    MimoseSingleDeviceStrategy,
    SizeError,
    UnitsError,
    UnsupportedError,
)
from lightning_mimose.engine.metering import VERIFIED_STEPS
from lightning_mimose.plugin import callback as module
from tests.helpers.fits import batches, condition, run, same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import Task, TinyText, loader, quiet_trainer, text_batch


def fit(*callbacks: pl.Callback, model: nn.Module | None = None, data: Any = None, **options: Any) -> None:
    """A fit that must leave strategy and model as they were, however it ends."""
    task = Task(model or TinyText())
    trainer = quiet_trainer(*callbacks, **options)
    before = condition(task)
    try:
        trainer.fit(task, loader(data if data is not None else batches(count=4)))
    finally:
        assert condition(task) == before
        assert "training_step" not in vars(trainer.strategy)
        assert all(c._run is None for c in callbacks if isinstance(c, MimoseCallback))


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["8 parsecs", "", -1, 0, "-8GB", "120%", 1.5, float("nan"), None, True])
def test_a_budget_that_cannot_be_read_is_refused_at_once(budget: Any) -> None:
    """In the constructor: nothing has to be built to find out."""
    with pytest.raises(BudgetError, match="budget"):
        MimoseCallback(budget)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"actions": ["fly"]}, UnsupportedError, "fly"),
        ({"planner": "best"}, MimoseError, "'auto', 'exact', 'greedy'"),
        ({"on_infeasible": "ignore"}, MimoseError, "'raise', 'warn'"),
        ({"on_oom": "pray"}, MimoseError, "'retry', 'raise'"),
        ({"host_budget": "much"}, BudgetError, "much"),
        ({"actions": 3}, UnsupportedError, r"actions=3 .* actions=\['recompute'\]"),
        ({"size_fn": 5}, SizeError, "size_fn=5 .* a function"),
    ],
)
def test_other_arguments_are_refused_at_once(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Each with what would be understood."""
    with pytest.raises(error, match=text):
        MimoseCallback("8GB", **options)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("on_infeasible", "Warn", MimoseError), ("on_oom", "Retry", MimoseError), ("host_budget", "lots", BudgetError)],
)
def test_what_is_assigned_later_is_checked_when_a_fit_starts(name: str, value: str, error: type[Exception]) -> None:
    """As the constructor checks it."""
    callback = MimoseCallback("1GB")
    setattr(callback, name, value)
    with pytest.raises(error, match=value):
        fit(callback)


def test_a_budget_above_the_device_is_refused_at_start() -> None:
    """It says what the device has."""
    with pytest.raises(BudgetError, match="in all"):
        fit(MimoseCallback("900TB"))


def test_a_budget_below_what_is_resident_is_refused_at_start() -> None:
    """Before any batch: parameters, gradients and optimizer state alone exceed it."""
    callback = MimoseCallback(1000)
    with pytest.raises(BudgetInfeasibleError, match="before any activation") as caught:
        fit(callback)
    assert caught.value.budget_bytes == 1000
    assert caught.value.resident_bytes > 1000
    assert caught.value.smallest_feasible_bytes is not None
    assert callback.records == []


class Updates(pl.Callback):
    """Counts what was updated."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Not called after an error."""
        self.steps = trainer.global_step

    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        """Called after one."""
        self.steps = trainer.global_step


def test_a_batch_that_cannot_fit_is_refused_before_its_update() -> None:
    """The most saving plan was measured over the budget: no weight has moved when the error comes."""
    updates, plain = Updates(), run()
    task = Task(TinyText())
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    budget = int(max(plain.residents) * 1.1) + 200_000
    with pytest.raises(BudgetInfeasibleError, match="Give at least") as caught:
        quiet_trainer(MimoseCallback(budget), updates).fit(task, loader([text_batch(8, 96)]))
    assert updates.steps == 0
    assert same(before, task.state_dict())
    assert caught.value.smallest_feasible_bytes > budget


def test_a_batch_that_is_predicted_not_to_fit_is_refused_before_its_forward() -> None:
    """Sizes are known by then; nothing of the batch ran."""

    class Forwards(Task):
        count = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            Forwards.count += 1
            return super().training_step(batch, batch_idx)

    small = [text_batch(4, tokens, tokens) for tokens in (16, 24, 32, 40, 48, 56)]
    plain = run(data=small, task=Forwards)
    Forwards.count = 0
    with pytest.raises(BudgetInfeasibleError, match="most saving plan"):
        run(MimoseCallback(plain.budget(1.0)), data=[*small, text_batch(4, 160)], task=Forwards, metered=False)
    assert Forwards.count == len(small)


def test_on_infeasible_warn_goes_on() -> None:
    """With the most saving plan, and says so."""
    plain = run(metered=True)
    callback = MimoseCallback(int(max(plain.residents) * 1.1) + 200_000, on_infeasible="warn")
    with pytest.warns(UserWarning, match="cannot be kept"):
        budgeted = run(callback, metered=False)
    assert same(plain.weights(), budgeted.weights())
    assert len(callback.records) == 12


def test_two_callbacks_are_refused() -> None:
    """Lightning itself refuses two at construction; one that is added later is refused in setup."""
    with pytest.raises(RuntimeError, match="MimoseCallback"):
        quiet_trainer(MimoseCallback("1GB"), MimoseCallback("2GB"))
    trainer = quiet_trainer(MimoseCallback("1GB"))
    trainer.callbacks.append(MimoseCallback("2GB"))  # type: ignore[attr-defined]
    with pytest.raises(BudgetError, match="Two MimoseCallbacks"):
        trainer.fit(Task(TinyText()), loader(batches(count=2)))


def test_callback_and_strategy_cannot_both_name_a_budget() -> None:
    """Neither is silently ignored."""
    with pytest.raises(BudgetError, match="Name it once"):
        fit(MimoseCallback("1GB"), strategy=MimoseSingleDeviceStrategy(budget="2GB"))


def test_a_strategy_that_names_none_gives_way_to_the_callback() -> None:
    """`Trainer(strategy="mimose", callbacks=[MimoseCallback("1GB")])` names one budget."""
    callback = MimoseCallback("1GB")
    fit(callback, strategy="mimose")
    assert callback.budget_bytes == 10**9
    assert len(callback.records) == 4


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "MyOwnStrategy"])
def test_an_unsupported_strategy_is_refused_by_name(name: str) -> None:
    """In setup, whether it is known not to work or unknown."""
    strategy = type(name, (), {"root_device": torch.device("cpu")})()
    trainer = SimpleNamespace(callbacks=[], strategy=strategy)
    with pytest.raises(UnsupportedError, match=f"{name} .*'ddp'"):
        MimoseCallback("1GB").setup(trainer, Task(TinyText()), "fit")  # type: ignore[arg-type]


def test_other_stages_are_left_alone() -> None:
    """Nothing is planned, or refused, where nothing is trained."""
    strategy = type("FSDPStrategy", (), {})()
    MimoseCallback("1GB").setup(SimpleNamespace(callbacks=[], strategy=strategy), None, "test")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:No unit of Constant was called", "ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: {"callback": MimoseCallback("1GB", units=["nowhere.*"])},
            UnitsError,
            r"'nowhere\.\*'.*Names look like",
        ),
        (lambda: {"callback": MimoseCallback("1GB", units="layers.*")}, UnitsError, r"as units=\['layers\.\*'\]"),
        (lambda: {"callback": MimoseCallback("1GB", units=[3])}, UnitsError, r"a list of patterns"),
        (lambda: {"task": "iterating"}, UnsupportedError, "takes dataloader_iter"),
        (lambda: {"model": nn.Linear(2, 2), "task": "bare"}, UnitsError, "nothing to plan"),
        (lambda: {"data": ["words"], "task": "constant"}, SizeError, "no tensor"),
        (lambda: {"data": [*batches(count=3), torch.zeros(4, 8)], "task": "constant"}, SizeError, "was a dict before"),
        (lambda: {"callback": MimoseCallback("1GB", size_fn=lambda batch: "big")}, SizeError, "size_fn returned 'big'"),
    ],
    ids=[
        "units",
        "no list of units",
        "units that are no names",
        "dataloader_iter",
        "nothing to plan",
        "no tensors",
        "another type",
        "size_fn",
    ],
)
def test_bad_models_and_batches_are_named(
    make: Callable[[], dict[str, Any]], error: type[Exception], text: str
) -> None:
    """A typed error each, and a model as it was."""

    class Constant(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return sum(p.sum() for p in self.parameters())  # type: ignore[return-value]

    class Iterating(Task):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            return self.model(**next(dataloader_iter)[0]).loss  # type: ignore[operator, no-any-return]

    case = make()
    kind = {"constant": Constant, "bare": Constant, "iterating": Iterating}.get(case.get("task", ""), Task)
    task = kind(case.get("model") or TinyText())
    if case.get("task") == "bare":
        task.__class__.forward = lambda self: None  # type: ignore[method-assign]
    trainer, before = quiet_trainer(case.get("callback") or MimoseCallback("1GB")), condition(task)
    with pytest.raises(error, match=text):
        trainer.fit(task, loader(case.get("data") or batches(count=2)))
    assert condition(task) == before
    assert "training_step" not in vars(trainer.strategy)


def test_a_device_without_memory_counters_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, no effect."""
    monkeypatch.setattr(module, "has_memory_counters", lambda device: False)
    plain, callback = run(metered=False), MimoseCallback("1GB")
    with pytest.warns(UserWarning, match="no memory counters") as caught:
        budgeted = run(callback, metered=False)
    assert sum("mimose" in str(w.message) for w in caught) == 1
    assert same(plain.weights(), budgeted.weights())
    assert callback.records == []
    assert callback.state_dict() == {}


# --- what is left behind --------------------------------------------------------------------------------------


class Fails(Task):
    """Fails in its third step, where it is told to."""

    where = "forward"
    error: type[BaseException] = ZeroDivisionError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss, or an error."""
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.where == "forward":
            raise self.error
        if batch_idx == 2 and self.where == "backward":
            loss.register_hook(self._raise)
        return loss

    def on_validation_batch_start(self, *args: Any) -> None:
        """Fails during a validation."""
        if self.where == "validation":
            raise self.error

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""

    def _raise(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
def test_after_an_exception_the_model_is_as_it_was(where: str) -> None:
    """No patched forward, no hook, no profiler: the fixtures look for the last."""
    task, callback = Fails(TinyText()), MimoseCallback("1GB")
    task.where = where
    before, trainer = condition(task), quiet_trainer(callback, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(task, loader(batches(count=4)), loader(batches(count=1)))
    assert condition(task) == before
    assert "training_step" not in vars(trainer.strategy)
    assert len(callback.records) == (4 if where == "validation" else 2)


def test_after_an_interrupt_the_model_is_as_it_was() -> None:
    """Lightning turns the interrupt into an exit."""
    import signal

    handler = signal.getsignal(signal.SIGINT)
    task = Fails(TinyText())
    task.error = KeyboardInterrupt
    before = condition(task)
    try:
        with pytest.raises(SystemExit):
            quiet_trainer(MimoseCallback("1GB")).fit(task, loader(batches(count=4)), loader(batches(count=1)))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert condition(task) == before


def test_nothing_keeps_the_model_alive() -> None:
    """After teardown the callback holds numbers, though the user holds the callback."""
    callback, task = MimoseCallback("1GB"), Task(TinyText())
    quiet_trainer(callback).fit(task, loader(batches(count=6)))
    alive = weakref.ref(task), weakref.ref(task.model)
    del task
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert callback.report().to_dict()["aggregates"]["steps"] == 6


def test_answers_outlive_the_model() -> None:
    """Plan, least budget and report, by batch and by size, from numbers alone."""
    plain = run()
    callback = MimoseCallback(plain.budget(0.7))
    run(callback, metered=False)
    size = {"batch": 4, "input_ids:1": 80}
    least = callback.smallest_feasible_bytes(size)
    plan = callback.plan(size)
    assert plan.predicted_peak_bytes <= callback.budget_bytes  # type: ignore[operator]
    assert callback.plan(text_batch(4, 80)) == plan
    assert least == callback.smallest_feasible_bytes(text_batch(4, 80))
    assert not callback.plan(size, budget=10**9)
    assert callback.plan(size, budget=least).predicted_peak_bytes <= least
    with pytest.raises(BudgetInfeasibleError) as caught:
        callback.plan(size, budget=least // 3)
    assert caught.value.smallest_feasible_bytes == least
    with pytest.raises(SizeError, match="Name dimensions"):
        callback.plan({"pixels": 4})
    assert json.loads(json.dumps(callback.report().to_dict()))["budget_bytes"] == callback.budget_bytes


def test_asking_before_training_is_refused() -> None:
    """With what to do; the report of nothing is a report."""
    callback = MimoseCallback("1GB")
    with pytest.raises(MimoseError, match="Nothing is known before training"):
        callback.plan({"batch": 4})
    assert callback.budget_bytes is None
    assert "No training step" in str(callback.report())


def test_a_second_fit_appends_and_remembers() -> None:
    """Records go on, and the second fit plans from its first step."""
    callback = MimoseCallback("1GB")
    run(callback, metered=False)
    assert callback.records[0].sheltered
    run(callback, metered=False)
    assert [r.step for r in callback.records] == list(range(24))
    assert not any(r.sheltered for r in callback.records[12:])
    assert callback.report().aggregates.steps == 24


def test_a_second_fit_of_another_model_starts_anew() -> None:
    """Without a word: nobody expects knowledge about one model to do for another."""
    callback = MimoseCallback("1GB")
    run(callback, metered=False)
    run(callback, kind="vision", metered=False)
    assert callback.records[12].sheltered
    assert callback.records[-2].size.keys() == {"batch", "pixel_values:2"}


def test_a_budget_that_is_assigned_in_mid_run_holds_from_the_next_batch_on() -> None:
    """With what is known of the model; a later fit goes on with it, and what cannot be read is refused at once."""

    class Tighter(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 11:
                callback.budget = plain.budget(0.6)

    data = batches(count=20)
    plain = run(data=data)
    callback = MimoseCallback(plain.budget(0.9))
    budgeted = run(callback, Tighter(), data=data, accumulate_grad_batches=2)
    assert {record.budget_bytes for record in callback.records[:12]} == {plain.budget(0.9)}
    assert {record.budget_bytes for record in callback.records[12:]} == {plain.budget(0.6)}
    assert max(budgeted.peaks[12:]) <= plain.budget(0.6)
    assert sum(record.sheltered for record in callback.records[12:]) <= 1
    assert same(run(data=data, accumulate_grad_batches=2).weights(), budgeted.weights())
    with pytest.raises(BudgetError):
        callback.budget = "8 parsecs"
    run(callback, data=data[:1])
    assert callback.records[-1].budget_bytes == plain.budget(0.6)


def test_layers_that_are_unfrozen_in_mid_run_are_learnt_again() -> None:
    """What was measured of a frozen model is no plan for a trained one, and its optimizer state is yet to come."""

    class Unfreezing(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.model.layers.requires_grad_(False)  # type: ignore[union-attr]
            pl_module.model.embed.requires_grad_(False)  # type: ignore[union-attr]

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                pl_module.requires_grad_(True)

    data = batches(count=8)
    plain = run(Unfreezing(), data=data, max_epochs=2)
    callback = MimoseCallback(plain.budget(0.8))
    budgeted = run(Unfreezing(), callback, data=data, max_epochs=2)
    assert callback.records[8].sheltered
    assert max(budgeted.peaks) <= plain.budget(0.8)
    assert same(plain.weights(), budgeted.weights())


def test_layers_that_the_module_unfreezes_in_its_own_hook_are_learnt_at_once() -> None:
    """It runs after the callback's, which has planned the batch by then."""

    class Unfreezing(Task):
        def on_fit_start(self) -> None:
            self.model.embed.requires_grad_(False)  # type: ignore[union-attr]
            self.model.layers[:2].requires_grad_(False)  # type: ignore[union-attr, index]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 12:
                self.requires_grad_(True)

    data = batches(count=16)
    plain = run(task=Unfreezing, data=data)
    callback = MimoseCallback(plain.budget(0.6))
    budgeted = run(callback, task=Unfreezing, data=data)
    assert [record.sheltered for record in callback.records][11:13] == [False, True]
    assert max(budgeted.peaks) <= plain.budget(0.6)
    assert same(plain.weights(), budgeted.weights())


def test_optimizer_state_of_what_is_unfrozen_in_mid_epoch_is_reserved() -> None:
    """Before the first update makes it: it may be larger than all activations."""

    class Unfreezing(Task):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                self.requires_grad_(True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    peaks = []
    for callback in ([], [MimoseCallback("9MB")]):
        meter = MeterCallback()
        task = Unfreezing(TinyText(vocabulary=20_000))
        task.model.embed.requires_grad_(False)  # type: ignore[union-attr]
        with pytest.raises(BudgetInfeasibleError, match="update alone needs") if callback else nullcontext() as refused:
            quiet_trainer(meter, *callback).fit(task, loader(batches(count=9)))
        peaks.append(meter.peaks)
    assert max(peaks[0]) > 9e6 > max(peaks[0][:6])
    assert max(peaks[1]) <= 9e6
    assert refused is not None
    assert refused.value.smallest_feasible_bytes >= max(peaks[0])


def test_a_model_that_is_pruned_in_mid_run_is_learnt_again() -> None:
    """Its weights are made from others in every forward from then on, and saved."""
    data = batches(count=8)
    pruning = partial(ModelPruning, "l1_unstructured", parameter_names=["weight"], amount=0.2, verbose=0)
    plain = run(pruning(), data=data, max_epochs=2)
    callback = MimoseCallback(plain.budget(0.7))
    budgeted = run(callback, pruning(), data=data, max_epochs=2)
    assert not callback.records[7].sheltered
    assert callback.records[8].sheltered
    assert max(budgeted.peaks) <= plain.budget(0.7)
    assert same(plain.weights(), budgeted.weights())


class Renewing(Task):
    """Replaces a block by a new one of the same shapes before the second epoch."""

    def on_train_epoch_start(self) -> None:
        """By one that begins where the old one ended."""
        if self.current_epoch == 1:
            blocks = cast(nn.ModuleList, self.model.layers)
            old, blocks[1] = blocks[1], copy.deepcopy(blocks[0])
            vars(blocks[1]).pop("forward", None)  # it was copied in mid-training
            blocks[1].load_state_dict(old.state_dict())
            self.trainer.optimizers[0].add_param_group({"params": list(blocks[1].parameters())})


def test_a_block_that_is_replaced_is_planned() -> None:
    """As the one before it was, from the next epoch on."""
    plain = run(task=Renewing, data=batches(count=8), max_epochs=2)
    callback = MimoseCallback(plain.budget(0.7), actions=["recompute"])
    budgeted = run(callback, task=Renewing, data=batches(count=8), max_epochs=2)
    assert max(budgeted.peaks) <= plain.budget(0.7)
    assert same(plain.weights(), budgeted.weights())
    again = [record for record in callback.records if record.epoch == 1 and not record.sheltered]
    assert any("model.layers.1" in unit for record in again for unit in record.actions)


def test_a_size_that_says_nothing_is_measured_until_predictions_hold() -> None:
    """Some that were far too high are no reason to look away."""
    callback = MimoseCallback(run(data=batches(count=2)).budget(5.0), size_fn=lambda batch: 7)
    lengths = [64, 16] * 8
    run(callback, data=[text_batch(4, length) for length in lengths], metered=False)
    planned = [record for record in callback.records if not record.sheltered]
    assert len(planned) > VERIFIED_STEPS
    assert all(record.measured_peak_bytes for record in planned)


# --- what is seen ---------------------------------------------------------------------------------------------


def test_two_lines_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """One at start, one when planning begins, by the logger whose lines Lightning shows."""
    with caplog.at_level(logging.INFO):
        run(MimoseCallback("1GB"), metered=False)
    lines = [(r.name, r.getMessage()) for r in caplog.records if r.getMessage().startswith("mimose:")]
    assert [name.startswith("lightning.") for name, _ in lines] == [True, True]
    assert lines[0][1].startswith("mimose: budget 1,000,000,000 bytes (1.00 GB) on ")
    assert lines[0][1].endswith("6 units found")
    assert lines[1][1].endswith("sizes measured, planning begins")


def test_metrics_reach_logger_and_progress_bar() -> None:
    """Under `mimose/`."""
    callback = MimoseCallback("1GB")
    fit = run(callback, metered=False, log_every_n_steps=1)
    assert {"mimose/budget_bytes", "mimose/recomputed_units", "mimose/epoch/peak_bytes"} <= set(
        fit.trainer.logged_metrics
    )
    assert "mimose/recomputed_units" in fit.trainer.progress_bar_metrics
    assert fit.trainer.callback_metrics["mimose/epoch/budget_bytes"] == 10**9


# --- Hugging Face's own switches ------------------------------------------------------------------------------


def bert(checkpointed: bool) -> nn.Module:
    """A small BERT, with its own gradient checkpointing on or off."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForSequenceClassification(config)
    if checkpointed:
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)({"use_reentrant": False})
    return model


def test_hugging_face_checkpointing_is_left_alone_with_a_warning() -> None:
    """What it recomputes is no choice of a plan; with nothing else to plan, that is an error."""
    task = Task(bert(checkpointed=True))
    trainer, before = quiet_trainer(callback := MimoseCallback("1GB")), condition(task)
    with pytest.warns(UserWarning, match=r"Call (activation|gradient)_checkpointing_disable\(\)"):
        trainer.fit(task, loader(batches(count=4)))
    planned = {unit for record in callback.records for unit in record.actions}
    assert not any(".encoder.layer." in unit for unit in planned)
    assert condition(task) == before
    layers = MimoseCallback("1GB", units=["*.encoder.layer.?"])
    with pytest.raises(UnitsError, match="switch"):
        quiet_trainer(layers).fit(task, loader(batches(count=2)))
    assert condition(task) == before


def test_caches_are_switched_back_on() -> None:
    """`use_cache` is off during the fit and what it was afterwards, also when the fit fails."""
    seen = []

    class Looks(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(self.model.config.use_cache)
            return super().training_step(batch, batch_idx)

    task = Looks(bert(checkpointed=False))
    task.model.config.use_cache = True
    before = condition(task)
    quiet_trainer(MimoseCallback("1GB")).fit(task, loader(batches(count=2)))
    assert seen == [False, False]
    assert condition(task) == before
    with pytest.raises(SizeError):
        quiet_trainer(MimoseCallback("1GB")).fit(task, loader([*batches(count=2), "text"]))  # type: ignore[list-item]
    assert condition(task) == before
