"""What a forward finds set in its unit: weights and attributes that others may have put there for this call alone.

`torch.func.functional_call` lends a module other weights and takes them back, a loop sets a task's index or a dropout's
rate before every call: by the time of backward they are others, of the same shapes, and a recomputation would be wrong
without anybody noticing. So they are noted before a forward, and lent to its recomputation.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.errors import RecomputeError

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
"""Values that nobody can change."""
OWN = frozenset(vars(nn.Module())) | {"forward", "_mimose_original_forward"}
"""What every module has for torch's own purposes, and what patching adds."""
_UNWATCHED = OWN - {"training"}
_NOTHING: AbstractContextManager[None] = nullcontext()
LONGEST = 32
"""Items of a container that is watched."""
OTHER_MODE = "it was switched between training and eval mode before its backward"
Place = tuple[int, str]
"""Identity of a module, and a name in it."""
_Entry = tuple[dict[str, Any], str, Any]
"""What something is to be put back into, its name, and its value."""


class _Watched(NamedTuple):
    """Names in one module.

    Attributes:
        module: The module.
        names: Its attributes.
        get: Gets them from the module's dictionary, as a tuple.
        size: How many names that had.
    """

    module: weakref.ref[nn.Module]
    names: tuple[str, ...]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]
    size: int


class _Members:
    """Parameters, buffers, submodules and hooks of every module of a unit, as they were once.

    Attributes:
        names: By name, in the order of `_MEMBERS` for every module.
        values: All of them.
    """

    __slots__ = ("__weakref__", "names", "values")

    def __init__(self, members: Sequence[dict[Any, Any]]) -> None:
        self.names = [each.copy() if each else _EMPTY for each in members]
        self.values = _values(members)


class Setting(NamedTuple):
    """What one forward found.

    Attributes:
        members: What its modules had: none of its own where that was what they always have, lest a graph that outlives
            the step keep the unit alive.
        usual: What they always have, as long as that is known.
        attributes: The values of what is watched, in order.
        watched: What that was then.
    """

    members: _Members | None
    usual: Callable[[], _Members | None]
    attributes: list[Any]
    watched: Sequence[_Watched]


class _Gone:
    """Stands for what is not there, or not watched."""


_GONE = _Gone()


class Settings:
    """Notes what forwards of one unit find, and lends it to recomputations.

    Attributes are watched that are numbers, names and the like, short containers of such, functions, or tensors; not
    activations, nor what is inside objects of other kinds.

    Args:
        modules: The unit and what is inside it.
        written: Names the places that the forward itself writes, which are put back otherwise; in any mode of the
            modules, or in the present one.

    Attributes:
        unit: Its name, for errors.
    """

    def __init__(
        self,
        modules: Sequence[weakref.ref[nn.Module]],
        written: Callable[[bool], Collection[Place]] = lambda anyhow: frozenset(),
    ) -> None:
        self._modules, self._written = modules, written
        self._watched: list[_Watched] | None = None
        self._usual: Callable[[], _Members | None] = lambda: None
        self.unit = ""

    def note(self) -> Setting:
        """What is there now."""
        found = None if self._watched is None else self._look(self._watched)
        if self._watched is None or found is None:
            self._watched = self._watch()
            found = self._look(self._watched) or []
        members, usual = self._members(), self._usual()
        is_usual = usual is not None and _same(_values(members), usual.values)
        return Setting(None if is_usual else _Members(members), self._usual, found, self._watched)

    def usual(self) -> object:
        """What its modules have now, if it is not known what they usually have: to be kept by whoever patches the unit.

        Not here: a graph that is left behind has what is here, and Python's collector does not see through it.
        """
        usual = self._usual()
        if usual is None:
            usual = _Members(self._members())
            self._usual = weakref.ref(usual)
        return usual

    def as_found(self, setting: Setting) -> AbstractContextManager[None]:
        """Around a recomputation: what differs now from what the forward had found is as it was then.

        Raises:
            RecomputeError: The modules' mode is another one, in which other things may be written.
        """
        now, members = self._look(setting.watched), setting.members or setting.usual()
        is_same = now is not None and _same(now, setting.attributes)
        if is_same and (members is None or _same(_values(self._members()), members.values)):
            return _NOTHING
        return self._lent(setting, members)

    @contextmanager
    def _lent(self, setting: Setting, members: _Members | None) -> Iterator[None]:
        written = self._written(False)
        before = [*self._other_attributes(setting, written), *self._other_members(members, written)]
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

    def _other_attributes(self, setting: Setting, written: Collection[Place]) -> Iterator[_Entry]:
        attributes = iter(setting.attributes)
        for watched in setting.watched:
            owner = watched.module()
            for name, value in zip(watched.names, attributes, strict=False):
                if owner is None or value is _GONE or (id(owner), name) in written:
                    continue
                if name == "training" and owner.training is not value:
                    raise RecomputeError({self.unit: OTHER_MODE})
                yield vars(owner), name, value

    def _other_members(self, members: _Members | None, written: Collection[Place]) -> Iterator[_Entry]:
        if members is None:
            return
        found_of = iter(members.names)
        for ref in self._modules:
            module = ref()
            for kind, found in zip(_MEMBERS, found_of, strict=False):
                if module is None:
                    continue
                inside = vars(module)[kind]
                if kind in _BY_NAME:
                    for name, value in found.items():
                        if inside.get(name) is not value and (id(module), name) not in written:
                            yield inside, name, value
                elif found.keys() != inside.keys():
                    yield vars(module), kind, OrderedDict(found)

    def _members(self) -> list[dict[Any, Any]]:
        found: list[dict[Any, Any]] = []
        for ref in self._modules:
            module = ref()
            found += _NONE if module is None else _members_of(module.__dict__)
        return found

    def _look(self, watched: Sequence[_Watched]) -> list[Any] | None:
        """The values; None where names have come or gone."""
        found: list[Any] = []
        for ref, _, get, size in watched:
            module = ref()
            if module is None or len(module.__dict__) != size:
                return None
            try:
                found += get(module.__dict__)
            except KeyError:
                return None
        if _SIMPLE.issuperset(map(type, found)):
            return found
        return [value if type(value) in _SIMPLE or _is_watched(value) else _GONE for value in found]

    def _watch(self) -> list[_Watched]:
        watched, written = [], self._written(True)
        for ref in self._modules:
            module = ref()
            if module is None:
                continue
            inside = vars(module)
            names = tuple(name for name in inside if name not in _UNWATCHED and (id(module), name) not in written)
            watched.append(_Watched(ref, names, _getter(names), len(inside)))
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
_NONE = (_EMPTY,) * len(_MEMBERS)
_SIMPLE = frozenset({int, float, bool, str, type(None)})


def _values(members: Sequence[dict[Any, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, members))]


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether they are the same objects; tensors would be compared by their elements otherwise."""
    return len(now) == len(then) and all(map(is_, now, then))


def _is_watched(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, (tuple, list, set, frozenset)):
        return len(value) <= LONGEST and all(isinstance(each, PLAIN) for each in value)
    return isinstance(value, PLAIN) or (callable(value) and not isinstance(value, nn.Module))


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda inside: (inside[names[0]],)) if names else (lambda inside: ())
