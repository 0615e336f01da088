"""Activations that modules keep as attributes: attention maps, features, the state of a recurrent cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

Place = tuple[int, str]
"""Identity of a module, and a name in it."""


def is_activation(value: Any) -> bool:
    """Whether it is a tensor that a backward may go through."""
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextmanager
def left_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Around a forward that is none of the step's, or runs again: activations are as they were, and none has come."""
    before = [(vars(module), dict(vars(module))) for module in modules]
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
    try:
        for module, names in held.items():
            try:
                module.__class__ = _watching(type(module), {name: vars(module)[name] for name in names}, looks)
            except TypeError:  # of another layout: nobody knows
                for places in looks:
                    places |= {(id(module), name) for name in names}
        yield looks
    finally:
        for module, kind in classes:
            module.__class__ = kind


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

    return type(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put, "__module__": kind.__module__})
