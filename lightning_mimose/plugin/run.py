"""One fit: an engine, and the hooks by which it sees the steps that Lightning runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_mimose.engine.attempts import Attempts
from lightning_mimose.engine.core import Engine
from lightning_mimose.errors import is_out_of_memory
from lightning_mimose.measure.optimizers import optimized
from lightning_mimose.plugin.retry import Exchanges, RetryHook, keep_logged, why_not
from lightning_mimose.plugin.support import (
    GradientHabits,
    TrainingStepHook,
    bucket_bytes,
    is_first_of_accumulation,
    precision_of,
    tell,
    trained_parameters,
    uses_torch_profiler,
)
from lightning_mimose.report.metrics import updates_now

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


MOST_FROZEN = 3
"""Times that a hook after the callback's may freeze layers before that is looked at in the next step only."""


class Run:
    """An engine on a trainer's model; nothing is attached before `start`.

    Args:
        trainer: The trainer.
        module: What it trains.
        options: What `Engine` takes besides what the trainer tells.
        retries: Whether a batch runs again when the device is out of memory.

    Raises:
        BudgetError: The budget cannot be understood, or exceeds the device.
        UnitsError: There is nothing to plan.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, options: Mapping[str, Any], *, retries: bool) -> None:
        self._trainer, self._module, self._retries = trainer, module, retries
        self._strategy = trainer.strategy
        self.engine = Engine(
            module,
            device=self._strategy.root_device,
            bucket_bytes=bucket_bytes(self._strategy, module),
            precision=precision_of(self._strategy),
            profile=not uses_torch_profiler(trainer.profiler),  # type: ignore[attr-defined]
            **options,
        )
        self.engine.advisor.announce = tell
        self.habits = GradientHabits(module)
        self._trained = trained_parameters(module)
        self._hooks: list[TrainingStepHook | RetryHook] = []
        self._frozen = 0
        self._begin: Callable[[], None] | None = None
        self._attempts: weakref.ref[Attempts] | None = None  # what it holds cannot be copied

    def start(self) -> None:
        """Reserve what the optimizers will need, and attach.

        Raises:
            BudgetInfeasibleError: Parameters, gradients and optimizer state alone exceed the budget.
            UnitsError: Every unit is checkpointed already.
        """
        trainer, strategy, engine = self._trainer, self._strategy, self.engine
        engine.watch(trainer.optimizers)
        engine.attach()
        self._hooks.append(TrainingStepHook(strategy, self._begin_forward, self._translated))
        exchanged = Exchanges(strategy)

        def keep() -> Callable[[], None]:
            exchanged.note()
            return keep_logged(trainer)

        attempts = Attempts(
            engine.running,
            self._module,
            list(optimized(*trainer.optimizers)),
            engine.device,
            retry=self._retries,
            keep=keep,
            forbids=lambda: why_not(strategy, engine, exchanged()),
        )
        self._attempts = weakref.ref(attempts)
        self._hooks.append(RetryHook(trainer, attempts))

    def close(self) -> None:
        """Leave trainer and model as they were."""
        for hook in self._hooks:
            hook.remove()
        self.engine.detach()

    def _translated(self, error: Exception) -> BaseException | None:
        if self._module.automatic_optimization or not is_out_of_memory(error):
            return None
        return self.engine.running.out_of_memory(error, "A batch of manual optimization cannot run again.")

    def is_another(self, batch_idx: int) -> bool:
        """Whether parameters were added, dropped, frozen or unfrozen since the start.

        Args:
            batch_idx: Of the batch that is next: all are looked at before the first one of an epoch, or where an
                optimizer has others.
        """
        looks = batch_idx == 0 or self._optimizers_are_others
        return looks and trained_parameters(self._module) != self._trained

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Plan a batch.

        Raises:
            BudgetInfeasibleError: No plan keeps it inside the budget, or the optimizers are others than before, and
                their state alone exceeds it.
            SizeError: It has no tensors, or another type than before.
        """
        module = self._module
        first = is_first_of_accumulation(self._trainer, module, batch_idx)
        self._begin = partial(
            self._begin_step,
            batch,
            batch_idx=batch_idx,
            epoch=self._trainer.current_epoch,
            zeroes_gradients=self.habits.zeroes(module, first),
            accumulates=not first and module.automatic_optimization,
            updates=updates_now(self._trainer),
        )
        self._begin()

    def _begin_step(self, batch: Any, **told: Any) -> None:
        if self._optimizers_are_others:
            optimizers = self._trainer.optimizers
            attempts = None if self._attempts is None else self._attempts()
            if attempts is not None:
                attempts.zeroes(list(optimized(*optimizers)))
            self.engine.ledger.refresh()  # parameters that are new to them may be new to the model
            self.engine.watch(optimizers)
        self.engine.begin_step(batch, **told)

    @property
    def _optimizers_are_others(self) -> bool:
        """Whether the trainer was given other optimizers than those that are watched, or these other parameters."""
        return not self.engine.ledger.watches(self._trainer.optimizers)

    def _trains_others(self) -> bool:
        """Whether layers were frozen or unfrozen since the step began.

        What is frozen takes less but for the step itself, so that where it comes again and again the next will do.
        """
        ledger = self.engine.ledger
        if ledger.trains_more():
            return True
        freezes = self._frozen < MOST_FROZEN and ledger.trains_fewer()
        self._frozen += freezes
        return freezes

    def _begin_forward(self) -> None:
        """Plan anew if the module's own hook, which comes after the callback's, has changed what is trained, or how."""
        begin, self._begin = self._begin, None
        if begin is not None and (self._optimizers_are_others or self._trains_others()):
            self.engine.drop_step()
            begin()
        self.engine.begin_forward()
