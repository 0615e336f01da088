"""Activation checkpointing that looks at no batch: every layer, and Chen's segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mimose.actions.caches import CacheSwitch
from lightning_mimose.bench.runner import Case, NotRun, Runner
from lightning_mimose.units import find_units


def every_layer(case: Case) -> Runner:
    """Hugging Face's own switch where the model has it, `torch.utils.checkpoint` around every unit elsewhere."""
    notes: list[str] = []
    return Runner(case, prepare=partial(_switch_on, notes=notes), notes=notes)


def _switch_on(model: nn.Module, notes: list[str]) -> None:
    supported = [module for module in model.modules() if getattr(module, "supports_gradient_checkpointing", False)]
    if supported:
        # The newer name of the same switch; the older one warns where both exist.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        switch: Any = next(getattr(supported[0], name) for name in names if hasattr(supported[0], name))
        switch({"use_reentrant": False})
        return
    notes.append("The model has no gradient_checkpointing_enable: torch.utils.checkpoint around every unit.")
    CacheSwitch().off(model)
    for unit in find_units(model):
        if unit.shelter:
            _checkpoint(unit.module)


def _checkpoint(module: nn.Module, **options: Any) -> None:
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)


def chen(case: Case) -> Runner:
    """Segments of sqrt(n) blocks (arXiv 1604.06174), each checkpointed as one."""
    return Runner(case, prepare=_into_segments)


def _into_segments(model: nn.Module) -> None:
    found = chains(model)
    if not found:
        raise NotRun("it found no chain of equal blocks to make segments of")
    CacheSwitch().off(model)
    length = math.ceil(math.sqrt(sum(map(len, found))))
    for chain in found:
        count = math.ceil(len(chain) / length)
        for index in range(count):  # of lengths that differ by one at most
            part = chain[index * len(chain) // count : (index + 1) * len(chain) // count]
            _join(part)


def chains(model: nn.Module) -> list[list[nn.Module]]:
    """Runs of sibling blocks of one class in a list or sequence, each block a unit or what holds several.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        >>> model = nn.Sequential(nn.Linear(8, 8), block(), block(), block(), nn.Linear(8, 2))
        >>> [len(chain) for chain in chains(model)]
        [3]
    """
    by_name = dict(model.named_modules())
    blocks: dict[str, None] = {}
    for unit in find_units(model):
        name = unit.name if unit.shelter else ""
        while name:
            holder = by_name[name.rpartition(".")[0]]
            alike = [child for child in holder.children() if type(child) is type(by_name[name])]
            if isinstance(holder, (nn.ModuleList, nn.Sequential)) and len(alike) > 1:
                blocks[name] = None
                break
            name = name.rpartition(".")[0]
    grouped = groupby(blocks, key=lambda name: (name.rpartition(".")[0], type(by_name[name])))
    return [[by_name[name] for name in names] for _, names in grouped]


def _join(blocks: Sequence[nn.Module]) -> None:
    """The first block runs all of them in one checkpoint; the others hand on what they are given."""
    forwards: list[Callable[..., Any]] = [block.forward for block in blocks]

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            first = forward(first, *args, **kwargs)
            if not isinstance(first, torch.Tensor):
                raise NotRun("its blocks hand on more than one tensor, which a chain of segments has no room for")
        return first

    blocks[0].forward = partial(checkpoint, run, use_reentrant=False)
    for block in blocks[1:]:
        block.forward = _hand_on


def _hand_on(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return first
