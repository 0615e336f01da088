"""Activations that modules keep: attention maps, lists of features, the state of a recurrent cell."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.parametrized import cached_in
from lightning_mimose.errors import RecomputeError
from lightning_mimose.parts import leaves_in

LATEST = ""
"""Stands for the unit that was recomputed last."""
GONE = "it looks at an activation that was there before, and is gone by the time of its backward"

Place = tuple[int, str]
"""Identity of a module, and a name in it."""
OWN = frozenset(vars(nn.Module())) | {"forward", "_mimose_original_forward"}
"""What every module has for torch's own purposes, and what patching adds."""
TRIES = 8
"""Calls in which it is looked at what a forward does with an activation that it finds: some reset their state first."""
_MOST = 10_000
"""Items in which activations are looked for, in one attribute."""


class _Lost(torch.Tensor):
    """Raises whatever is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RecomputeError({LATEST: GONE})


def is_lost(value: Any) -> bool:
    """Whether it stands for an activation that is gone, see `lost`: whatever else is asked of it raises."""
    return type(value) is _Lost


def is_activation(value: Any) -> bool:
    """Whether it is a tensor that a backward may go through, or stands for one."""
    return isinstance(value, torch.Tensor) and (is_lost(value) or value.requires_grad)


def left_in(modules: Sequence[nn.Module]) -> dict[Place, list[torch.Tensor]]:
    """The activations that modules hold, or that are cached for them, by where they are; several of a container."""
    held = {
        (id(module), name): activations_in(value)
        for module in modules
        for name, value in vars(module).items()
        if name not in OWN
    }
    for place, value in (cached_in(lambda: modules) or {}).items():
        held[place] = activations_in(value)
    return {place: found for place, found in held.items() if found}


def activations_in(value: Any) -> list[torch.Tensor]:
    """The activations that a value is, or holds at any depth of its containers, but `lost` ones."""
    leaves: list[Any] = []
    waiting, known, looked_at = [value], set[int](), 0
    while waiting and looked_at <= _MOST:
        each, looked_at = waiting.pop(), looked_at + 1
        if isinstance(each, (list, tuple, dict, deque)):
            if id(each) not in known and len(each) <= _MOST:  # it may hold itself
                known.add(id(each))
                waiting += reversed([*each.values()] if isinstance(each, dict) else [*each])
        else:  # of an object that is an attribute itself nothing is looked at
            leaves += [each] if each is value else leaves_in(each)
    return [leaf for leaf in leaves if is_activation(leaf) and not is_lost(leaf)]


def hollow(value: Any) -> Any:
    """The same container with none of the activations right in it, but `lost` ones; None if it is none, or has none.

    Example:
        >>> features = [1, torch.ones(2, requires_grad=True)]
        >>> hollow(features)[0], hollow(features)[1] is features[1], hollow([1, 2])
        (1, False, None)
    """
    if type(value) not in (list, tuple, dict, deque) or len(value) > _MOST:
        return None
    if not any(map(is_activation, value.values() if isinstance(value, dict) else value)):
        return None
    if isinstance(value, dict):
        return {key: _hollowed(item) for key, item in value.items()}
    items = [_hollowed(item) for item in value]
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _hollowed(item: Any) -> Any:
    return lost() if is_activation(item) else item


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


class Replaced:
    """Which containers of activations forwards replace without a look: nobody need hold the old ones any longer.

    Example:
        >>> import torch
        >>> class Layer(torch.nn.Module):
        ...     def forward(self, x):
        ...         self.features = [x.sin()]
        >>> layer, replaced = Layer(), Replaced()
        >>> layer.features = [torch.ones(2, requires_grad=True)]
        >>> with replaced.watched([(layer, "features")]):
        ...     layer(torch.ones(2))
        >>> (id(layer), "features") in replaced
        True
    """

    def __init__(self) -> None:
        self._replaced: set[Place] = set()
        self._read: set[Place] = set()
        self._watched: Counter[Place] = Counter()

    def __contains__(self, place: Place) -> bool:
        return place in self._replaced and place not in self._read

    @contextmanager
    def watched(self, places: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
        """Around a forward: learn what it does with those of some attributes that hold activations in a container."""
        held: dict[nn.Module, list[str]] = {}
        for owner, name in places:
            if self._watched[id(owner), name] < TRIES and hollow(vars(owner).get(name)) is not None:
                self._watched[id(owner), name] += 1
                held.setdefault(owner, []).append(name)
        with watched(held) as looks:
            yield
        self._read |= looks.read
        self._replaced |= looks.replaced


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
