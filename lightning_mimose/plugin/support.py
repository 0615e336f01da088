"""What the plugin reads of Lightning, and which strategies it supports. The only module that knows either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_mimose.errors import UnsupportedError

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_REFUSED = {
    "FSDPStrategy": "its flat parameters are gathered inside the units",
    "DeepSpeedStrategy": "it partitions parameters while a unit runs",
    "XLAStrategy": "XLA traces the whole step",
    "XLAFSDPStrategy": "XLA traces the whole step",
    "SingleDeviceXLAStrategy": "XLA traces the whole step",
}
FREED_IN_A_ROW = 4
"""Batches in a row that find no gradients in their backward, after others that did, until the next is expected to."""


def tell(line: str) -> None:
    """Show a line to the user: through Lightning's own logger, on rank 0.

    Lightning gives its loggers a handler where the script configured none, so the line is seen by default, and goes
    wherever the script sends Lightning's other lines.
    """
    rank_zero_info(line)


def warn(text: str) -> None:
    """Warn the user, on rank 0."""
    rank_zero_warn(text)


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
            f"{type(strategy).__name__} was never tried with MimoseCallback. Supported are single-device training, "
            "DDP and FSDP2: strategy='auto', 'ddp' or ModelParallelStrategy()."
        )


def check_module(module: Any) -> None:
    """Refuse a `training_step` that fetches its batches itself.

    Raises:
        UnsupportedError: It takes `dataloader_iter`.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedError(
            f"{type(module).__name__}.training_step takes dataloader_iter: it fetches its batches itself, so that "
            "nothing can be planned before it runs. Let it take batch, or take the callback out."
        )


_SEARCHES = {
    "LearningRateFinder": "Set the learning rate by hand, or search for it before, on a device where every step fits.",
    "BatchSizeFinder": "Set the batch size by hand: what is found is the largest that fits the device where nothing is "
    "recomputed, and a batch that no plan keeps inside the budget ends in a BudgetInfeasibleError after it.",
}


def warn_of_searches(trainer: Any) -> None:
    """Say whose trial steps nothing is planned for; Lightning's Tuner puts such a callback among the others, too."""
    kinds = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    found = [name for name in _SEARCHES if name in kinds]
    if found and not trainer.fast_dev_run:  # it searches for nothing then
        warn(
            f"mimose: the trial steps of {' and '.join(found)} are not held inside the budget, for Lightning runs them "
            f"without the other callbacks. {' '.join(_SEARCHES[name] for name in found)}"
        )


class TrainingStepHook:
    """Calls a function right before every `strategy.training_step`.

    No callback hook lies between the optimizer's start and the forward: `on_train_batch_start` comes before
    `optimizer.step(closure)`, and the closure calls the strategy at once.

    Args:
        strategy: The strategy.
        before: Called before every training step.
        translate: Given what a training step raised; returns what to raise in its place, or None.
    """

    def __init__(
        self,
        strategy: Any,
        before: Callable[[], None],
        translate: Callable[[Exception], BaseException | None] = lambda error: None,
    ) -> None:
        self._strategy = strategy
        self._own = vars(strategy).get("training_step")
        original = strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            settle_buckets(strategy)
            before()
            try:
                return original(*args, **kwargs)
            except Exception as error:
                other = translate(error)
                if other is None:
                    raise
                raise other from error

        strategy.training_step = training_step

    def remove(self) -> None:
        """Give the strategy its own method back."""
        vars(self._strategy).pop("training_step", None)
        if self._own is not None:
            self._strategy.training_step = self._own


def bucket_bytes(strategy: Any, model: nn.Module) -> int:
    """Bytes of DDP's gradient buckets, which stay resident whether gradients exist or not.

    With `gradient_as_bucket_view=True` the gradients lie inside them, and are counted a second time: only when the
    first backward has run do they move there, so nothing less would be safe.
    """
    if reducer_of(strategy) is None:
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def settle_buckets(strategy: Any) -> None:
    """Let DDP move its buckets now, if it would do so first thing in its forward (once, after the first backward).

    It frees the old ones and makes new ones. A meter that is running sees memory made, and on CPU not that older
    memory goes: that step would look a parameter's worth larger than it is. Every rank is at this point here.
    """
    rebuild = getattr(reducer_of(strategy), "_rebuild_buckets", None)
    if rebuild is not None:
        rebuild()


def reducer_of(strategy: Any) -> Any:
    """What exchanges gradients between the ranks under DDP; None elsewhere."""
    # Asked on every step, and a module takes microseconds to say that it has no such attribute.
    return getattr(getattr(strategy, "model", None), "__dict__", {}).get("reducer")


def precision_of(strategy: Any) -> str:
    """Names the precision that the steps run in: what was measured in one says nothing about another."""
    plugin = strategy.precision_plugin
    return f"{type(plugin).__name__} {getattr(plugin, 'precision', '')}"


def uses_torch_profiler(profiler: Any) -> bool:
    """Whether a trainer's profiler starts torch's own, which it does in mid-step and which bears no other beside it."""
    return any(kind.__name__ == "PyTorchProfiler" for kind in type(profiler).__mro__)


class GradientHabits:
    """Whether the loop frees last step's gradients between a batch's forward and backward.

    Lightning sets them to None on the first batch of every accumulation, in automatic optimization. A module that
    overrides `optimizer_zero_grad` may keep them (as zeros), which is seen at the first backward that should have
    found none; until then they are taken to stay, which is never less than there is. It may change its mind later:
    every such batch is looked at, and once gradients have stayed it takes a few batches without any to believe that
    they go.
    """

    def __init__(self, module: Any) -> None:
        # By name, not by class: `pytorch_lightning`'s LightningModule is another one.
        owner = next(kind for kind in type(module).__mro__ if "optimizer_zero_grad" in vars(kind))
        self._frees: bool | None = None if owner.__name__ != "LightningModule" else True
        self._may_change = self._frees is None
        self._watched: nn.Parameter | None = None
        self._freed_in_a_row = 0

    def zeroes(self, module: nn.Module, due: bool) -> bool:
        """Whether gradients are freed in this batch, if that is when Lightning would. Called before its forward."""
        self._watched = _with_gradient(module) if due and self._may_change else None
        return due and self._frees is True

    def look(self, module: nn.Module) -> None:
        """See what zeroing left. Called before the backward."""
        watched, self._watched = self._watched, None
        if watched is None or (self._frees and watched.grad is None):  # to look at all of them takes longer
            return
        if watched.grad is not None or _with_gradient(module) is not None:
            self._frees, self._freed_in_a_row = False, 0
            return
        self._freed_in_a_row += 1
        if self._frees is None or self._freed_in_a_row >= FREED_IN_A_ROW:
            self._frees = True


def is_first_of_accumulation(trainer: Any, module: Any, batch_idx: int) -> bool:
    """Whether Lightning zeroes the gradients in this batch."""
    return bool(module.automatic_optimization and batch_idx % max(1, int(trainer.accumulate_grad_batches)) == 0)


def _with_gradient(module: nn.Module) -> nn.Parameter | None:
    """The first parameter that has a gradient."""
    return next((parameter for parameter in module.parameters() if parameter.grad is not None), None)


def trained_parameters(module: nn.Module) -> int:
    """Identifies parameters and which are trained: callbacks freeze, unfreeze, prune or replace them in mid-run."""
    return hash(tuple((name, id(each), each.shape, each.requires_grad) for name, each in module.named_parameters()))
