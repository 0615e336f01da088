"""Strategies that carry the budget: for those who choose a strategy by name instead of adding a callback.

The callback does the planning in either case. The mixin adds it to the Trainer, and what only a strategy can
reach later: installing before a wrap, agreement of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from lightning_mimose.shared.budget import AnyBudget

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_mimose.plugin.callback import MimoseCallback


class MimoseStrategyMixin:
    """Adds a memory budget to any supported strategy; takes the keywords of `MimoseCallback`.

    Args:
        budget: See `MimoseCallback`.
        units: See `MimoseCallback`.
        size_fn: See `MimoseCallback`.
        actions: See `MimoseCallback`.
        planner: See `MimoseCallback`.
        on_infeasible: See `MimoseCallback`.
        on_oom: See `MimoseCallback`.
        host_budget: See `MimoseCallback`.
        kwargs: The strategy's own.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=MimoseSingleDeviceStrategy(budget="8GB"), accelerator="cpu", logger=False)
        >>> trainer.strategy.mimose_budget
        '8GB'
    """

    def __init__(
        self,
        *args: Any,
        budget: AnyBudget = "auto",
        units: list[str] | None = None,
        size_fn: Callable[[Any], int | Mapping[str, int]] | None = None,
        actions: list[str] | None = None,
        planner: Literal["auto", "exact", "greedy"] | Callable[..., Any] = "auto",
        on_infeasible: Literal["raise", "warn"] = "raise",
        on_oom: Literal["retry", "raise"] = "retry",
        host_budget: str | int | float | None = None,
        **kwargs: Any,
    ) -> None:
        from lightning_mimose.plugin.callback import MimoseCallback

        super().__init__(*args, **kwargs)
        self.mimose_callback: MimoseCallback = MimoseCallback(
            budget, units, size_fn, actions, planner, on_infeasible, on_oom, host_budget
        )

    @property
    def mimose_budget(self) -> AnyBudget:
        """The budget as it was given."""
        return self.mimose_callback.budget

    def connect(self, model: Any) -> None:
        """Put the callback among the trainer's, ahead of `Callback.setup`."""
        super().connect(model)  # type: ignore[misc]
        trainer: Trainer | None = getattr(model, "_trainer", None)
        if trainer is not None and self.mimose_callback not in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.append(self.mimose_callback)  # type: ignore[attr-defined]


class MimoseSingleDeviceStrategy(MimoseStrategyMixin, SingleDeviceStrategy):
    """`SingleDeviceStrategy` inside a memory budget; `Trainer(strategy="mimose")`.

    Args:
        device: Where to train; by default the accelerator's first device, or the CPU.
        kwargs: Those of `MimoseStrategyMixin` and `SingleDeviceStrategy`.
    """

    strategy_name = "mimose"

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._choose_device = device is None

    @property
    def parallel_devices(self) -> list[torch.device]:
        """None before the Trainer has chosen: Lightning hands its choice to any strategy with this attribute."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if self._choose_device and devices:
            self._root_device = torch.device(devices[0])


class MimoseDDPStrategy(MimoseStrategyMixin, DDPStrategy):
    """`DDPStrategy` inside a memory budget on every rank; `Trainer(strategy="mimose_ddp")`."""

    strategy_name = "mimose_ddp"


def register() -> None:
    """Make the two strategies known to Lightning by name."""
    for strategy in (MimoseSingleDeviceStrategy, MimoseDDPStrategy):
        name = strategy.strategy_name
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=f"{strategy.__name__}: training inside a budget")
