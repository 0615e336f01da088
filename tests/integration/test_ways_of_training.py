"""The many ways in which people train: each is equal to the bit with a budget, and inside it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_mimose import MimoseCallback, UnitsError
from tests.helpers.fits import run, same
from tests.helpers.meter import MeterCallback
from tests.helpers.models import (
    Batch,
    Block,
    ConvBlock,
    Task,
    TinyText,
    ValidatedTask,
    loader,
    quiet_trainer,
    text_batch,
)
from tests.helpers.pairs import Runs, few, pair, rerun, saving

WAYS = "How people train"


# --- precision ------------------------------------------------------------------------------------------------


@pytest.mark.conformance(WAYS, "precision='bf16-true'", "works")
def test_bf16_true() -> None:
    """Parameters, gradients and optimizer state have half the bytes too."""
    both = pair(precision="bf16-true")
    assert {parameter.dtype for parameter in both.budgeted.task.parameters()} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_half_precision(precision: str) -> None:
    """Lightning has it on accelerators only; on CPU it takes bf16 in its place and says so."""
    weights = []
    for others in ([], [MimoseCallback("1GB")]):
        weights.append(run(*others, metered=False, accelerator="gpu", precision=precision, data=few()).weights())
    assert same(*weights)


# --- several networks and optimizers --------------------------------------------------------------------------


class Generator(nn.Module):
    """Noise to a sequence."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(hidden) for _ in range(3)))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """As many tokens as there is noise for."""
        return self.layers(noise)


class Critic(nn.Module):
    """A sequence to a score."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(Block(hidden) for _ in range(3))), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One score per sample."""
        return self.head(self.layers(x).mean(1))


class Adversarial(Task):
    """A generator against a critic, each with its own optimizer, frozen while the other one learns."""

    automatic_optimization = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.generator, self.critic = Generator(), Critic()

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """The generator's turn, then the critic's."""
        first, second = self.optimizers()  # type: ignore[misc]
        real = self.model.embed(batch["input_ids"]).detach()
        self.toggle_optimizer(first)
        fake = self.generator(torch.randn_like(real))
        first.zero_grad()
        self.manual_backward(functional.softplus(-self.critic(fake)).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        told = functional.softplus(self.critic(fake.detach())) + functional.softplus(-self.critic(real))
        self.manual_backward(told.mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        """One each."""
        made = [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.critic)]
        return made, []


@pytest.mark.conformance(WAYS, "a GAN: two networks, two optimizers, manual optimization", "works")
def test_a_gan() -> None:
    """Units run several times a step, some of them frozen in one half of it."""
    pair(task=Adversarial, data=few(count=8))


class InTurns(Task):
    """Two tasks in turns: the same encoder, and for each blocks and a head of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tasks = nn.ModuleList([Critic(), Critic()])

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of the one whose turn it is."""
        x = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            x = layer(x)
        loss: torch.Tensor = functional.softplus(self.tasks[batch_idx % 2](x)).mean()
        return loss


@pytest.mark.conformance(WAYS, "several tasks in turns, each with blocks of its own", "works")
def test_tasks_in_turns() -> None:
    """Which one comes is not known before a step's forward: plans hold for all of them."""
    both = pair(task=InTurns, data=[text_batch(4, 48 + 16 * (i % 3), i) for i in range(24)])
    assert sum(not record.sheltered for record in both.callback.records) >= 8


class Late(InTurns):
    """The second task comes beside the first one, but only after a while."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The sum of both."""
        x = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            x = layer(x)
        tasks = self.tasks if batch_idx >= LATE else self.tasks[:1]  # type: ignore[index]
        loss: torch.Tensor = torch.stack([functional.softplus(task(x)).mean() for task in tasks]).sum()
        return loss


@pytest.mark.conformance(WAYS, "several tasks in turns, each with sizes of its own", "works")
def test_tasks_in_turns_with_sizes_of_their_own() -> None:
    """No step of one task is like one of the other: what that would take with such a batch is never seen."""
    both = pair(task=InTurns, data=[text_batch(4, (48, 80)[i % 2], i) for i in range(24)])
    assert sum(not record.sheltered for record in both.callback.records) >= 8


LATE = 11
"""By then, three planned steps were measured and the next ones are not."""


@pytest.mark.conformance(WAYS, "blocks that are called from some step on (a loss that is added late)", "works")
def test_blocks_that_come_late() -> None:
    """Nothing is known of them when they come: they are recomputed, and learnt from the next step on."""
    both = pair(0.75, task=Late, data=[text_batch(4, 48 + 16 * (i % 3), i) for i in range(24)])
    records = both.callback.records
    assert not records[LATE].sheltered
    assert records[LATE].measured_peak_bytes is None, "no meter told of it"
    assert {f"tasks.1.layers.{i}": "recompute" for i in range(3)}.items() <= records[LATE].actions.items()
    assert not any("tasks.1" in unit for record in records[4:LATE] for unit in record.actions)
    assert records[LATE + 1].sheltered
    assert sum(not record.sheltered for record in records[LATE + 1 :]) >= 6


class Unannounced(Task):
    """Manual optimization with the loss's own backward, of which Lightning hears nothing."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """One update."""
        optimizer = self.optimizers()
        loss = self.model(**batch).loss
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss.backward()
        optimizer.step()  # type: ignore[union-attr]


def test_a_backward_that_is_not_announced() -> None:
    """It is the step's own if no forward follows."""
    pair(task=Unannounced, data=few(count=12))


class Newton(Task):
    """LBFGS evaluates its closure several times a step."""

    search: str | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A short history, so that it is full before the run ends."""
        return torch.optim.LBFGS(
            self.parameters(), lr=0.1, max_iter=4, history_size=4, line_search_fn=self.search, tolerance_change=0
        )


class Searching(Newton):
    """The same with a line search."""

    search = "strong_wolfe"


@pytest.mark.conformance(WAYS, "LBFGS: several evaluations a step, a history that grows", "works")
@pytest.mark.parametrize("task", [Newton, Searching], ids=["fixed step", "line search"])
def test_lbfgs(task: type[Task]) -> None:
    """Every evaluation of every step, while the history fills and when it is full."""
    both = pair(0.8, task=task, data=few(count=8))
    told = [record.measured_peak_bytes for record in both.callback.records]
    for peak, measured in zip(both.budgeted.peaks, told, strict=True):
        assert measured is None or measured <= 1.01 * peak, "state that is only reserved was told as used"


# --- averages of weights --------------------------------------------------------------------------------------


@pytest.mark.conformance(WAYS, "StochasticWeightAveraging", "works")
def test_stochastic_weight_averaging() -> None:
    """The average is taken of a copy that is made in mid-run, of a model whose units are patched."""
    pair(others=lambda: [StochasticWeightAveraging(1e-3, swa_epoch_start=1)], max_epochs=3, data=few(count=4))


@pytest.mark.conformance(WAYS, "WeightAveraging and EMAWeightAveraging", "works")
@pytest.mark.parametrize("kind", ["WeightAveraging", "EMAWeightAveraging"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_weight_averaging(kind: str, first: bool) -> None:
    """The copy runs in validation in the place of the model, and the model ends with its weights."""
    averaging = getattr(pl.callbacks, kind, None)
    if averaging is None:
        pytest.skip("this release of Lightning has no such callback; it came with 2.6")

    def others() -> list[pl.Callback]:
        return [averaging()]

    where = {"others": others} if first else {"after": others}
    pair(task=ValidatedTask, val=few(count=2), max_epochs=2, **where)


# --- layers that are unfrozen ---------------------------------------------------------------------------------


class WithBackbone(Task):
    """What Lightning's finetuning callback asks of a module."""

    @property
    def backbone(self) -> nn.Module:
        """What is frozen at first."""
        return self.model.layers  # type: ignore[return-value]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what is trained; the callback adds the rest."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


@pytest.mark.conformance(WAYS, "BackboneFinetuning: layers unfrozen in mid-run", "works")
def test_backbone_finetuning() -> None:
    """What was measured of frozen layers says nothing about trained ones, and their optimizer state is yet to come."""
    both = pair(
        others=lambda: [BackboneFinetuning(1, backbone_initial_lr=1e-4, verbose=False)],
        task=WithBackbone,
        max_epochs=3,
    )
    sheltered = [record.sheltered for record in both.callback.records]
    assert sheltered[6], "unfrozen layers are measured again"
    assert not all(sheltered[6:])


# --- other loops ----------------------------------------------------------------------------------------------


class Watched(ValidatedTask):
    """Logs what validation finds."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """One figure."""
        self.log("loss", self.model(**batch).loss)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss again."""
        return self.model(**batch).loss


@pytest.mark.conformance(WAYS, "validation every few batches, sanity steps", "works")
def test_validation_in_between() -> None:
    """It runs in the middle of an epoch, also between steps that learn."""
    both = pair(task=Watched, val=few(count=4), val_check_interval=2, num_sanity_val_steps=2)
    assert torch.equal(both.plain.trainer.callback_metrics["loss"], both.budgeted.trainer.callback_metrics["loss"])


@pytest.mark.conformance(WAYS, "validate, test and predict after fit, in inference mode", "works")
def test_other_stages_after_fit() -> None:
    """Tensors of inference mode know no gradients; the second fit plans again."""
    found: list[list[torch.Tensor]] = []
    plain = run(task=Watched, data=few(), val=few(count=2))
    callback = MimoseCallback(plain.budget(0.7))
    for others in ([], [callback]):
        fit = run(*others, task=Watched, data=few(), val=few(count=2), metered=False)
        trainer, task, data = fit.trainer, fit.task, loader(few(count=2))
        told = [trainer.validate(task, data, verbose=False), trainer.test(task, data, verbose=False)]
        predicted = trainer.predict(task, data)
        assert predicted is not None
        trainer.fit_loop.max_epochs = 2
        trainer.fit(task, loader(few()), loader(few(count=2)))
        values = [torch.tensor(list(one.values())) for stage in told for one in stage]
        found.append([*values, *predicted, *fit.weights().values()])  # type: ignore[list-item]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(callback.records) == 12
    assert saving(callback) >= 6


class Replacing(Task):
    """Puts another block in the place of one in mid-epoch."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """In the sixth step."""
        if batch_idx == 6:
            torch.manual_seed(1)
            self.model.layers[1] = Wide(32)


class Wide(Block):
    """Takes more than those that it takes the place of."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 6 * hidden), nn.GELU(), nn.Linear(6 * hidden, hidden))


@pytest.mark.conformance(WAYS, "a block that is replaced by another in mid-epoch", "guarded")
def test_a_block_that_is_replaced() -> None:
    """What takes its place is kept, steps are measured anew, and the user is told how to have it planned."""
    plain = run(task=Replacing, data=few(count=14))
    callback = MimoseCallback(plain.budget(0.8))
    with pytest.warns(UserWarning, match="Blocks of Replacing were replaced"):
        budgeted = run(callback, task=Replacing, data=few(count=14))
    assert same(budgeted.weights(), plain.weights())
    assert callback.budget_bytes is not None
    assert max(budgeted.peaks) <= callback.budget_bytes
    assert callback.records[7].sheltered
    assert not callback.records[-1].sheltered
    assert "forward" not in vars(budgeted.task.model.layers[1])


@pytest.mark.conformance(WAYS, "two fits with one callback", "works")
def test_two_fits() -> None:
    """Of two models of one kind: what the first one taught, the second one uses from its first step."""
    plain = run(data=few())
    # Other planners go by measured times: which units they take, and whether one has to be proven first, varies.
    callback = MimoseCallback(plain.budget(0.7), planner="greedy")
    for _ in range(2):
        assert same(run(callback, data=few()).weights(), plain.weights())
    assert not any(record.sheltered for record in callback.records[6:])
    assert saving(callback) >= 8


@pytest.mark.conformance(WAYS, "a run resumed from a checkpoint", "works")
def test_a_resumed_run(tmp_path: Path) -> None:
    """Two epochs at once, or one and another from a checkpoint: the same weights, planned from the first step on."""
    plain = run(data=few(), max_epochs=2)
    callback, again = MimoseCallback(plain.budget(0.7)), MimoseCallback(plain.budget(0.7))
    first = run(callback, data=few())
    first.trainer.save_checkpoint(tmp_path / "first.ckpt")
    state = torch.get_rng_state()
    task = Task(TinyText())
    torch.set_rng_state(state)
    quiet_trainer(again, max_epochs=2).fit(task, loader(few()), ckpt_path=tmp_path / "first.ckpt")
    assert same(task.state_dict(), plain.weights())
    assert not again.records[0].sheltered
    assert sum(record.sheltered for record in again.records) <= 1  # where a unit is proven that has no room otherwise
    assert len(again.records) == 6
    assert saving(again) >= 4


def test_a_resumed_run_proves_units_where_there_is_room(tmp_path: Path) -> None:
    """What is recomputed for the first time runs beside the step: where that does not fit, beside a sheltered one."""
    batches = [text_batch(4, 64, seed=seed) for seed in range(3)]
    first = run(MimoseCallback("1GB"), data=batches)
    first.trainer.save_checkpoint(tmp_path / "first.ckpt")
    unit = "model.layers.2.mlp"

    def resumed(budget: int | str) -> tuple[MimoseCallback, list[int]]:
        callback = MimoseCallback(budget, planner=lambda *_: {unit: "recompute"})
        meter = MeterCallback()
        task = Task(TinyText())
        quiet_trainer(meter, callback, max_epochs=2, limit_train_batches=1).fit(
            task, loader(batches), ckpt_path=tmp_path / "first.ckpt"
        )
        return callback, meter.peaks

    ample, peaks = resumed("1GB")
    assert not any(record.sheltered for record in ample.records)
    predicted = ample.records[0].predicted_peak_bytes
    assert predicted is not None
    assert peaks[0] > predicted + 8192
    tight, peaks = resumed(predicted + 8192)
    assert tight.records[0].sheltered
    assert tight.budget_bytes is not None
    assert peaks[0] <= tight.budget_bytes


# --- what a training step does --------------------------------------------------------------------------------


class PerSample(Task):
    """Weighs the loss by norms of gradients per sample, taken on the first tokens."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """`vmap` of `grad` of the model, then the model itself."""
        weights = {name: value.detach() for name, value in self.model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], tokens: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            one = {"input_ids": tokens[None], "labels": label[None]}
            return torch.func.functional_call(self.model, weights, kwargs=one).loss

        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
        found = slopes(weights, batch["input_ids"][:, :4], batch["labels"])
        return self.model(**batch).loss * (1 + sum(value.pow(2).sum() for value in found.values()).sqrt())


@pytest.mark.conformance(WAYS, "torch.func.grad and vmap inside training_step", "works")
def test_functional_transforms() -> None:
    """Units run as their authors wrote them inside a transform, and are planned outside of it."""
    pair(0.8, task=PerSample)


class ByHand(Task):
    """Checkpoints its first layer itself."""

    reentrant = False

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """As people write it."""
        x: Any = self.model.embed(batch["input_ids"])
        first, *others = self.model.layers  # type: ignore[misc]
        x = checkpoint(first, x, use_reentrant=self.reentrant)
        for layer in others:
            x = layer(x)
        return functional.cross_entropy(self.model.head(x.mean(1)), batch["labels"])


class ByHandReentrant(ByHand):
    """The old kind."""

    reentrant = True


@pytest.mark.conformance(WAYS, "torch.utils.checkpoint by hand inside the model", "guarded")
@pytest.mark.parametrize("task", [ByHand, ByHandReentrant], ids=["non-reentrant", "reentrant"])
def test_checkpointing_by_hand(task: type[ByHand]) -> None:
    """The layer stays its author's business, is named where that can be seen, and the others are planned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = pair(task=task, actions=["recompute"])
    named = [str(w.message) for w in caught if "of your own" in str(w.message)]
    assert len(named) == (not task.reentrant)
    assert all("'model.layers.0'" in text and "checkpoint" in text for text in named)
    assert any(set(record.actions) - {"model.layers.0"} for record in both.callback.records if not record.sheltered)


def scripted(made: Any, *example: Any) -> Any:
    """`torch.jit.script`, or `trace` by an example; both tell everybody that their time is over."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # the second from torch 2.14 on
            warnings.filterwarnings("ignore", ".*torch.jit.", category)
        return torch.jit.trace(made, example) if example else torch.jit.script(made)


GELU = """
def gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))
"""


class ScriptedActivation(nn.Module):
    """Ends with a scripted function, as hand-written activations do."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.activation = torch.jit.CompilationUnit(GELU).gelu  # a new one, which has not run yet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last tensor that backward needs is saved inside the script."""
        return self.activation(self.down(torch.tanh(self.up(x))))


class WithScripts(Task):
    """A scripted block of linear layers, a scripted one that writes buffers, and a block that ends with a script."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.model.layers[0], self.images = scripted(block), scripted(ConvBlock(1))
        self.model.layers[1] = ScriptedActivation()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """An image is made of the embeddings, so that the BatchNorm has something to do."""
        x = self.model.embed(batch["input_ids"])
        x = self.images(x[:, None])[:, 0]
        for layer in self.model.layers:
            x = layer(x)
        return functional.cross_entropy(self.model.head(x.mean(1)), batch["labels"])


@pytest.mark.conformance(WAYS, "torch.jit.script in a block", "guarded")
def test_scripted_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A script's first runs differ from later ones in their last bits: one run more would change the results."""
    caplog.set_level(logging.INFO)
    plain = run(task=WithScripts, data=few(), metered=False)
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: {"model.layers.2": "recompute"})
    fit = run(callback, task=WithScripts, data=few(), metered=False)
    (told,) = [line for line in caplog.messages if "never recomputed" in line]
    assert "model.layers.0" in told
    assert "runs TorchScript" in told
    assert same(plain.weights(), fit.weights())
    assert {name for record in callback.records for name in record.actions} == {"model.layers.2"}
    assert rerun(callback) >= 1


class WithTraces(Task):
    """A traced block, and one that has a traced part."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        example = torch.randn(2, 3, 32)
        self.model.layers[0] = scripted(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)), example)
        self.model.layers[1].mlp = scripted(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)), example)


@pytest.mark.conformance(WAYS, "torch.jit.trace in a block", "guarded")
def test_traced_blocks() -> None:
    """Their classes have no forward that can be read; it is not left in their instances either."""
    plain = run(task=WithTraces, data=few(), metered=False)
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: {"model.layers.2": "recompute"})
    fit = run(callback, task=WithTraces, data=few(), metered=False)
    assert same(plain.weights(), fit.weights())
    assert {name for record in callback.records for name in record.actions} == {"model.layers.2"}
    assert not any("forward" in vars(module) for module in fit.task.modules())


def test_scripted_blocks_while_somebody_elses_profiler_runs() -> None:
    """Then it is looked at what modules run; the class of a scripted one does not let its forward be read."""
    plain = run(task=WithScripts, data=few())
    fit = run(MimoseCallback("1GB"), task=WithScripts, data=few())
    assert same(plain.weights(), fit.weights())


def test_a_script_that_nobody_sees_does_not_end_the_training() -> None:
    """The exception that stops a recomputation early has no way through the interpreter of scripts."""

    class Hidden(Task):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            for i in range(3):
                block = ScriptedActivation()
                block.activation = lambda x, call=block.activation: call(x)
                self.model.layers[i] = block

    plain = run(task=Hidden, data=few(), metered=False)
    fit = run(MimoseCallback("1GB"), task=Hidden, data=few(), metered=False)
    assert plain.weights().keys() == fit.weights().keys()


# --- torch.compile --------------------------------------------------------------------------------------------

# Dynamo asks activations for `.grad` while it traces, which warns where warnings are errors.
dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """Every test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class InPlace(Task):
    """`block.compile()`."""

    backend = "aot_eager"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for block in self.model.layers:
            block.compile(backend=self.backend, dynamic=True)


class Inductor(InPlace):
    """With torch's own compiler."""

    backend = "inductor"


class Wrapped(Task):
    """`torch.compile(block)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for i, block in enumerate(self.model.layers):
            self.model.layers[i] = torch.compile(block, backend="aot_eager", dynamic=True)


def compiled(task: type[Task]) -> None:
    """Trains without a meter around it, under which nothing would be compiled; the plugin's own says what is used."""
    from torch._dynamo.utils import counters

    blocks = {f"model.layers.{i}" for i in range(3)}
    plain = run(task=task, data=few(), metered=False)
    torch._dynamo.reset()
    counters.clear()
    callback = MimoseCallback("1GB", planner=lambda timeline, budget: dict.fromkeys(blocks, "recompute"))
    budgeted = run(callback, task=task, data=few(), metered=False)
    assert same(plain.weights(), budgeted.weights())
    assert counters["stats"]["unique_graphs"] == 1, "plans are read outside compiled code: no graph per plan"
    assert not counters["graph_break"]
    assert {name for record in callback.records for name in record.actions} == blocks
    assert rerun(callback) >= 2
    learnt = max(record.measured_peak_bytes for record in callback.records if record.sheltered)
    planned = [r.measured_peak_bytes for r in callback.records if not r.sheltered and r.measured_peak_bytes]
    assert planned
    assert max(planned) <= 1.1 * learnt, "as little as with everything recomputed"


@dynamo
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "torch.compile of each block", "works")
@pytest.mark.parametrize("task", [InPlace, Wrapped], ids=["block.compile()", "torch.compile(block)"])
def test_compiled_blocks(task: type[Task]) -> None:
    """They run compiled both times, and the plan lies outside of them."""
    compiled(task)


def needs_compiler() -> None:
    """Skips the test where no compiler for generated code is installed."""
    from torch._inductor.exc import InductorError

    try:
        torch.compile(torch.sin)(torch.ones(3))
    except (InductorError, RuntimeError) as error:
        pytest.skip(f"torch's compiler does not work here: {str(error)[:80]}")


@pytest.mark.slow
@dynamo
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated")  # inductor's own
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "torch.compile of each block", "works")
def test_compiled_blocks_with_inductor() -> None:
    """The same with generated code, where a compiler for it is installed."""
    needs_compiler()
    compiled(Inductor)


class Whole(Task):
    """`torch.compile(model)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(torch.compile(model, backend="eager", dynamic=True))  # type: ignore[arg-type]


class WholeInPlace(Task):
    """`model.compile()`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.compile(backend="eager", dynamic=True)


@dynamo
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "torch.compile of the whole model", "refused")
@pytest.mark.parametrize("task", [Whole, WholeInPlace], ids=["torch.compile(model)", "model.compile()"])
def test_a_model_that_is_one_graph(task: type[Task]) -> None:
    """The results are right, and a warning says what to compile instead."""
    plain = run(task=task, data=few(), metered=False)
    with pytest.warns(UserWarning, match=r"'model' is one torch.compile graph of 3 blocks.*block\.compile\(\)"):
        fit = run(MimoseCallback("1GB"), task=task, data=few(), metered=False)
    assert same(plain.weights(), fit.weights())


@dynamo
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "torch.compile of the whole LightningModule", "refused")
def test_a_lightning_module_that_is_one_graph() -> None:
    """`trainer.fit(torch.compile(task))` compiles the training step, in which no unit is called as such."""
    weights = []
    for others in ([], [MimoseCallback("1GB")]):
        pl.seed_everything(0, verbose=False)
        task = Task(TinyText())
        whole: Any = torch.compile(task, backend="eager", dynamic=True)
        trainer = quiet_trainer(*others)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(whole, loader(few()))
        weights.append({name: value.clone() for name, value in task.state_dict().items()})
        told = [str(w.message) for w in caught if "block.compile()" in str(w.message)]
        assert len(told) == len(others)
    assert same(*weights)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.10 says so of every session
@pytest.mark.slow
@dynamo
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated")  # inductor's own
@pytest.mark.filterwarnings("ignore:3 steps in a row could not be measured")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "torch.compile of each block, under a profiler", "works")
def test_compiled_blocks_under_a_profiler() -> None:
    """Nothing is measured then: a mode, by which memory could be counted, would have torch compile nothing."""
    from torch._dynamo.utils import counters

    needs_compiler()
    weights = []
    for others in ([], [MimoseCallback("1GB")]):
        torch._dynamo.reset()
        counters.clear()
        pl.seed_everything(0, verbose=False)
        task = Inductor(TinyText())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            quiet_trainer(*others).fit(task, loader(few()))
        assert counters["stats"]["unique_graphs"] == 1
        weights.append(task.state_dict())
        assert all(record.measured_peak_bytes is None for each in others for record in each.records)
    assert same(*weights)


class CompiledLoss(Task):
    """`torch.compile` of what the training step calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._compiled: Any = torch.compile(self._loss_of, backend="eager", dynamic=True)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self._compiled(batch)
        return loss


@dynamo
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "a compiled function that calls the model, under a profiler", "works")
def test_a_compiled_function_under_a_profiler() -> None:
    """Where torch runs what it calls as frames of their own, it compiles none of ours."""
    plain = run(task=CompiledLoss, data=few())
    callback = MimoseCallback("1GB")
    fit = run(callback, task=CompiledLoss, data=few())
    assert same(plain.weights(), fit.weights())
    assert len(callback.records) == len(few())


@dynamo
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.conformance(WAYS, "units= that names a part of a compiled block", "refused")
def test_parts_of_compiled_blocks_cannot_be_named() -> None:
    """The blocks can, by the name of their class too."""
    with pytest.raises(UnitsError, match=r"layers\.0\.mlp"):
        run(MimoseCallback("1GB", units=["*.layers.0.mlp"]), task=Wrapped, data=few(), metered=False)
    callback = MimoseCallback("1GB", units=["Block"])
    run(callback, task=Wrapped, data=[text_batch()], metered=False)
    assert set(callback.records[0].actions) == {f"model.layers.{i}" for i in range(3)}


# --- more than is said ----------------------------------------------------------------------------------------


def test_the_counter_sees_recomputations() -> None:
    """What the tests of other hooks rely on: forwards of a unit's parts are counted, recomputations included."""
    plain, counted = Runs(), Runs()
    run(plain, data=few(), metered=False)
    callback = MimoseCallback(
        "1GB", planner=lambda timeline, budget: {"model.layers.0": "recompute"}, actions=["recompute"]
    )
    run(counted, callback, data=few(), metered=False)
    assert plain.batches == [3] * 6
    assert counted.batches == [12, 6, 4, 4, 4, 4]  # in the first step, every unit is tried twice
