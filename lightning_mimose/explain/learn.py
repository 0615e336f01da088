"""Learning about a model before its training: a few real, small steps under the most saving plan."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import nn

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.engine.core import Engine
from lightning_mimose.errors import LossError, MimoseError
from lightning_mimose.explain.samples import MakeBatch, say
from lightning_mimose.loop import own_loss
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.fits import with_side
from lightning_mimose.predict.prediction import Prediction

MOST_SIZES = 16
"""Sizes that are run at most."""
_FRACTIONS = (3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2)
_FEWEST = 5
"""Values of a dimension to learn at: as few as a polynomial has coefficients would follow any."""

Size = dict[str, int]
OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Knowledge:
    """What small steps taught.

    Attributes:
        advisor: Answers for any size.
        batches: A batch of every size that was asked for; only its shapes are read.
        sizes: The sizes that were run.
        reference: A batch of the largest of them.
        reference_seconds: What a plain step of it took.
        device: Where they ran.
        units: Names of the units.
    """

    advisor: Advisor
    batches: tuple[Any, ...]
    sizes: tuple[Size, ...]
    reference: Any
    reference_seconds: float
    device: torch.device
    units: tuple[str, ...]


class _Pupil(Estimator):
    """An estimator that does not predict while it learns, so that every step is sheltered and measured."""

    learning = True

    def predict(self, dims: Mapping[str, int]) -> Prediction | None:
        return None if self.learning else super().predict(dims)


def learn(
    model: nn.Module,
    make_batch: MakeBatch,
    asked: Sequence[Size],
    *,
    units: Sequence[str] | None = None,
    actions: Sequence[str] | None = None,
    optimizer: OptimizerName = "adamw",
    device: torch.device | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Knowledge:
    """Run scaled-down training steps until sizes as large as those asked for can be predicted.

    A dimension along which the model cannot be scaled down (images of one fixed size) keeps its asked values; the
    batch then is the smaller. The model's weights change: give one that nobody needs.

    Args:
        model: The model; moved to the device.
        make_batch: Makes a batch of given dimensions.
        asked: The sizes to know about, all with the same names.
        units: As `Engine` takes them.
        actions: As `Engine` takes them.
        optimizer: What will train it.
        device: Where to run; None takes the accelerator there is, else the CPU.
        tell: Told what is going on, for a progress line.

    Raises:
        MimoseError: The model cannot be run, or nothing in it can be planned.
    """
    where = device or training_device()
    batches = tuple(make_batch(size) for size in asked)
    model.to(where)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise MimoseError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train."
        )
    optim: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=1e-4) if optimizer == "adamw" else torch.optim.SGD(parameters, lr=1e-4)
    )
    engine = Engine(model, budget=1.0, units=units, actions=actions, planner="exact", device=where)
    pupil = engine.advisor.estimator = _Pupil(turns=engine.advisor.turns)
    engine.advisor.estimator.bounds.refute()  # every size is measured, however ample the budget
    engine.watch([optim])
    engine.attach()
    try:
        with loss_of(model) as loss:
            student = _Student(model, engine, optim, loss, make_batch, where)
            done: list[Size] = []
            for size in student.plan(asked):
                tell(f"step {len(done) + 1}, at most {MOST_SIZES}: {_words(size)}")
                student.sheltered(size)
                done.append(size)
                pupil.learning = False
                enough = all(_trusted(engine.advisor, batch) for batch in batches)
                pupil.learning = True
                if enough:
                    break
            largest = max(done, key=lambda size: torch.Size(size.values()).numel())
            tell(f"timing a plain step: {_words(largest)}")
            seconds = student.plain_seconds(largest)
        pupil.learning = False
        reference = make_batch(largest)
    finally:
        engine.detach()
    names = tuple(unit.name for unit in engine.units)
    return Knowledge(engine.advisor, batches, tuple(done), reference, seconds, where, names)


class _Student:
    """Runs steps."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Any], torch.Tensor],
        make_batch: MakeBatch,
        device: torch.device,
    ) -> None:
        self._model, self._engine, self._optimizer = model, engine, optimizer
        self._loss_of, self._make_batch, self._device = loss_of, make_batch, device

    def plan(self, asked: Sequence[Size]) -> Iterator[Size]:
        """The sizes to run, the first being one that was found to work."""
        names = list(asked[0])
        fixed = [name for name in names if name != "batch"]
        error: MimoseError | None = None
        for held in dict.fromkeys([(), *((name,) for name in fixed), tuple(fixed)]):
            values = {
                name: sorted({size[name] for size in asked})
                if name in held
                else scaled(name, [size[name] for size in asked], self._engine.advisor.turns.get(name, ()))
                for name in names
            }
            first = {name: values[name][len(values[name]) // 2] for name in names}
            try:
                self.sheltered(first)
            except MimoseError as failure:
                error = error or failure
                continue
            sizes = [dict(zip(names, combination, strict=True)) for combination in product(*values.values())]
            random.Random(0).shuffle(sizes)  # any few of them then differ in every dimension
            yield first
            yield from [size for size in sizes if size != first][: MOST_SIZES - 1]
            return
        assert error is not None
        raise error

    def sheltered(self, size: Size) -> None:
        """One step under the engine, measured."""
        engine, batch = self._engine, move_data_to_device(self._make_batch(size), self._device)
        try:
            engine.begin_step(batch)
            engine.begin_forward()
            self._step(batch, size, engine)
            engine.end_step()
        except BaseException:
            engine.abort_step()
            raise

    def plain_seconds(self, size: Size) -> float:
        """Seconds of a step as the model does it by itself, the best of three."""
        batch = move_data_to_device(self._make_batch(size), self._device)
        times = []
        for _ in range(3):
            self._synchronize()
            began = time.perf_counter()
            self._step(batch, size, None)
            self._synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _step(self, batch: Any, size: Size, engine: Engine | None) -> None:
        try:
            loss = self._loss_of(batch)
            self._model.zero_grad(set_to_none=True)
            if engine is not None:
                engine.begin_backward(loss)
            loss.backward()
            if engine is not None:
                engine.after_backward()
                engine.before_update()
            self._optimizer.step()
        except MimoseError:
            raise
        except Exception as error:
            what = f"A training step of {type(self._model).__name__} with {_words(size)}"
            raise MimoseError(f"{what} failed ({say(error)}).") from error


def scaled(name: str, values: Sequence[int], turns: Sequence[int] = ()) -> list[int]:
    """Smaller values of a dimension to learn at: up to half of the largest, further where these are fewer than five.

    Of a small batch, up to three. Divisibility by powers of two up to 32 is kept where there is room: images go through
    halvings. Where smaller batches take other kernels they teach nothing: then it is up to three quarters of the batch,
    or the batch itself.

    Args:
        name: The dimension.
        values: Those that were asked for.
        turns: From which values on kernels are others.

    Example:
        >>> scaled("input_ids:1", [512]), scaled("input_ids:1", [64]), scaled("batch", [8])
        ([96, 128, 160, 192, 224, 256], [16, 24, 32, 40, 48], [2, 3, 4])
        >>> scaled("pixel_values:2", [224]), scaled("batch", [1]), scaled("batch", [32], turns=[2, 16])
        ([48, 64, 80, 96, 112], [1], [16, 20, 24])
    """
    largest = max(values)
    if name == "batch":
        sides = {with_side(name, value, turns)[1].start: value for value in sorted(values)}
        return sorted(set[int]().union(*(_smaller_batches(side, value) for side, value in sides.items())))
    step = 1
    while step < 32 and largest % (2 * step) == 0 and 16 * step <= largest:
        step *= 2
    found = sorted({min(largest, step * ceil(largest * share / step)) for share in _FRACTIONS})
    while len(found) < _FEWEST and found[-1] + step <= largest:
        found.append(found[-1] + step)
    return found


def _smaller_batches(least: int, largest: int) -> set[int]:
    """Batches to learn at for one, of those that take the same kernels: from `least` on."""
    if largest <= 2:
        return {max(1, least), largest}
    # Kernels treat a batch of one in their own way, so it teaches little about others.
    smaller = {max(2, ceil(largest / 4)), max(3, ceil(largest * 3 / 8)), max(2, ceil(largest / 2))}
    if min(smaller) >= least:
        return smaller
    return {least + ceil((largest - least) * quarter / 4) for quarter in range(3)}


@contextmanager
def loss_of(model: nn.Module) -> Iterator[Callable[[Any], torch.Tensor]]:
    """The loss of a batch as training would compute it; a LightningModule's logging is off meanwhile."""
    if not isinstance(model, LightningModule):
        model.train()

        def own(batch: Any) -> torch.Tensor:
            try:
                return own_loss(model, batch)
            except LossError as error:
                raise LossError(
                    f"{type(model).__name__} returns no scalar loss, and nothing says what training makes of it. "
                    "Name a LightningModule, or a model that returns its loss (alone, first, or as `loss`)."
                ) from error

        yield own
        return
    if not model.automatic_optimization:
        raise MimoseError(
            f"{type(model).__name__} optimizes by itself (automatic_optimization=False), which cannot be run without a "
            "Trainer. Name its inner model instead."
        )

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Stands in for `log` and `log_dict`, which need a Trainer."""

    def loss(batch: Any) -> torch.Tensor:
        out = model.training_step(batch, 0)
        out = out["loss"] if isinstance(out, Mapping) else out
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"training_step returned a {type(out).__name__} without a loss")
        return out

    model.log = model.log_dict = nothing  # type: ignore[method-assign]
    try:
        yield loss
    finally:
        del model.log, model.log_dict


def _trusted(advisor: Advisor, batch: Any) -> bool:
    try:
        return advisor.timeline(batch)[1].trusted
    except MimoseError:
        return False


def training_device() -> torch.device:
    """The accelerator there is, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # parts of torch want to be told which one
    return torch.device("cpu")


def _words(size: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in size.items())
