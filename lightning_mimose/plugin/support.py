"""What the plugin reads of Lightning, and which strategies it supports. The only module that knows either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_mimose.errors import UnsupportedError

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy")
_REFUSED = {
    "FSDPStrategy": "its flat parameters are gathered inside the units",
    "DeepSpeedStrategy": "it partitions parameters while a unit runs",
    "ModelParallelStrategy": "its collectives need the same plan on every rank",
    "XLAStrategy": "XLA traces the whole step",
    "XLAFSDPStrategy": "XLA traces the whole step",
    "SingleDeviceXLAStrategy": "XLA traces the whole step",
}


def check_strategy(strategy: Any) -> None:
    """Refuse a strategy that is not supported, by name.

    Raises:
        UnsupportedError: The strategy is known not to work, or was never tried.
    """
    names = [kind.__name__ for kind in type(strategy).__mro__]
    for name in names:
        if name in _REFUSED:
            raise UnsupportedError(
                f"{type(strategy).__name__} is not supported: {_REFUSED[name]}. Use strategy='auto' or 'ddp' with this "
                "callback, or take the callback out."
            )
    if not any(name in _SUPPORTED for name in names):
        raise UnsupportedError(
            f"{type(strategy).__name__} was never tried with MimoseCallback. Supported are single-device training and "
            "DDP: strategy='auto' or 'ddp'."
        )


class TrainingStepHook:
    """Calls a function right before every `strategy.training_step`.

    No callback hook lies between the optimizer's start and the forward: `on_train_batch_start` comes before
    `optimizer.step(closure)`, and the closure calls the strategy at once.
    """

    def __init__(self, strategy: Any, before: Callable[[], None]) -> None:
        self._strategy = strategy
        original = strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        strategy.training_step = training_step

    def remove(self) -> None:
        """Give the strategy its own method back."""
        vars(self._strategy).pop("training_step", None)


def bucket_bytes(strategy: Any, model: nn.Module) -> int:
    """Bytes of DDP's gradient buckets, which stay resident beside the gradients unless these are views of them."""
    wrapped = getattr(strategy, "model", None)
    if not hasattr(wrapped, "reducer") or getattr(wrapped, "gradient_as_bucket_view", False):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def zeroes_gradients(trainer: Any, module: Any, batch_idx: int) -> bool:
    """Whether the loop sets gradients to None between this batch's forward and backward."""
    if not module.automatic_optimization:
        return False
    return batch_idx % max(1, int(trainer.accumulate_grad_batches)) == 0
