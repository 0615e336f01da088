"""Parameters, buffers, submodules and hooks of the modules of a unit: what each has under which name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

BY_NAME = ("_parameters", "_buffers", "_modules")
"""Kinds of members that are replaced one by one."""
KINDS = (
    *BY_NAME,
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""All kinds, as a module's dictionary names them."""
SIMPLE = frozenset({int, float, bool, str, type(None)})
"""Kinds of values of which nothing but which one it is has to be known."""
_members_of = itemgetter(*KINDS)
_EMPTY: dict[Any, Any] = {}
_NONE = (_EMPTY,) * len(KINDS)
_BUFFERS = slice(KINDS.index("_buffers"), None, len(KINDS))


class Names(NamedTuple):
    """Names in a dictionary.

    Attributes:
        names: The names.
        get: Gets what is under them, as a tuple; raises a KeyError where one is missing.
    """

    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Of these names."""
        names = tuple(names)
        if len(names) > 1:
            return cls(names, itemgetter(*names))
        return cls(names, (lambda inside: (inside[names[0]],)) if names else (lambda inside: ()))


class Members:
    """What the modules of a unit had once.

    Args:
        found: What `members_now` found.

    Attributes:
        names: By name, every kind of every module in order.
        values: All of them.
        buffers: The buffers among them.
    """

    __slots__ = ("__weakref__", "buffers", "names", "values")

    def __init__(self, found: Sequence[dict[Any, Any]]) -> None:
        self.names = [each.copy() if each else _EMPTY for each in found]
        self.values = values_of(found)
        buffers = values_of(found[_BUFFERS])
        self.buffers = [buffer for buffer in buffers if buffer is not None and not buffer.is_inference()]


def members_now(modules: Sequence[weakref.ref[nn.Module]]) -> list[dict[Any, Any]]:
    """The live dictionaries of every kind, module after module; empty ones for a module that is gone."""
    found: list[dict[Any, Any]] = []
    for ref in modules:
        module = ref()
        found += _NONE if module is None else _members_of(module.__dict__)
    return found


def values_of(members: Sequence[dict[Any, Any]]) -> list[Any]:
    """All that is in them, in order."""
    return [*chain.from_iterable(map(dict.values, members))]
