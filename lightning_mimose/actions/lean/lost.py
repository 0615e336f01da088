"""What recipes would keep alive that nobody else does: values that only a lost part of the graph has saved.

Autograd lets go of what an operation has saved as soon as nothing leads to that operation's result any more, as it is
with the choice that a router makes: before the forward returns. A recipe that is made from it holds it until backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightning_mimose.actions.lean.handles import Handle, Rebuilt, Use, View, base_of
from lightning_mimose.actions.lean.late import least_grade
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.sites import Place
from lightning_mimose.predict.handing import NO_GRADE

if TYPE_CHECKING:
    from lightning_mimose.actions.lean.saves import LeanSaves


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
        if base.is_kept:
            storage = base.kept_storage
            if storage is not None:
                yield storage, max(grade, base.needed_grade)
        elif isinstance(base, Recipe) and id(base) not in passed:
            higher = max(grade, base.grade)
            if higher < seen.get(id(base), NO_GRADE):  # there may be another way to it, that needs less
                yield from _sources(base, higher, seen, passed)


def needs_lost(handle: Handle, lost: Collection[torch.UntypedStorage], passed: Container[int] = ()) -> bool:
    """Whether a value is rebuilt from what would be there for its sake alone.

    Args:
        handle: What the value is rebuilt from.
        lost: Storages that only lost parts of the graph have saved.
        passed: See `sources_of`.
    """
    if not lost or not isinstance(handle, Recipe):
        return False
    return any(storage in lost for storage, _ in sources_of(handle, passed))


def in_vain(met: Iterable[tuple[Place, Handle]], lost: Collection[torch.UntypedStorage]) -> dict[Place, int]:
    """Places where a recipe would hold what is lost, and the grade from which on that is not so.

    Args:
        met: Where something is rebuilt in a call, and what by, in order. What only lost parts have saved is not marked
            as saved; the grades of recipes that are made from it are put right.
        lost: See `needs_lost`.
    """
    passed: set[int] = set()
    found = {}
    for place, handle in met:
        base = handle.base if isinstance(handle, View) else handle
        if needs_lost(base, lost, passed):
            passed.add(id(base))
            found[place] = NO_GRADE
        elif isinstance(base, Recipe):
            grade = least_grade(base)
            if grade > base.own_grade:
                found[place] = grade
    return found


class Packs:
    """Sees which of a call's saved tensors are lost before its forward returns.

    Args:
        saves: Say what is kept for each of them.
    """

    def __init__(self, saves: LeanSaves) -> None:
        self._saves = saves
        self._packed: list[tuple[weakref.ref[_Pack], Rebuilt | None, weakref.ref[torch.UntypedStorage]]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        """As a hook for saved tensors."""
        pack = _Pack(self._saves.pack(tensor))
        if self._saves.may_lose(tensor):
            storage = weakref.ref(base_of(tensor).untyped_storage())
            self._packed.append((weakref.ref(pack), pack.handle.rebuilt, storage))
        return pack

    def end(self, out: Any) -> None:
        """The forward is over: learn what the call's results are rebuilt by, and what is not worth it.

        Args:
            out: What the forward returned, whose graph is there.
        """
        self._saves.compare_results(out)
        self._saves.close_and_leave_out(self.lost)

    def lost(self) -> set[torch.UntypedStorage]:
        """Storages that nothing holds any more of what is there of the graph now; their handles count as not saved."""
        live = [(rebuilt, storage()) for ref, rebuilt, storage in self._packed if ref() is not None]
        saved, there = {id(rebuilt) for rebuilt, _ in live}, {storage for _, storage in live}
        found = set()
        for ref, rebuilt, reference in self._packed:
            storage = reference()
            if ref() is None and storage is not None and storage not in there:
                found.add(storage)
            if ref() is None and rebuilt is not None and id(rebuilt) not in saved:
                rebuilt.is_saved = False
        return found


class _Pack:
    """What the graph holds of a saved tensor; `handle` is where recipes look for it."""

    __slots__ = ("__weakref__", "_packed", "handle")

    def __init__(self, packed: Handle | Use) -> None:
        self._packed = packed
        self.handle = packed.handle if isinstance(packed, Use) else packed
