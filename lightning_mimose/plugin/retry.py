"""Lets Lightning's closure (forward, zeroing of gradients, backward) run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_mimose.agreement import NO_RETRY
from lightning_mimose.engine.attempts import Attempts
from lightning_mimose.plugin.support import reducer_of, settle_buckets


class RetryHook:
    """Runs every closure of automatic optimization inside `Attempts.run`.

    The closure is the one place that covers batches that only accumulate, which never reach an optimizer. Lightning
    makes one per batch, in `_make_closure`; without that method (another version) nothing is retried.
    """

    def __init__(self, trainer: Any, attempts: Attempts) -> None:
        self._loop = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "automatic_optimization", None)
        make = getattr(self._loop, "_make_closure", None)
        self._own = vars(self._loop).get("_make_closure") if self._loop is not None else None
        self.works = make is not None
        if make is None:
            return

        def _make_closure(*args: Any, **kwargs: Any) -> Any:
            closure = make(*args, **kwargs)
            run = closure.closure
            closure.closure = lambda *given, **named: attempts.run(lambda: run(*given, **named))
            return closure

        self._loop._make_closure = _make_closure  # type: ignore[union-attr]

    def remove(self) -> None:
        """Give the loop its own method back."""
        if self.works:
            vars(self._loop).pop("_make_closure", None)
            if self._own is not None:
                self._loop._make_closure = self._own  # type: ignore[union-attr]


_AFTER_IT = ("on_train_batch_end.", "on_train_epoch_end.")
"""How the keys of values begin that are logged when the closure is over (this package's own, above all)."""


def keep_logged(trainer: Any) -> Callable[[], None]:
    """Remember every value that `self.log` has collected; what is returned puts them back.

    Lightning replaces the values of a result, it does not write into them.
    """
    # Where `trainer._results` leads in a training step, by way of several properties.
    results = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_results", None)
    if results is None:
        return lambda: None
    there = set(results)
    kept = {key: dict(vars(metric)) for key, metric in results.items() if not key.startswith(_AFTER_IT)}
    size = results.batch_size

    def undo() -> None:
        for key in [key for key in results if key not in there]:
            del results[key]
        for key, values in kept.items():
            vars(results[key]).clear()
            vars(results[key]).update(values)
        results.batch_size = size

    return undo


class Exchanges:
    """Tells whether this rank has exchanged anything with the others since `note`."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._before = 0

    def note(self) -> None:
        """From here on."""
        if reducer_of(self._strategy) is not None:
            settle_buckets(self._strategy)
            self._before = self._number()

    def __call__(self) -> bool:
        """Whether it has."""
        return reducer_of(self._strategy) is not None and self._number() != self._before

    def _number(self) -> int:
        group: Any = torch.distributed.group.WORLD
        return int(group._get_sequence_number_for_group())


def why_not(strategy: Any, engine: Any, exchanged: bool) -> str:
    """Why a failed batch cannot run again under this strategy; empty if it can.

    One rank alone may repeat a forward: nothing is exchanged in it, and the others wait in backward. Once backward has
    begun, some gradients may be reduced already and others not.
    """
    if engine.agreement is not None:
        return NO_RETRY
    if engine.running.gradients == "zeroed" and engine.running.in_backward():
        return "this LightningModule zeroes gradients in a way of its own (optimizer_zero_grad)"
    if reducer_of(strategy) is None:
        return ""
    wrapped = strategy.model
    if engine.running.in_backward():
        return "under DDP some gradients may be reduced over the ranks already"
    if wrapped.broadcast_buffers and any(True for _ in wrapped.module.buffers()):
        return (
            "under DDP the forward exchanges buffers between the ranks (DDPStrategy(broadcast_buffers=False) does not)"
        )
    if exchanged:
        return "this rank has exchanged data with the others in this step already"
    return ""
