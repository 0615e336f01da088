"""Optimizers: what they update, the state they have, and what an update will add, measured before the first.

A twin of each takes two steps on small copies of its parameters; what that took is scaled to the real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._pytree import tree_leaves

from lightning_mimose.measure.meter import make_meter
from lightning_mimose.parts import storage_bytes, storages_in
from lightning_mimose.sharding import held_bytes

_SHAPES = (64, 64), (64, 64), (4096,), (64, 64), (4096,)
"""Of the parameters that optimizers are tried on: each as large as the others."""


def optimized(*optimizers: Optimizer) -> Iterator[nn.Parameter]:
    """The parameters that some optimizers update, in order."""
    # No list: to allocate one in mid-step can take longer than to look at all parameters.
    return chain.from_iterable([group["params"] for optimizer in optimizers for group in optimizer.param_groups])


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of all state that some optimizers have."""
    return storage_bytes(state_tensors(optimizers))


def state_tensors(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Every tensor in it."""
    states = [leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))]
    return [leaf for leaf in states if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class OptimizerCost:
    """What one optimizer update adds: state made by the first one, and what lives only inside it.

    Attributes:
        state_bytes: Bytes that the first update will add and keep.
        transient_bytes: Bytes that every update needs at once besides.
        growing_bytes: All that is ever kept by an optimizer whose state grows from update to update, and that evaluates
            the loss while it holds its temporaries: what is missing of it is reserved from the start.
    """

    state_bytes: int
    transient_bytes: int
    growing_bytes: int = 0


def probe_optimizer(optimizer: Optimizer) -> OptimizerCost:
    """Measure what an optimizer will allocate, on small copies of its own parameters.

    The ratio of state and temporaries to parameters is measured on small tensors of the same dtype and with the
    same settings, matrices and a vector, and scaled to the real parameters that take gradients: to all of them, or,
    where an update of more of them takes no more temporaries, to the two largest.

    Limitations:
        Optimizers whose state is not proportional to the parameters (Adafactor, Shampoo) are estimated.
        One that cannot be copied or run on its own counts as two fp32 values per parameter, Adam's need.
    """
    trainable = [parameter for parameter in optimized(optimizer) if parameter.requires_grad]
    total = storage_bytes(trainable)
    fresh = storage_bytes(p for p in trainable if not optimizer.state.get(p))
    if not total:
        return OptimizerCost(0, 0)
    if isinstance(optimizer, torch.optim.LBFGS):
        # Counted in parameters: its history (a direction and a step per entry), the last direction and gradient, and
        # what an update holds besides, more of it with a line search. Measured: `tests/measure/test_optimizers.py`.
        group = optimizer.param_groups[0]
        kept = 2 * group["history_size"] + 2 + (5 if group["line_search_fn"] is None else 11)
        return OptimizerCost(0, 0, kept * total)
    try:
        state_ratio, transient = _measured(optimizer, trainable)
    except Exception:  # any optimizer may be passed; failing to copy it must not end a training
        state_ratio, transient = 2.0, total
    return OptimizerCost(int(fresh * state_ratio), transient)


def works_in_groups(group: Mapping[str, Any]) -> bool:
    """Whether torch's optimizers take all parameters of a group at once: as they were told, or else by the device."""
    foreach, fused = group.get("foreach", False), group.get("fused")
    if foreach is not None or fused is not None:
        return bool(foreach) and not fused
    if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
        return False
    chosen: bool = _default_to_fused_or_foreach(list(group["params"]), group.get("differentiable", False))[1]
    return chosen


def _measured(optimizer: Optimizer, trainable: Sequence[torch.Tensor]) -> tuple[float, int]:
    """State to bytes of parameters, and the bytes of an update's temporaries."""
    group = optimizer.param_groups[0]
    settings = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
    if "foreach" in settings:  # the copies are on another device, by which torch would choose
        settings["foreach"] = works_in_groups(group)
    every = [nn.Parameter(torch.zeros(shape, dtype=trainable[0].dtype)) for shape in _SHAPES]
    one, whole = storage_bytes(every[:1]), storage_bytes(every)
    state, together = _probed(optimizer, settings, every)
    few = _probed(optimizer, settings, every[:3])[1]
    if together > 1.1 * few:  # of all of them at once
        return state / whole, int(together / whole * storage_bytes(trainable))
    alone = max(_probed(optimizer, settings, [each])[1] for each in every[1:3]) / one
    left = max(few / one - alone, 0.0)  # of the parameter before, whose names in the loop still hold them
    largest, *others = sorted((held_bytes(parameter) for parameter in trainable), reverse=True)
    return state / whole, int(alone * largest + left * max(others, default=0))


def _probed(optimizer: Optimizer, settings: Mapping[str, Any], parameters: list[nn.Parameter]) -> tuple[int, int]:
    """State and temporaries, in bytes, of the second update of some parameters."""
    # The base class's settings, not the user's wrapper: a copy with its own parameters and no state.
    twin = copy.copy(optimizer)
    twin.state = type(optimizer.state)(optimizer.state.default_factory)
    twin.param_groups = [{**settings, "params": parameters}]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    with torch.random.fork_rng(devices=[]):
        step(twin)
        state = state_bytes([twin])
        meter = make_meter(torch.device("cpu"))
        meter.start()
        meter.follow(storages_in([*parameters, *state_tensors([twin])]))
        try:
            step(twin)
        finally:
            intervals = meter.stop()
    return state, max((interval.peak_bytes for interval in intervals), default=0)
