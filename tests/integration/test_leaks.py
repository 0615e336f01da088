"""Nothing accumulates over steps and fits, and nothing of ours keeps a batch, a model or a trainer alive."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.utils.data import DataLoader, Dataset

from lightning_mimose import BudgetInfeasibleError, Mimose, MimoseCallback
from tests.helpers.faults import InBackward
from tests.helpers.fits import same
from tests.helpers.loops import plain_step
from tests.helpers.meter import PeakMeter
from tests.helpers.models import Batch, Task, TinyNested, TinyText, TinyVision, image_batch, quiet_trainer, text_batch
from tests.helpers.pairs import saving, saving_units
from tests.helpers.recording import model_loss

LENGTHS = (16, 24, 40, 12, 32, 20, 28, 36)
Make = Callable[[], nn.Module]


def live_bytes() -> int:
    """Bytes of all storages that a tensor which the collector knows refers to, after a collection."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def hooks(model: nn.Module) -> int:
    """Hooks on a model's modules and parameters."""
    found = sum(len(value) for m in model.modules() for key, value in vars(m).items() if key.endswith("_hooks"))
    for parameter in model.parameters():
        found += len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
    return found


class Fresh(Dataset[Batch]):
    """Batches of varying sizes, each made when it is asked for and held by nobody here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        batch = text_batch(4, LENGTHS[index % len(LENGTHS)], index)
        self.seen += [weakref.ref(tensor) for tensor in batch.values()]
        return batch


def fresh(data: Fresh) -> DataLoader[Batch]:
    """A loader of ready-made batches."""
    return DataLoader(data, batch_size=None)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of these tests."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def text_budget(share: float = 0.6) -> int:
    """`budget_for` a `TinyText` and the longest batch."""
    return budget_for(TinyText, _longest(), share)


def budget_for(make: Make, batch: Batch, share: float = 0.6) -> int:
    """A budget that the largest batch meets by recomputing."""
    torch.manual_seed(0)
    model = make()
    optimizer = adam(model)
    for _ in range(2):
        with PeakMeter(model, optimizer, batch) as meter:
            model_loss(model, batch).backward()
            optimizer.step()
    return int(meter.resident_bytes + share * (meter.peak_bytes - meter.resident_bytes))


@pytest.fixture(scope="module", autouse=True)
def tables() -> None:
    """What the package makes once and keeps for good (a table of bits) is there before anything is counted."""
    trainer = quiet_trainer(MimoseCallback(text_budget(0.5)))
    trainer.fit(Task(TinyText()), fresh(Fresh(24)))


# --- over steps ---------------------------------------------------------------------------------------------------


class Census(pl.Callback):
    """Counts what there is before some of the batches."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.bytes: list[int] = []
        self.hooks: list[int] = []
        self.objects: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Look, always before batches of the same size."""
        if batch_idx % self.every == self.every - 1:
            size = sum(tensor.untyped_storage().nbytes() for tensor in batch.values())
            self.bytes.append(live_bytes() - size)
            self.hooks.append(hooks(module))
            self.objects.append(len(gc.get_objects()))


@pytest.mark.conformance("Leaks", "memory, hooks and objects over 300 steps in two fits", "works")
def test_two_fits_of_150_steps_hold_no_more_at_their_end_than_at_their_beginning() -> None:
    """Live bytes and hooks to the last one; objects but for one record a step and the plans of each size."""
    budgets = text_budget(0.5), text_budget(0.7)
    before = live_bytes()
    for budget in budgets:
        callback, census, data = MimoseCallback(budget), Census(24), Fresh(150)
        task = Task(TinyText())
        trainer = quiet_trainer(callback, census)
        hooked = hooks(task)
        trainer.fit(task, fresh(data))
        assert saving(callback) > 10
        # From step 50 on, when the last things there are begin: the metrics that are logged.
        assert len(set(census.bytes[2:])) == 1, census.bytes
        assert len(set(census.hooks)) == 1
        assert hooks(task) == hooked
        steps = census.every * (len(census.objects) - 3)
        assert census.objects[-1] - census.objects[2] < 10 * steps, census.objects
        del task, trainer, data, census  # Lightning lends every callback the model's `log`
    assert live_bytes() == before
    assert len(callback.records) == 150


@pytest.mark.conformance("Leaks", "two fits of one callback under two budgets", "works")
def test_a_second_fit_of_the_same_callback_leaves_as_much_as_the_first() -> None:
    """On other models; what is learnt and recorded are numbers."""
    callback = MimoseCallback("1GB")
    left = []
    for budget in ("1GB", text_budget(), "1GB"):
        callback.budget = budget
        data = Fresh(20)
        trainer = quiet_trainer(callback)
        trainer.fit(Task(TinyText()), fresh(data))
        del trainer
        left.append(live_bytes())
        assert not any(ref() is not None for ref in data.seen)
    assert len(set(left)) == 1
    assert len(callback.records) == 60


# --- what survives ------------------------------------------------------------------------------------------------


def fail(error: BaseException) -> None:
    """Raises it."""
    raise error


class Fragile(nn.Module):
    """Passes its input on, until it is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.error is None else InBackward.apply(x, partial(fail, self.error))


class Failing(Task):
    """Raises in a chosen batch: in its forward, or in its backward while a block is recomputed."""

    def __init__(self, error: BaseException | None, at: int, backward: bool) -> None:
        super().__init__(TinyText())
        self.error, self.at, self.in_backward, self.fragile = error, at, backward, Fragile()
        self.model.layers[1].mlp.append(self.fragile)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss of one batch, or the error."""
        due = self.error is not None and batch_idx == self.at
        self.fragile.error = self.error if due and self.in_backward else None
        loss = super().training_step(batch, batch_idx)
        if due and not self.in_backward and self.error is not None:
            raise self.error
        return loss


@contextmanager
def swallowed(error: BaseException | None) -> Iterator[None]:
    """The error passes through a fit as it is (Lightning turns an interrupt into an exit)."""
    if error is None:
        yield
        return
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
        yield


ERRORS: dict[str, Callable[[], BaseException] | None] = {
    "no error": None,
    "exception": lambda: ValueError("mine"),
    "out of memory": lambda: torch.OutOfMemoryError("not enough"),
    "interrupt": KeyboardInterrupt,
}


@pytest.mark.conformance("Leaks", "no batch, model or trainer is kept after a fit, an error or an interrupt", "works")
@pytest.mark.filterwarnings("ignore:.*Detected KeyboardInterrupt")
@pytest.mark.parametrize(
    ("error", "at", "backward"),
    [
        ("no error", 9, False),
        ("exception", 1, False),
        ("exception", 9, True),
        ("out of memory", 1, True),
        ("out of memory", 9, False),
        ("interrupt", 1, True),
        ("interrupt", 9, True),
        ("interrupt", 9, False),
    ],
)
def test_nothing_is_kept_alive(error: str, at: int, backward: bool) -> None:
    """The callback outlives its fit, and holds nothing of it; in sheltered steps and in planned ones."""
    make = ERRORS[error]
    raised = make() if make is not None else None
    callback, data = MimoseCallback(text_budget()), Fresh(12)
    before = live_bytes()
    task = Failing(raised, at, backward)
    trainer = quiet_trainer(callback)
    with swallowed(raised):
        trainer.fit(task, fresh(data))
    if raised is not None:
        raised.__traceback__ = raised.__context__ = raised.__cause__ = None  # its frames are the caller's to drop
        assert len(callback.records) == at
        assert callback.records[-1].sheltered == (at == 1)
    refs = [weakref.ref(task), weakref.ref(task.model), weakref.ref(trainer), *map(weakref.ref, task.parameters())]
    del task, trainer
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
    assert [ref() for ref in data.seen if ref() is not None] == []
    assert live_bytes() == before
    assert callback.report().to_dict()


@pytest.mark.conformance("Leaks", "memory of a failed step comes back at once", "works")
@pytest.mark.parametrize("where", ["forward", "backward", "refused"])
@pytest.mark.parametrize("steps", [1, 8], ids=["sheltered", "planned"])
def test_what_a_failed_step_held_is_free_again(where: str, steps: int) -> None:
    """In a plain loop that catches the error and goes on; without a garbage collection."""
    torch.manual_seed(0)
    model = TinyText(dropout=0.0)
    optimizer, fail = adam(model), ""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = model_loss(model, batch)
        if fail == "forward":
            raise ValueError("mine")
        if fail == "backward":
            loss.register_hook(_raise)
        return loss

    with Mimose(model, budget=text_budget(), optimizer=optimizer, loss_fn=loss_fn) as mimose:
        for index in range(steps):
            mimose.step(text_batch(4, LENGTHS[index], index))
        batch = text_batch(4, 200 if where == "refused" else 24)
        gc.collect()
        before = live_bytes()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        fail = where
        for _ in range(3):
            with pytest.raises(BudgetInfeasibleError if where == "refused" else ValueError) as caught:
                mimose.step(batch)
            del caught
        fail = ""
        now = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        assert live_bytes() - now == before - gradients
        mimose.step(text_batch(4, 24))
        assert len(mimose.records) == steps + 1


def _raise(_: torch.Tensor) -> None:
    raise ValueError("mine")


def test_a_closed_mimose_keeps_nothing_alive() -> None:
    """Its records, plans and report are numbers."""
    model = TinyNested()
    optimizer = adam(model)
    mimose = Mimose(model, budget="1GB", optimizer=optimizer)
    seen = []
    for index, tokens in enumerate(LENGTHS):
        batch = text_batch(4, tokens, index)
        seen += [weakref.ref(tensor) for tensor in batch.values()]
        mimose.step(batch)
    mimose.close()
    refs = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters()), *seen]
    del model, optimizer, batch
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
    assert mimose.plan({"batch": 4, "input_ids:1": 30}).predicted_peak_bytes > 0


# --- threads ------------------------------------------------------------------------------------------------------


class ThreadedBackward(Task):
    """Runs its backward on a thread of its own."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """On another thread; its error is raised here."""
        _on_a_thread(lambda: super(ThreadedBackward, self).backward(loss, *args, **kwargs))


def _on_a_thread(*functions: Callable[[], None]) -> None:
    """Runs functions at the same time, each on a thread, and raises the first error."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def trained(task: Task, *callbacks: pl.Callback) -> dict[str, torch.Tensor]:
    """Weights after a fit."""
    torch.manual_seed(3)
    quiet_trainer(*callbacks).fit(task, fresh(Fresh(16)))
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


@pytest.mark.conformance("How people train", "backward on another thread", "guarded")
@pytest.mark.parametrize("profiled", [False, True], ids=["alone", "beside a profiler"])
def test_backward_on_another_thread(profiled: bool) -> None:
    """Bit-equal; meters on CPU do not see that thread, so nothing is planned from such steps, and it is said once."""
    torch.manual_seed(0)
    plain = trained(ThreadedBackward(TinyText()))
    torch.manual_seed(0)
    callback = MimoseCallback("1GB")
    beside = profile(use_kineto=True) if profiled else nullcontext()
    with (
        beside,
        pytest.warns(UserWarning, match="could not be measured: their backward runs in another thread") as told,
    ):
        assert same(plain, trained(ThreadedBackward(TinyText()), callback))
    assert len([each for each in told if "could not be measured" in str(each.message)]) == 1
    assert all(record.sheltered and record.recomputed_units for record in callback.records)


def steps_of(make: Make, batches: Sequence[Batch], budget: int | str | None) -> Callable[[], Any]:
    """A training whose result is its losses, its weights and its records."""
    torch.manual_seed(0)
    model = make()
    optimizer = adam(model)

    def train() -> tuple[list[torch.Tensor], list[Any]]:
        if budget is None:
            losses = [plain_step(model, optimizer, batch, model_loss) for batch in batches]
            return [*losses, *model.state_dict().values()], []
        with Mimose(model, budget=budget, optimizer=optimizer) as mimose:
            losses = [mimose.step(batch) for batch in batches]
            return [*losses, *model.state_dict().values()], mimose.records

    return train


@pytest.mark.conformance("How people train", "two trainings in two threads at once", "works")
def test_two_trainings_at_the_same_time() -> None:
    """Two models, each with its own Mimose: as alone. (torch's profiler has one session in a process.)

    Without dropout: the generator is the process's, and shared whatever anybody does.
    """
    trainings: list[tuple[Make, list[Batch], int]] = [
        (_plain_text, [text_batch(4, n, i) for i, n in enumerate(LENGTHS * 2)], budget_for(_plain_text, _longest())),
        (TinyVision, [image_batch(4, n, n, i) for i, n in enumerate(LENGTHS * 2)], 10**9),
    ]
    alone = [steps_of(make, batches, None)()[0] for make, batches, _ in trainings]
    runs = [steps_of(*training) for training in trainings]  # here: weights come out of the process's generator
    ready, found = threading.Barrier(len(trainings)), {}

    def train(index: int) -> None:
        ready.wait()
        found[index] = runs[index]()

    _on_a_thread(*(lambda index=index: train(index) for index in range(len(trainings))))
    for index, wanted in enumerate(alone):
        values, records = found[index]
        assert all(map(torch.equal, values, wanted))
        assert any(not record.sheltered for record in records)
        assert all(record.measured_peak_bytes for record in records if record.sheltered)
    assert any(saving_units(record) for record in found[0][1] if not record.sheltered)


def _plain_text() -> nn.Module:
    return TinyText(dropout=0.0)


def _longest() -> Batch:
    return text_batch(4, max(LENGTHS))


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.conformance("Leaks", "what a checkpoint keeps of the callback is plain data", "works")
def test_the_state_is_plain_data(tmp_path: Path) -> None:
    """JSON takes it as it is, and `weights_only=True` loads the checkpoint that holds it."""
    callback = MimoseCallback("1GB")
    trainer = quiet_trainer(callback)
    trainer.fit(Task(TinyText()), fresh(Fresh(10)))
    state = callback.state_dict()
    assert json.loads(json.dumps(state)) == json.loads(json.dumps(_plain(state)))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["MimoseCallback"]
    assert json.dumps(loaded) == json.dumps(state)
    resumed = MimoseCallback("1GB")
    resumed.load_state_dict(json.loads(json.dumps(loaded)))
    quiet_trainer(resumed).fit(Task(TinyText()), fresh(Fresh(10)))
    assert not any(record.sheltered for record in resumed.records)


def _plain(value: Any) -> Any:
    """The value, if it consists of nothing but built-in types (not of what is derived from them, as NumPy's floats)."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    assert type(value) in (str, int, float, bool, type(None)), f"{type(value)}: {value!r}"
    return value


def test_nothing_waits_for_the_garbage_collector() -> None:
    """Memory is free as soon as the last name of it is gone: nothing of a step is in a cycle."""
    gc.collect()
    gc.disable()
    try:
        model = TinyText()
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mimose = Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=model_loss)
        for length in (16, 24, 40, 12, 24):
            mimose.step(text_batch(2, length))
        recorders = [thing for thing in gc.get_objects() if type(thing).__name__ == "StepRecorder"]
        assert not recorders
        mimose.close()
        del model, optimizer, mimose
        assert not any(parameter() is not None for parameter in parameters)
    finally:
        gc.enable()
