"""What recipes would keep alive that nobody else does: values that only a lost part of the graph has saved.

Autograd lets go of what an operation has saved as soon as nothing leads to that operation's result any more, as it is
with the choice that a router makes: before the forward returns. A recipe that is made from it holds it until backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mimose.actions.lean.handles import Handle, Kept, Use, View, base_of, is_plain
from lightning_mimose.actions.lean.late import least_grade
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.sites import Place
from lightning_mimose.predict.handing import NO_GRADE


def sources_of(recipe: Recipe, passed: Container[int] = ()) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """What a value is rebuilt from in the end, each with a grade from which on that is so; the least comes, too.

    Args:
        recipe: What rebuilds it.
        passed: Those, by `id`, that are kept after all: what they would be made from does not count.
    """
    return _sources(recipe, recipe.grade, {}, passed)


def _sources(
    recipe: Recipe, grade: int, seen: dict[int, int], passed: Container[int]
) -> Iterator[tuple[torch.UntypedStorage, int]]:
    seen[id(recipe)] = grade
    for each in recipe.inputs:
        base = each.base if isinstance(each, View) else each
        if isinstance(base, Kept):
            value = base.value()
            if is_plain(value):
                yield value.untyped_storage(), max(grade, base.needed_grade)
        elif isinstance(base, Recipe) and id(base) not in passed:
            higher = max(grade, base.grade)
            if higher < seen.get(id(base), NO_GRADE):  # there may be another way to it, that needs less
                yield from _sources(base, higher, seen, passed)


def needed_bytes(handle: Handle, lost: Container[torch.UntypedStorage], passed: Container[int] = ()) -> int:
    """Bytes that are there for a value's sake alone.

    Args:
        handle: What the value is rebuilt from.
        lost: Storages that only lost parts of the graph have saved.
        passed: See `sources_of`.
    """
    if not isinstance(handle, Recipe):
        return 0
    return sum(storage.nbytes() for storage in {each for each, _ in sources_of(handle, passed)} if storage in lost)


def in_vain(met: Iterable[tuple[Place, Handle]], lost: Collection[torch.UntypedStorage]) -> Iterator[tuple[Place, int]]:
    """Places where a recipe would hold no less than it spares, and the grade from which on that is not so.

    Args:
        met: Where something is rebuilt in a call, and what by, in order. What only lost parts have saved is not marked
            as saved.
        lost: See `needed_bytes`.
    """
    passed: set[int] = set()
    for place, handle in met if lost else ():
        base = handle.base if isinstance(handle, View) else handle
        needed = needed_bytes(base, lost, passed)
        # A result is there as long as others want it, so it has to be free of such values.
        if needed and (place.number < 0 or base.nbytes <= needed):
            passed.add(id(base))
            yield place, NO_GRADE
        elif isinstance(base, Recipe):
            grade = least_grade(base)
            if grade > base.own_grade:
                yield place, grade


class Packs:
    """Sees which of a call's saved tensors are lost before its forward returns.

    Args:
        pack: Gives what is kept for one of them.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Handle | Use]) -> None:
        self._pack = pack
        self._by_storage: Any = WeakIdKeyDictionary()

    def pack(self, tensor: torch.Tensor) -> Any:
        """As a hook for saved tensors."""
        pack = _Pack(self._pack(tensor))
        base = base_of(tensor)
        if is_plain(base) and not (base.is_leaf and base.requires_grad):  # a parameter is there anyway
            self._by_storage.setdefault(base.untyped_storage(), []).append((weakref.ref(pack), pack.handle.rebuilt))
        return pack

    def lost(self) -> set[torch.UntypedStorage]:
        """Storages that nothing holds any more of what is there of the graph now; their handles count as not saved."""
        found = set()
        for storage, packs in self._by_storage.items():
            if not any(ref() is not None for ref, _ in packs):
                found.add(storage)
                for _, rebuilt in packs:
                    if rebuilt is not None:
                        rebuilt.is_saved = False
        return found


class _Pack:
    """What the graph holds of a saved tensor; `handle` is where recipes look for it."""

    __slots__ = ("__weakref__", "_packed", "handle")

    def __init__(self, packed: Handle | Use) -> None:
        self._packed = packed
        self.handle = packed.handle if isinstance(packed, Use) else packed
