"""Other people's hooks, and whatever else reaches into a step: they see what they would see without the plugin."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_mimose import Mimose, MimoseCallback
from lightning_mimose.predict.ample import PATIENCE_STEPS
from tests.helpers.fits import run, same
from tests.helpers.models import Batch, Block, Task, TinyText, ValidatedTask, loader, quiet_trainer, text_batch
from tests.helpers.pairs import Runs, few, pair, rerun

HOOKS = "Other people's hooks"


# --- saved tensors --------------------------------------------------------------------------------------------


def halved() -> Any:
    """Hooks that keep less than they are given: whoever passes them by computes something else."""
    return saved_tensors_hooks(
        lambda t: (t.bfloat16() if t.is_floating_point() else t, t.dtype), lambda kept: kept[0].to(kept[1])
    )


class Saving(Task):
    """Its forward runs inside hooks of its author's own."""

    hooks: Callable[[], Any] = nullcontext

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The hooks are gone when backward begins."""
        with self.hooks():
            return super().training_step(batch, batch_idx)


class SavingOnCpu(Saving):
    """Torch's own offloading."""

    hooks = staticmethod(save_on_cpu)


class SavingHalves(Saving):
    """Compresses."""

    hooks = staticmethod(halved)


class SavingWithout(Saving):
    """Forbids all hooks."""

    hooks = staticmethod(lambda: disable_saved_tensors_hooks("none of them here"))


@pytest.mark.parametrize(
    ("task", "named"),
    [
        pytest.param(
            task, named, marks=pytest.mark.conformance(HOOKS, what, "guarded"), id=what.partition(" ")[0].strip(",")
        )
        for task, named, what in [
            (SavingOnCpu, "of your own", "save_on_cpu around the forward"),
            (SavingHalves, "of your own", "saved_tensors_hooks around the forward, compressing ones too"),
            (SavingWithout, "No unit", "disable_saved_tensors_hooks around the forward"),
        ]
    ],
)
def test_hooks_around_the_forward(task: type[Task], named: str) -> None:
    """They decide what is kept: a recomputation would pass them by. One line names the unit."""
    plain = run(task=task, data=few(), metered=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = run(MimoseCallback("1GB"), task=task, data=few(), metered=False)
    assert same(plain.weights(), fit.weights())
    assert len([w for w in caught if named in str(w.message)]) == 1


class SavesInside(nn.Module):
    """A block that offloads what its own middle saves."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.second = Block(hidden), Block(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hooks inside a unit take those tensors away from a checkpoint around it."""
        with save_on_cpu():
            x = self.first(x)
        return self.second(x)


class WithInside(Task):
    """Such blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.layers = nn.ModuleList(SavesInside() for _ in range(3))


@pytest.mark.filterwarnings("ignore:Unit .* inside saved-tensor hooks of your own")
@pytest.mark.conformance(HOOKS, "saved_tensors_hooks inside a block", "works")
@pytest.mark.parametrize("actions", [["recompute"], ["lean"]], ids=["recompute", "lean"])
def test_hooks_inside_a_unit(actions: list[str]) -> None:
    """What they took stays theirs; the rest of the block is recomputed, or rebuilt."""
    pair(0.85, task=WithInside, actions=actions)


# --- more of backward than usual ------------------------------------------------------------------------------


class Penalised(Task):
    """A gradient penalty: the gradient with respect to the embeddings is part of the loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """A backward inside the forward, and then one through it."""
        x = start = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.model.head(x.mean(1)), batch["labels"])
        (slope,) = torch.autograd.grad(loss, start, create_graph=True)
        return loss + slope.pow(2).sum()


class Retaining(Task):
    """Two backward passes over one graph."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """The first one keeps the graph."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.model(**batch).loss
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        optimizer.step()


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=pytest.mark.conformance(HOOKS, what, "guarded"), id=task.__name__)
        for task, what in [
            (Penalised, "create_graph=True and double backward (a gradient penalty)"),
            (Retaining, "retain_graph=True, two backward passes over one graph"),
        ]
    ],
)
def test_two_backward_passes_over_one_graph(task: type[Task]) -> None:
    """What is kept lives until the second one: such steps recompute all they can, and one line says so."""
    plain = run(task=task, data=few())
    callback, counted = MimoseCallback("1GB"), Runs("mlp.0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = run(callback, counted, task=task, data=few())
    assert same(plain.weights(), fit.weights())
    assert len([w for w in caught if "backward twice over one graph" in str(w.message)]) == 1
    assert all(ran > 3 for ran in counted.batches)
    assert max(fit.peaks) < max(plain.peaks)


@pytest.mark.filterwarnings("ignore:A step ran backward twice")
@pytest.mark.parametrize("task", [Penalised, Retaining])
def test_an_ample_budget_ends_the_recomputing_of_what_cannot_be_predicted(task: type[Task]) -> None:
    """Where a bound of what they keep fits, steps keep it, as in the plain run; where it does not, none does."""
    data = few(count=2 * PATIENCE_STEPS)
    plain = run(task=task, data=data)
    for budget, keeps in (("1GB", True), (max(plain.peaks), False)):
        callback, counted = MimoseCallback(budget), Runs("mlp.0")
        fit = run(callback, counted, task=task, data=data)
        assert same(plain.weights(), fit.weights())
        assert [record.sheltered for record in callback.records[PATIENCE_STEPS:]] == PATIENCE_STEPS * [not keeps]
        if keeps:
            # The graph of the kept steps is that of the plain ones.
            assert counted.batches[PATIENCE_STEPS:] == PATIENCE_STEPS * [3]
            assert fit.peaks[PATIENCE_STEPS:] == pytest.approx(plain.peaks[PATIENCE_STEPS:], rel=0.01)


class Swelling(nn.Module):
    """Takes as much as its input says, and not as its size does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss, with a penalty on slopes."""
        times, start = int(x[0, 0]), x.clone().requires_grad_()
        loss = start.square().mean()
        for block in self.blocks:
            loss = loss + block(start.repeat(times, 1)).sin().mean()
        (slope,) = torch.autograd.grad(loss, start, create_graph=True)
        return loss + slope.pow(2).sum()


@pytest.mark.filterwarnings("ignore:A step ran backward twice")
def test_a_bound_that_was_broken_is_believed_no_more() -> None:
    """Batches that are not what their sizes say: from the first one on that is measured, steps are sheltered again."""
    torch.manual_seed(0)
    model = nn.ModuleList([Swelling()])
    batches = [torch.ones(64, 32) for _ in range(PATIENCE_STEPS + 4)]
    batches[PATIENCE_STEPS + 1] = torch.full((64, 32), 40.0)
    with Mimose(
        model, budget="1GB", loss_fn=lambda module, x: module[0](x), units=["0.blocks.*"], size_fn=len
    ) as mimose:
        for batch in batches:
            mimose.step(batch)
        sheltered = [record.sheltered for record in mimose.records]
    assert sheltered == [*PATIENCE_STEPS * [True], False, False, True, True]


@pytest.mark.filterwarnings("ignore:A step ran backward twice")
def test_a_bound_is_not_believed_of_another_input() -> None:
    """Where no `size_fn` says what decides, such a batch is seen when the first block is given more than ever."""
    torch.manual_seed(0)
    model = nn.ModuleList([Swelling()])
    batches = [torch.ones(64, 32) for _ in range(PATIENCE_STEPS + 2)]
    batches[-1] = torch.full((64, 32), 40.0)
    with Mimose(model, budget="1GB", loss_fn=lambda module, x: module[0](x), units=["0.blocks.*"]) as mimose:
        for batch in batches:
            mimose.step(batch)
        sheltered = [record.sheltered for record in mimose.records]
    assert sheltered == [*PATIENCE_STEPS * [True], False, True]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.conformance(HOOKS, "Trainer(detect_anomaly=True)", "works")
def test_anomaly_detection() -> None:
    """Every operation remembers where it came from, those of a recomputation too."""
    pair(detect_anomaly=True)


# --- hooks of modules -----------------------------------------------------------------------------------------


class Fired(pl.Callback):
    """Registers every kind of hook on every block, and counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._handles: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """On the blocks."""
        for i, block in enumerate(pl_module.model.layers):  # type: ignore[union-attr, arg-type]
            for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
                name = f"{i} {kind}"
                hook = lambda *_, name=name: self.counts.update([name])  # noqa: E731
                self._handles.append(getattr(block, f"register_{kind}_hook")(hook))
            weight = block.qkv.weight
            self._handles.append(weight.register_hook(lambda grad, i=i: self.counts.update([f"{i} tensor"])))

    def on_train_end(self, *_: Any) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()


@pytest.mark.conformance(HOOKS, "forward and backward hooks of modules and tensors", "works")
def test_module_hooks_fire_as_often_as_without() -> None:
    """A recomputation runs the forward of a unit, which is below its hooks."""
    made: list[Fired] = []

    def others() -> list[pl.Callback]:
        made.append(Fired())
        return [made[-1]]

    pair(others=others)
    assert made[0].counts == made[1].counts
    assert set(made[0].counts.values()) == {6}


class Parametrized(Task):
    """Weights that are computed from others whenever they are read; one of them writes a buffer as it does so."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for block in self.model.layers:
            parametrizations.weight_norm(block.qkv)
            parametrizations.spectral_norm(block.out)
            parametrizations.orthogonal(block.mlp[0])


@pytest.mark.conformance(HOOKS, "parametrizations: weight_norm, spectral_norm, orthogonal", "works")
def test_parametrizations() -> None:
    """The power iteration of the spectral norm happens once a step, not twice."""
    pair(task=Parametrized)


# --- copies ---------------------------------------------------------------------------------------------------


class Copies(pl.Callback):
    """Copies and pickles the module in the middle of the run, and compares what copies compute."""

    def __init__(self) -> None:
        self.equal: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Inside a step, when units are patched and a plan is in force."""
        if index == 4:
            states = torch.get_rng_state()
            model: Any = pl_module.model
            copies = [copy.deepcopy(pl_module).model, pickle.loads(pickle.dumps(model))]
            for module in copies:
                torch.set_rng_state(states)
                expected = model(**batch).loss
                torch.set_rng_state(states)
                module.zero_grad()
                found = module(**batch).loss
                found.backward()
                self.equal.append(torch.equal(found, expected) and all(p.grad is not None for p in module.parameters()))
            torch.set_rng_state(states)


@pytest.mark.conformance(HOOKS, "deepcopy and pickle of the module in mid-fit", "works")
def test_copies_in_mid_fit() -> None:
    """A copy runs its own weights, is unplanned, and takes nothing from the run."""
    made: list[Copies] = []

    def after() -> list[pl.Callback]:
        made.append(Copies())
        return [made[-1]]

    plain = run(*after(), data=few(), metered=False)
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: {"model.layers.1": "recompute"})
    fit = run(callback, *after(), data=few(), metered=False)
    assert same(plain.weights(), fit.weights())
    assert [each.equal for each in made] == [[True, True]] * 2
    assert rerun(callback) >= 4


# --- callbacks and flags of the Trainer -----------------------------------------------------------------------


@pytest.mark.conformance(HOOKS, "Trainer(barebones=True)", "works")
def test_barebones() -> None:
    """No logging, no checkpoints, no progress bar: the plan is made all the same."""
    weights = []
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: {"model.layers.1": "recompute"})
    for others in ([], [callback]):
        pl.seed_everything(0, verbose=False)
        task = Task(TinyText())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*barebones")
            trainer = pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1, callbacks=others)
        trainer.fit(task, loader(few()))
        weights.append({name: value.clone() for name, value in task.state_dict().items()})
    assert same(*weights)
    assert rerun(callback) >= 4


@pytest.mark.conformance(HOOKS, "Trainer(profiler='simple' | 'advanced' | 'pytorch')", "works")
@pytest.mark.filterwarnings("ignore:.*profiler")
@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers(profiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's profiler keeps its own events: the plugin's does not nest in it."""
    monkeypatch.chdir(tmp_path)
    plain = run(data=few())
    counted = Runs("mlp.0")
    callback = MimoseCallback(plain.budget(0.7), actions=["recompute"])
    fit = run(counted, callback, data=few(), metered=False, profiler=profiler)
    assert same(plain.weights(), fit.weights())
    assert rerun(callback) >= 3
    assert all(ran > 3 for ran, r in zip(counted.batches, callback.records, strict=True) if r.recomputed_units)


class Told(ValidatedTask):
    """Logs what the callbacks below watch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The loss."""
        self.log("loss", self.model(**batch).loss)


@pytest.mark.conformance(HOOKS, "ModelCheckpoint and EarlyStopping beside it", "works")
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_checkpoints_and_early_stopping(first: bool, tmp_path: Path) -> None:
    """They stop at the same epoch and keep the same file, which a run without the plugin can load."""
    made: list[ModelCheckpoint] = []

    def others() -> list[pl.Callback]:
        made.append(ModelCheckpoint(tmp_path / str(len(made)), monitor="loss", filename="{epoch}-{step}"))
        return [made[-1], EarlyStopping("loss", patience=1, min_delta=10.0)]

    where: dict[str, Any] = {"others": others} if first else {"after": others}
    both = pair(task=Told, val=few(count=2), max_epochs=5, enable_checkpointing=True, **where)
    assert both.plain.trainer.current_epoch == both.budgeted.trainer.current_epoch < 4
    paths = [Path(each.best_model_path) for each in made]
    assert paths[0].name == paths[1].name
    kept = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    assert same(*kept)


@pytest.mark.conformance(HOOKS, "GradientAccumulationScheduler", "works")
def test_accumulation_that_changes() -> None:
    """Gradients stay through some forwards, and through others from the second epoch on."""
    pair(others=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], max_epochs=3)


class Sized(pl.LightningDataModule):
    """Batches of as many samples as the finder asks for."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Twenty-four samples of forty tokens."""
        samples = text_batch(24, 40)
        rows = [{name: value[i] for name, value in samples.items()} for i in range(24)]
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]


SEARCHES = ["BatchSizeFinder", "LearningRateFinder", "Tuner.scale_batch_size", "Tuner.lr_find"]
TOLD = "(steps_per_trial|max_trials|suggest|weights_only|lr_find|limit_train_batches)"


def searched(
    search: str, *others: pl.Callback, directory: Path, last: bool = False
) -> tuple[dict[str, torch.Tensor], Any]:
    """Fit with a search before it; the weights and what was found."""
    pl.seed_everything(0, verbose=False)
    task, data = Task(TinyText()), Sized()
    task.lr = 1e-3  # type: ignore[assignment]
    finders: dict[str, list[pl.Callback]] = {
        "BatchSizeFinder": [BatchSizeFinder("power", steps_per_trial=2, max_trials=2)],
        "LearningRateFinder": [LearningRateFinder(num_training_steps=8)],
    }
    finder = finders.get(search, [])
    callbacks = [*others, *finder] if last else [*finder, *others]
    trainer = quiet_trainer(*callbacks, max_epochs=2, default_root_dir=directory)
    if search == "Tuner.scale_batch_size":
        Tuner(trainer).scale_batch_size(task, datamodule=data, steps_per_trial=2, max_trials=2)
    elif search == "Tuner.lr_find":
        Tuner(trainer).lr_find(task, datamodule=data, num_training=8)
    trainer.fit(task, datamodule=data)
    return {name: value.clone() for name, value in task.state_dict().items()}, (data.batch_size, task.lr)


@pytest.mark.conformance(HOOKS, "training after BatchSizeFinder, LearningRateFinder or the Tuner", "works")
@pytest.mark.filterwarnings(f"ignore:.*{TOLD}", "ignore:mimose. the trial steps")
@pytest.mark.parametrize("search", SEARCHES)
def test_searches(search: str, tmp_path: Path) -> None:
    """They run steps of their own and put everything back; what is found and trained is the same."""
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: {"model.layers.1": "recompute"})
    plain = searched(search, directory=tmp_path)
    planned = searched(search, callback, directory=tmp_path)
    assert plain[1] == planned[1]
    assert same(plain[0], planned[0])
    assert rerun(callback) >= 4


@pytest.mark.conformance(HOOKS, "BatchSizeFinder, LearningRateFinder and the Tuner: their trial steps", "refused")
@pytest.mark.filterwarnings(f"ignore:.*{TOLD}")
@pytest.mark.parametrize("last", [False, True], ids=["finder first", "finder last"])
@pytest.mark.parametrize("search", SEARCHES)
def test_trial_steps_are_not_held(search: str, last: bool, tmp_path: Path) -> None:
    """Which is said once, with what to do; they leave no record."""
    callback = MimoseCallback("1GB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, (batch_size, _) = searched(search, callback, directory=tmp_path, last=last)
    said = [each for each in caught if "trial steps" in str(each.message)]
    assert [each.category for each in said] == [UserWarning]
    thing = "batch size" if "size" in search.lower() else "learning rate"
    assert f"Set the {thing} by hand" in str(said[0].message)
    assert len(callback.records) == 2 * math.ceil(24 / batch_size)


@pytest.mark.filterwarnings(f"ignore:.*{TOLD}", "ignore:Skipping learning rate finder")
def test_nothing_is_said_where_nothing_is_searched_for(tmp_path: Path) -> None:
    """Lightning skips it in a fast_dev_run."""
    task, finder = Task(TinyText()), LearningRateFinder(num_training_steps=8)
    trainer = quiet_trainer(finder, MimoseCallback("1GB"), fast_dev_run=1, default_root_dir=tmp_path)
    trainer.fit(task, loader(few(count=2)))
