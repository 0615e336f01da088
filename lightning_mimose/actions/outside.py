"""State outside of modules that their forwards name: globals, attributes of their classes, the process's generators.

A generator in a global, a list that blocks append losses to, a counter on the class. It is found by reading names in
the code of a class's forward, of its methods and of functions of the same file that the forward calls; what is reached
in other ways (a closure, an object in a global, another file) is not. Iterators cannot be put back wherever they are.
"""

from __future__ import annotations

import dis
import io
import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

LARGEST = 10_000
"""Containers with more elements are no state: copying them would take longer than what they are read for."""
_PLAIN = {int, float, bool, type(None), list, dict, set, deque}
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PROCESS = {
    # Of the process, of which torch stashes none.
    "random": random.getstate.__self__,  # type: ignore[attr-defined]
    "numpy": np.random.get_state.__self__,  # type: ignore[attr-defined]
}


class _Named(NamedTuple):
    """Where something is: in a file's globals, or on a class."""

    within: dict[str, Any] | weakref.ref[type]
    name: str


class _Kind(NamedTuple):
    """What the forward of a class of modules names.

    Attributes:
        keys: What stands for state outside.
        attributes: Names of attributes, of whatever.
    """

    keys: tuple[str, ...]
    attributes: frozenset[str]


class Missing:
    """Stands for what is not there, or is no state."""


ABSENT, NO_STATE = Missing(), Missing()
_known: dict[str, _Named] = {}
_of_kinds: weakref.WeakKeyDictionary[type, _Kind] = weakref.WeakKeyDictionary()


def keys_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """What stands for the state outside that modules of a kind may write: the process's generators, and what is named.

    Example:
        >>> keys_of(torch.nn.Linear)
        ('random', 'numpy')
    """
    return _kind(kind).keys


def iterator_in(modules: Iterable[nn.Module]) -> str | None:
    """The iterator that the forward of one of some modules names, or a generator inside a list, in words.

    To draw from it cannot be undone.

    Example:
        >>> class Noisy(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scales = iter([1.0, 0.5])
        ...     def forward(self, x):
        ...         return x * next(self.scales)
        >>> iterator_in([torch.nn.Linear(1, 1), Noisy()])
        'the iterator Noisy.scales'
    """
    for module in modules:
        kind = _kind(type(module))
        for name, value in vars(module).items():
            if name in kind.attributes and _is_iterator(value):
                return f"the iterator {type(module).__name__}.{name}"
        for key in kind.keys:
            value = _PROCESS.get(key) or _found(key)
            if _is_iterator(value):
                return f"the iterator {key}"
            inside = value if isinstance(value, (list, tuple)) and len(value) <= LARGEST else ()
            if any(_is_iterator(each) or isinstance(each, _GENERATORS) for each in inside):
                return f"what lies in {key}"
    return None


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _kind(kind: type[nn.Module]) -> _Kind:
    found = _of_kinds.get(kind)
    if found is None:
        attributes, named = set[str](), dict[str, _Named]()
        if not kind.__module__.startswith("torch."):
            named = {_key(each): each for each in _named_by(kind, attributes)}
        _known.update(named)
        found = _of_kinds[kind] = _Kind((*_PROCESS, *named), frozenset(attributes))
    return found


def look(key: str) -> Any:
    """What is there now; `ABSENT` if there is nothing, and `NO_STATE` if it is nothing that can be state."""
    if key in _PROCESS:
        return _PROCESS[key]
    value = _found(key)
    if not (value is ABSENT or type(value) in _PLAIN or isinstance(value, _GENERATORS)):
        return NO_STATE
    return NO_STATE if isinstance(value, (list, dict, set, deque)) and len(value) > LARGEST else value


def _found(key: str) -> Any:
    within, name = _known[key]
    if isinstance(within, dict):
        return within.get(name, ABSENT)
    kind = within()
    return ABSENT if kind is None else vars(kind).get(name, ABSENT)


def put(key: str, value: Any) -> None:
    """Put an object where it was; `ABSENT` to take away what is there."""
    if key in _PROCESS or look(key) is value:
        return
    within, name = _known[key]
    if isinstance(within, dict):
        within[name] = value
    elif (kind := within()) is not None:
        delattr(kind, name) if value is ABSENT else setattr(kind, name, value)


def _key(named: _Named) -> str:
    within = named.within
    if isinstance(within, dict):
        return f"{within.get('__name__')}.{named.name}"
    kind = within()
    return f"{'' if kind is None else f'{kind.__module__}.{kind.__qualname__}'}.{named.name}"


def _named_by(kind: type[nn.Module], attributes: set[str]) -> Iterator[_Named]:
    """What the code that a forward runs names outside, as far as it lies in one file; adds what attributes it names."""
    own: dict[str, list[Any]] = {}
    for base in kind.__mro__:
        if not base.__module__.startswith(("torch.", "builtins")):
            for name, value in vars(base).items():
                own.setdefault(name, []).append(value)
    todo: list[Any] = [kind.forward]
    seen = set[Any]()
    while todo:
        function = _function_of(todo.pop())
        if function is None or function in seen:
            continue
        seen.add(function)
        todo.append(getattr(function, "__wrapped__", None))
        for name, is_global in _names_in(function.__code__):
            if not is_global:
                attributes.add(name)
            if name in own and not is_global:
                todo += own[name]  # those of its bases, too: it may call them
                for base in kind.__mro__:
                    if name in vars(base) or base is kind:  # to which what is written by `type(self)` goes
                        yield _Named(weakref.ref(base), name)
            if name in function.__globals__ and is_global:
                value = function.__globals__[name]
                if getattr(value, "__module__", None) == kind.__module__ and isinstance(value, types.FunctionType):
                    todo.append(value)
                yield _Named(function.__globals__, name)


def _function_of(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _names_in(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Names of globals and of attributes, and whether it is a global."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            yield instruction.argval, True
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR"):
            yield instruction.argval, False
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function inside, a comprehension
            yield from _names_in(constant)
