"""Activations that modules keep as attributes: attention maps, features, the state of a recurrent cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.parametrized import cached_in
from lightning_mimose.errors import RecomputeError

LATEST = ""
"""Stands for the unit that was recomputed last."""
GONE = "it looks at an activation that was there before, and is gone by the time of its backward"

Place = tuple[int, str]
"""Identity of a module, and a name in it."""


class _Lost(torch.Tensor):
    """Raises whatever is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RecomputeError({LATEST: GONE})


def is_activation(value: Any) -> bool:
    """Whether it is a tensor that a backward may go through, or stands for one."""
    return isinstance(value, torch.Tensor) and (type(value) is _Lost or value.requires_grad)


def left_in(modules: Sequence[nn.Module]) -> dict[Place, torch.Tensor]:
    """The activations that modules hold, or that are cached for them, by where they are."""
    held = {
        (id(module), name): value
        for module in modules
        for name, value in vars(module).items()
        if is_activation(value) and type(value) is not _Lost
    }
    cached = cached_in(lambda: modules) or {}
    return held | {place: value for place, value in cached.items() if is_activation(value)}


def lost() -> torch.Tensor:
    """Stands for an activation that is gone, where a recomputation should never look at it.

    What a forward finds there from an earlier call it replaces, mostly; and if not, nobody must take its place. A new
    one each time: whoever walks through all tensors there are (a profiler of memory) must hardly ever meet one.
    """
    return torch.Tensor._make_subclass(_Lost, torch.empty(0))


@contextmanager
def left_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Around a forward that is none of the step's, or runs again: activations are as they were, and none has come."""
    places = [inside for module in modules for inside in (vars(module), module._buffers)]
    before = [(inside, dict(inside)) for inside in places]
    try:
        yield
    finally:
        for inside, found in before:
            come = [name for name, value in inside.items() if is_activation(value) and found.get(name) is not value]
            for name in come:
                del inside[name]
            for name, value in found.items():
                if is_activation(value) or name in come:
                    inside[name] = value


class Looks(NamedTuple):
    """What a forward did with attributes.

    Attributes:
        read: Those that it looked at before it replaced them.
        replaced: Those that it replaced.
    """

    read: set[Place]
    replaced: set[Place]


@contextmanager
def watched(held: Mapping[nn.Module, Sequence[str]]) -> Iterator[Looks]:
    """Around a forward: sees what it does with some attributes.

    Args:
        held: Names by module. The modules are of another class meanwhile, which tells what it is asked for.
    """
    looks = Looks(set(), set())
    classes = [(module, type(module)) for module in held]
    held_here: list[dict[str, Any]] = []
    try:
        for module, names in held.items():
            try:
                held_here.append({name: vars(module)[name] for name in names})
                module.__class__ = _watching(type(module), held_here[-1], looks)
            except Exception:  # of another layout, or a class that minds being derived from: nobody knows
                for places in looks:
                    places |= {(id(module), name) for name in names}
        yield looks
    finally:
        for module, kind in classes:
            module.__class__ = kind
        for each in held_here:  # classes are in cycles, and would keep it
            each.clear()


class _Unannounced:
    """Keeps a class derived for a moment out of registries."""

    def __init_subclass__(cls) -> None:
        """Tells nobody."""


def _watching(kind: type[nn.Module], held: Mapping[str, Any], looks: Looks) -> type[nn.Module]:
    def get(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in held and value is held[name]:
            looks.read.add((id(self), name))
        return value

    def put(self: nn.Module, name: str, value: Any) -> None:
        if name in held:
            looks.replaced.add((id(self), name))
        kind.__setattr__(self, name, value)

    own = {"__getattribute__": get, "__setattr__": put, "__module__": kind.__module__}
    return type(kind.__name__, (_Unannounced, kind), own)
