"""What units are given and return, taken apart as pytree does, dataclasses included, and put together again.

Blocks hand each other their state in objects of a class that somebody wrote for that, and may change these before
backward. A recomputation gets another object with what the first one held, as it gets other lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mimose.actions.members import SIMPLE


class _Inside(NamedTuple):
    """A dataclass's object among the leaves of pytree: at which place, of which class, and how it is built.

    Or, where it was there before, how many others were before it was first.
    """

    place: int
    kind: type
    names: tuple[str, ...]
    spec: Any
    again: int | None = None


class Structure(NamedTuple):
    """How leaves are put together; equal where all is the same but for them."""

    spec: Any
    inside: tuple[_Inside, ...] = ()


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a structure, and how they are put together.

    Limitations:
        A dataclass's object inside another one's is a leaf, and so is one of a class that makes its objects itself.

    Example:
        >>> @dataclasses.dataclass
        ... class State:
        ...     hidden: float
        ...     edges: list[float]
        >>> leaves, structure = flatten([State(1.0, [2.0, 3.0]), 4.0])
        >>> leaves, unflatten([10 * leaf for leaf in leaves], structure)
        ([1.0, 2.0, 3.0, 4.0], [State(hidden=10.0, edges=[20.0, 30.0]), 40.0])
    """
    outer, spec = tree_flatten(tree)
    if not any(map(_is_taken_apart, outer)):
        return outer, Structure(spec)
    leaves: list[Any] = []
    inside: list[_Inside] = []
    known: dict[int, int] = {}
    for place, leaf in enumerate(outer):
        if not _is_taken_apart(leaf):
            leaves.append(leaf)
            continue
        again = known.setdefault(id(leaf), len(inside))
        if again < len(inside):  # one that is given twice is one: what is written through either is read through both
            inside.append(_Inside(place, type(leaf), (), None, again))
            continue
        held = _held(leaf)
        found, inner = tree_flatten(list(held.values()))
        leaves += found
        inside.append(_Inside(place, type(leaf), tuple(held), inner))
    return leaves, Structure(spec, tuple(inside))


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The reverse of `flatten`, with other objects of the same classes."""
    rest = list(leaves)
    if not structure.inside:
        return tree_unflatten(rest, structure.spec)
    outer: list[Any] = []
    at = 0
    for each in structure.inside:
        before = each.place - len(outer)
        outer += rest[at : at + before]
        at += before
        if each.again is not None:
            outer.append(outer[structure.inside[each.again].place])
            continue
        at += each.spec.num_leaves
        made: Any = object.__new__(each.kind)
        values = tree_unflatten(rest[at - each.spec.num_leaves : at], each.spec)
        for name, value in zip(each.names, values, strict=True):
            object.__setattr__(made, name, value)  # also where it is frozen
        outer.append(made)
    return tree_unflatten(outer + rest[at:], structure.spec)


def _is_taken_apart(leaf: Any) -> bool:
    kind: Any = leaf.__class__
    if kind in SIMPLE or isinstance(leaf, (torch.Tensor, nn.Module)):
        return False
    return _is_plain(kind) and not callable(leaf)


@cache
def _is_plain(kind: Any) -> bool:
    """Whether a class is a dataclass whose objects hold nothing but fields and what is in their dictionary."""
    bases: tuple[type, ...] = kind.__mro__
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    slots = [vars(base).get("__slots__", ()) for base in bases]
    names = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    return names <= {"__dict__", "__weakref__", *(field.name for field in dataclasses.fields(kind))}


def _held(leaf: Any) -> dict[str, Any]:
    """What an object holds, by name: its fields, as far as they are set, and what was put into it besides."""
    slots = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    own = getattr(leaf, "__dict__", {})
    return {**{name: getattr(leaf, name) for name in slots if name not in own}, **own}
