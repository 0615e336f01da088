"""What a forward finds set in its unit: weights and attributes that others may have put there for this call alone.

`torch.func.functional_call` lends a module other weights and takes them back, a loop sets a task's index or a dropout's
rate before every call: by the time of backward they are others, of the same shapes, and a recomputation would be wrong
without anybody noticing. So they are noted before a forward, and lent to its recomputation.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.members import BY_NAME, KINDS, SIMPLE, Members, Names, members_now, values_of
from lightning_mimose.actions.stored import OWN, TRIES, Looks, Place, is_activation, left_alone, lost
from lightning_mimose.errors import RecomputeError

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
"""Values that nobody can change."""
_UNWATCHED = OWN - {"training"}
_NOTHING: AbstractContextManager[None] = nullcontext()
LONGEST = 32
"""Items of a container that is watched."""
OTHER_MODE = "it was switched between training and eval mode before its backward"
WRITTEN = "{!r} was written in place by somebody else before its backward"
_Entry = tuple[dict[str, Any], str, Any]
"""What something is to be put back into, its name, and its value."""


class _Watched(NamedTuple):
    """Names in one module.

    Attributes:
        module: The module.
        attributes: Its attributes.
        size: How many names its dictionary had.
    """

    module: weakref.ref[nn.Module]
    attributes: Names
    size: int


class Setting(NamedTuple):
    """What one forward found.

    Attributes:
        members: What its modules had: none of its own where that was what they always have, lest a graph that outlives
            the step keep the unit alive.
        usual: What they always have, as long as that is known.
        attributes: The values of what is watched, in order; weak references to activations.
        watched: What that was then.
        held: Buffers and tensors among the attributes.
        versions: Theirs, latest when the forward had run.
    """

    members: Members | None
    usual: Callable[[], Members | None]
    attributes: list[Any]
    watched: Sequence[_Watched]
    held: list[torch.Tensor]
    versions: list[int]

    def lent(self) -> list[torch.Tensor]:
        """Weights that were made for this step, and lent to the modules for its forward."""
        values = [] if self.members is None else self.members.values
        return [each for each in values if isinstance(each, torch.Tensor) and each.grad_fn is not None]


class _Latest(NamedTuple):
    """What was found last: each object's identity and kind, and what stands for it."""

    objects: list[int]
    kinds: list[type]
    noted: list[Any]


class _Gone:
    """Stands for what is not there, or not watched."""


_GONE = _Gone()


class Settings:
    """Notes what forwards of one unit find, and lends it to recomputations.

    Attributes are watched that are numbers, names and the like, short containers of such, functions, or tensors; not
    what is inside objects of other kinds. What cannot be lent again shows: an activation that is gone, a tensor that
    somebody else has written in place.

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
        self._usual: Callable[[], Members | None] = lambda: None
        self._tries: Counter[Place] = Counter()
        self._latest: _Latest | None = None
        self.unit = ""

    def note(self) -> Setting:
        """What is there now."""
        found = None if self._watched is None else self._look(self._watched)
        if self._watched is None or found is None:
            self._watched = self._watch()
            found = self._look(self._watched) or []
        members, usual = members_now(self._modules), self._usual()
        if usual is not None and _same(values_of(members), usual.values):
            own, held = None, usual.buffers
        else:
            own = Members(members)
            held = own.buffers
        if not self._is_latest(found) and any(
            issubclass(kind, torch.Tensor) for kind in set(map(type, found)) - SIMPLE
        ):
            held = held + [each for each in found if isinstance(each, torch.Tensor) and not each.is_inference()]
        return Setting(own, self._usual, found, self._watched, held, [*map(_VERSION, held)])

    def unsettled(self, setting: Setting) -> dict[nn.Module, list[str]]:
        """Activations that a forward found, and of which nobody knows what forwards do with them: names by module."""
        unknown: dict[nn.Module, list[str]] = {}
        for owner, name, _ in self._activations(setting):
            if self._tries[id(owner), name] < TRIES:
                unknown.setdefault(owner, []).append(name)
        return unknown

    def settle(self, unknown: Mapping[nn.Module, Sequence[str]], looks: Looks) -> list[str]:
        """Learn what a forward has done with them.

        Returns:
            Those that it carries from call to call: it looks at what it left there itself.
        """
        places = {(id(owner), name): name for owner, names in unknown.items() for name in names}
        self._tries.update(places.keys())
        return [name for place, name in places.items() if place in looks.replaced and place in looks.read]

    def ran(self, setting: Setting) -> None:
        """The forward that found it has run: what it has written so far is its own business."""
        setting.versions[:] = map(_VERSION, setting.held)

    def _activations(self, setting: Setting) -> list[tuple[nn.Module, str, Callable[[], torch.Tensor | None]]]:
        if weakref.ref not in map(type, setting.attributes):
            return []
        places = [(watched.module(), name) for watched in setting.watched for name in watched.attributes.names]
        return [
            (owner, name, value)
            for (owner, name), value in zip(places, setting.attributes, strict=False)
            if type(value) is weakref.ref and owner is not None
        ]

    def usual(self) -> object:
        """What its modules have now, if it is not known what they usually have: to be kept by whoever patches the unit.

        Not here: a graph that is left behind has what is here, and Python's collector does not see through it.
        """
        usual = self._usual()
        if usual is None:
            usual = Members(members_now(self._modules))
            if any(isinstance(each, torch.Tensor) and not each.is_leaf for each in usual.values):
                return None  # lent for this call alone, with a graph that nobody else would keep
            self._usual = weakref.ref(usual)
        return usual

    def as_found(self, setting: Setting) -> AbstractContextManager[None]:
        """Around a recomputation: what differs now from what the forward had found is as it was then.

        Raises:
            RecomputeError: The modules' mode is another one, in which other things may be written; or something that
                the forward had found is no more, or another by now.
        """
        if [*map(_VERSION, setting.held)] != setting.versions:
            self._check_contents(setting)
        now, members = self._look(setting.watched), setting.members or setting.usual()
        is_same = now is not None and (now is setting.attributes or _same(now, setting.attributes))
        is_same &= members is None or _same(values_of(members_now(self._modules)), members.values)
        if is_same and (self._is_latest(now) or weakref.ref not in map(type, now or ())):
            return _NOTHING
        return self._lent(setting, members)

    def _is_latest(self, found: Sequence[Any] | None) -> bool:
        """Whether it is what was found last and can be known by identity: there is no tensor in it."""
        return self._latest is not None and found is self._latest.noted

    def _check_contents(self, setting: Setting) -> None:
        written, names = self._written(True), {}
        for module in filter(None, (ref() for ref in self._modules)):
            for name, value in chain(module._buffers.items(), vars(module).items()):
                names[id(value)] = "" if (id(module), name) in written else name
        for tensor, version in zip(setting.held, setting.versions, strict=True):
            if tensor._version != version and names.get(id(tensor)) != "":
                raise RecomputeError({self.unit: WRITTEN.format(names.get(id(tensor), "a tensor"))})

    @contextmanager
    def _lent(self, setting: Setting, members: Members | None) -> Iterator[None]:
        written = self._written(False)
        before = [*self._other_attributes(setting, written), *self._other_members(members, written)]
        now = [(inside, name, inside.get(name, _GONE)) for inside, name, _ in before]
        with left_alone([module for ref in self._modules if (module := ref()) is not None]):
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
            for name, value in zip(watched.attributes.names, attributes, strict=False):
                if owner is None or value is _GONE:
                    continue
                if type(value) is weakref.ref:
                    activation = value()
                    if activation is not None:
                        activation._fix_weakref()  # it may have lost its Python object once: see torch.utils.weak
                    yield vars(owner), name, lost() if activation is None else activation
                elif name == "training" and owner.training is not value:
                    raise RecomputeError({self.unit: OTHER_MODE})
                elif (id(owner), name) not in written and vars(owner).get(name, _GONE) is not value:
                    yield vars(owner), name, value

    def _other_members(self, members: Members | None, written: Collection[Place]) -> Iterator[_Entry]:
        if members is None:
            return
        found_of = iter(members.names)
        for ref in self._modules:
            module = ref()
            for kind, found in zip(KINDS, found_of, strict=False):
                if module is None:
                    continue
                inside = vars(module)[kind]
                if kind in BY_NAME:
                    for name, value in found.items():
                        own = (id(module), name) in written and not is_activation(value)
                        if inside.get(name) is not value and not own:
                            yield inside, name, value
                elif found.keys() != inside.keys():
                    yield vars(module), kind, OrderedDict(found)

    def _look(self, watched: Sequence[_Watched]) -> list[Any] | None:
        """The values; None where names have come or gone."""
        found: list[Any] = []
        for ref, attributes, size in watched:
            module = ref()
            if module is None or len(module.__dict__) != size:
                return None
            try:
                found += attributes.get(module.__dict__)
            except KeyError:
                return None
        kinds = [*map(type, found)]
        if SIMPLE.issuperset(kinds):
            return found
        objects = [*map(id, found)]
        if self._latest is not None and self._latest[:2] == (objects, kinds):
            return self._latest.noted
        noted = [value if type(value) in SIMPLE else _noted(value) for value in found]
        # What is in a list, or whether a tensor is an activation, is not told by which one it is.
        is_fixed = all(map(_is_fixed, found, noted))
        self._latest = _Latest(objects, kinds, noted) if is_fixed else None
        return noted

    def _watch(self) -> list[_Watched]:
        watched = []
        for ref in self._modules:
            module = ref()
            if module is not None:
                names = Names.of(name for name in vars(module) if name not in _UNWATCHED)
                watched.append(_Watched(ref, names, len(vars(module))))
        return watched


_VERSION = attrgetter("_version")


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether they are the same objects; tensors would be compared by their elements otherwise."""
    return len(now) == len(then) and all(map(is_, now, then))


def _noted(value: Any) -> Any:
    """What stands for the value of an attribute: itself, as a rule."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value) if is_activation(value) else value
    if isinstance(value, (tuple, list, set, frozenset)):
        plain = len(value) <= LONGEST and all(isinstance(each, PLAIN) for each in value)
        return value if plain else _GONE
    if isinstance(value, PLAIN):
        return value
    return value if callable(value) and not isinstance(value, (nn.Module, weakref.ref)) else _GONE


def _is_fixed(value: Any, noted: Any) -> bool:
    """Whether the same stands for an object as long as it is this one, and it may be kept: it keeps nothing alive."""
    if noted is _GONE:  # its address may be another's by then
        return not isinstance(value, (list, set, tuple, frozenset))
    if isinstance(noted, FunctionType):
        return not (noted.__closure__ or noted.__defaults__ or noted.__kwdefaults__)
    if isinstance(noted, BuiltinFunctionType):
        return isinstance(noted.__self__, (ModuleType, type(None)))
    return isinstance(noted, (*PLAIN, tuple, frozenset, type))
