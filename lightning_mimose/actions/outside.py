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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

LARGEST = 1000
"""Containers with more elements are no state: copying them for every block would take too long."""
_CONTAINERS = {list, dict, set, deque, Counter, OrderedDict, defaultdict}
"""No others: some that seem to be dictionaries make what they hold when they are read."""
_PLAIN = {int, float, bool, str, tuple, type(None), *_CONTAINERS}
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
            value = found(key)
            if _is_iterator(value):
                return f"the iterator {key}"
            inside = value if isinstance(value, (list, tuple)) and len(value) <= LARGEST else ()
            if any(_is_iterator(each) or isinstance(each, _GENERATORS) for each in inside):
                return f"what lies in {key}"
    return None


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _kind(kind: type[nn.Module]) -> _Kind:
    known = _of_kinds.get(kind)
    if known is None:
        attributes, keys = set[str](), dict.fromkeys(_PROCESS)
        if not all(map(_is_torchs, kind.__mro__)):  # sharded and parametrized ones are of a class of torch's
            for named in _named_by(kind, attributes):
                key = _key(named)
                keys[key], _known[key] = None, named
        known = _of_kinds[kind] = _Kind(tuple(keys), frozenset(attributes))
    return known


def look(key: str) -> Any:
    """What is there now; `ABSENT` if there is nothing, and `NO_STATE` if it is nothing that can be state."""
    value = found(key)
    return value if _is_state(value) else NO_STATE


def _is_state(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= LARGEST
    if isinstance(value, _GENERATORS):
        return not isinstance(value, random.SystemRandom)
    return value is ABSENT or type(value) in _PLAIN


def is_of_process(key: str) -> bool:
    """Whether it stands for a generator of the process."""
    return key in _PROCESS


def found(key: str) -> Any:
    """What is there now, whatever it is; `ABSENT` if there is nothing."""
    if key in _PROCESS:
        return _PROCESS[key]
    within, name = _known[key]
    if isinstance(within, dict):
        return within.get(name, ABSENT)
    kind = within()
    return ABSENT if kind is None else vars(kind).get(name, ABSENT)


def put(key: str, value: Any) -> None:
    """Put an object where it was; `ABSENT` to take away what is there.

    Where there was None and now is an object of some kind that is no state (a cache, a file that was opened), it stays.
    """
    now = found(key)
    if key in _PROCESS or now is value or (value is None and not _is_state(now)):
        return
    within, name = _known[key]
    if isinstance(within, dict):
        if value is ABSENT:
            del within[name]
        else:
            within[name] = value
    elif (kind := within()) is not None:
        delattr(kind, name) if value is ABSENT else setattr(kind, name, value)


def _key(named: _Named) -> str:
    within = named.within
    if isinstance(within, dict):
        key = f"{within.get('__name__')}.{named.name}"
    else:
        kind = within()
        key = f"{'' if kind is None else f'{kind.__module__}.{kind.__qualname__}'}.{named.name}"
    while key in _known and _known[key].within is not within:  # of another one with the same name, as factories make
        key += "'"
    return key


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith(("torch.", "builtins"))


def _named_by(kind: type[nn.Module], attributes: set[str]) -> Iterator[_Named]:
    """What the code that a forward runs names outside, as far as it lies in one file; adds what attributes it names."""
    own: dict[str, list[Any]] = {}
    for base in kind.__mro__:
        if not _is_torchs(base):
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
        names = list(_names_in(function.__code__))
        for name, operation in names:
            if operation in _ATTRIBUTES:
                attributes.add(name)
                values = own.get(name, [])
                todo += values  # those of its bases, too: it may call them
                if operation == "STORE_ATTR" or any(map(_may_change, values)):
                    for base in kind.__mro__:
                        if name in vars(base) or base is kind:  # to which what is written by `type(self)` goes
                            yield _Named(weakref.ref(base), name)
            elif name in function.__globals__ or operation == "STORE_GLOBAL":
                value = function.__globals__.get(name)
                if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                    todo.append(value)
                if not _is_code(value):
                    yield _Named(function.__globals__, name)
                elif isinstance(value, type) and value.__module__ == function.__module__:  # a namespace
                    inside = {each for each, other in names if other in _ATTRIBUTES and each in vars(value)}
                    yield from (_Named(weakref.ref(value), each) for each in inside if not _is_code(vars(value)[each]))


def _may_change(value: Any) -> bool:
    """Whether something may be written to without being put in its place anew."""
    return type(value) in _CONTAINERS or isinstance(value, _GENERATORS)


def _is_code(value: Any) -> bool:
    """Whether it is there to be called, or a module: nothing that becomes state."""
    return callable(value) or isinstance(value, (property, staticmethod, classmethod, types.ModuleType))


def _function_of(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


_GLOBALS, _ATTRIBUTES = {"LOAD_GLOBAL", "STORE_GLOBAL"}, {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR"}


def _names_in(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Names of globals and of attributes, and what is done with each."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBALS or instruction.opname in _ATTRIBUTES:
            yield instruction.argval, instruction.opname
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function inside, a comprehension
            yield from _names_in(constant)
