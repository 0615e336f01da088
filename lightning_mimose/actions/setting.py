"""What a forward finds set in its unit: weights and attributes that others may have put there for this call alone.

`torch.func.functional_call` lends a module other weights and takes them back, a loop sets a task's index or a dropout's
rate before every call: by the time of backward they are others, of the same shapes, and a recomputation would be wrong
without anybody noticing. So they are noted before a forward, and lent to its recomputation.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
_OWN = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_mimose_original_forward"}
"""What every module has for torch's own purposes, and what patching adds."""
_NOTHING: AbstractContextManager[None] = nullcontext()
Place = tuple[int, str]
"""Identity of a module, and a name in it."""


class _Watched(NamedTuple):
    """Names in one module.

    Attributes:
        module: The module.
        names: Attributes that were plain values, or tensors that are no activations, when it was looked at.
        get: Gets them from the module's dictionary, as a tuple.
        size: How many names that had.
    """

    module: weakref.ref[nn.Module]
    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]
    size: int


class Setting(NamedTuple):
    """What one forward found.

    Attributes:
        members: Parameters, buffers, submodules and hooks of every module, in order.
        attributes: The values of what is watched, in order.
        tensors: Whether there are tensors among them.
        watched: What that was then.
    """

    members: list[dict[Any, Any]]
    attributes: list[Any]
    tensors: bool
    watched: Sequence[_Watched]


class _Gone:
    """Stands for what is not there."""


_GONE = _Gone()


class _Left:
    """A tensor that is not held."""

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = weakref.ref(tensor)

    def tensor(self) -> Any:
        tensor = self._ref()
        return _GONE if tensor is None else tensor


class Settings:
    """Notes what forwards of one unit find, and lends it to recomputations.

    Attributes are watched that are numbers, names and the like, functions, or tensors; not activations, nor what is
    inside objects of other kinds. A tensor is held until it is lent, unless it was there already when the unit last ran
    again: then it is one that somebody leaves behind (a hook that keeps results) rather than hands over.

    Args:
        modules: The unit and what is inside it.
        written: Names the places that the forward itself writes, which are put back otherwise.
    """

    def __init__(
        self, modules: Sequence[weakref.ref[nn.Module]], written: Callable[[], Collection[Place]] = frozenset
    ) -> None:
        self._modules, self._written = modules, written
        self._watched: list[_Watched] | None = None
        self._left: set[weakref.ref[torch.Tensor]] = set()

    def note(self) -> Setting:
        """What is there now."""
        found = None if self._watched is None else self._look(self._watched)
        others = set(map(type, found or ())) - _SIMPLE
        if self._watched is None or found is None or (others and not _are_watched(found, others)):
            self._watched = self._watch()
            found = self._look(self._watched) or []
            others = set(map(type, found)) - _SIMPLE
        tensors = any(issubclass(kind, torch.Tensor) for kind in others)
        if tensors:
            found = [_Left(each) if _is_tensor(each) and weakref.ref(each) in self._left else each for each in found]
        return Setting([each.copy() if each else _EMPTY for each in self._members()], found, tensors, self._watched)

    def as_found(self, setting: Setting) -> AbstractContextManager[None]:
        """Around a recomputation: what differs now from what the forward had found is as it was then."""
        then, now = setting.attributes, self._look(setting.watched)
        if setting.tensors:
            then = [value.tensor() if type(value) is _Left else value for value in then]
            self._left = {weakref.ref(value) for value in now or () if _is_tensor(value)}
        if now is not None and len(now) == len(then) and all(map(is_, now, then)):
            with suppress(RuntimeError, TypeError):  # another tensor is compared by its elements: then it is another
                if self._members() == setting.members:
                    return _NOTHING
        return self._lent(setting._replace(attributes=then))

    @contextmanager
    def _lent(self, setting: Setting) -> Iterator[None]:
        before: list[tuple[dict[str, Any], str, Any]] = []
        attributes, members, written = iter(setting.attributes), iter(setting.members), self._written()
        for module in self._alive():
            for kind, found in zip(_MEMBERS, members, strict=False):
                inside = vars(module)[kind]
                if kind in _BY_NAME:
                    changed = [(name, value) for name, value in found.items() if inside.get(name) is not value]
                    before += [(inside, name, value) for name, value in changed if (id(module), name) not in written]
                elif found.keys() != inside.keys():
                    before.append((vars(module), kind, OrderedDict(found)))
        for watched in setting.watched:
            owner = watched.module()
            for name in watched.names:
                value = next(attributes, _GONE)
                if owner is not None and value is not _GONE and (id(owner), name) not in written:
                    before.append((vars(owner), name, value))
        now = [(inside, name, inside.get(name, _GONE)) for inside, name, _ in before]
        for inside, name, value in before:
            inside[name] = value
        try:
            yield
        finally:
            for inside, name, value in now:
                if value is _GONE:
                    inside.pop(name, None)
                else:
                    inside[name] = value

    def _alive(self) -> Iterator[nn.Module]:
        return (module for ref in self._modules if (module := ref()) is not None)

    def _members(self) -> list[dict[Any, Any]]:
        return [each for module in self._alive() for each in _members_of(module.__dict__)]

    def _look(self, watched: Sequence[_Watched]) -> list[Any] | None:
        """The values; None where names have come or gone."""
        found: list[Any] = []
        for ref, _, get, size in watched:
            module = ref()
            if module is None:
                return None
            inside = module.__dict__
            if len(inside) != size:
                return None
            found += get(inside)
        return found

    def _watch(self) -> list[_Watched]:
        watched, written = [], self._written()
        for module in self._alive():
            inside = vars(module)
            names = tuple(
                name
                for name, value in inside.items()
                if name not in _OWN and (id(module), name) not in written and _is_watched(value)
            )
            watched.append(_Watched(weakref.ref(module), names, _getter(names), len(inside)))
        return watched


_BY_NAME = ("_parameters", "_buffers", "_modules")
_MEMBERS = (
    *_BY_NAME,
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_members_of = itemgetter(*_MEMBERS)
_EMPTY: dict[Any, Any] = {}
_SIMPLE = frozenset({int, float, bool, str, type(None)})


def _are_watched(values: Sequence[Any], kinds: Collection[type]) -> bool:
    return all(_is_watched(value) for value in values if type(value) in kinds)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_watched(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nn.Module))


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda inside: (inside[names[0]],)) if names else (lambda inside: ())
