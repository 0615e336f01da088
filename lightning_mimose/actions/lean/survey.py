"""A survey: what lean saves would spare in a region that is being recomputed, and when.

Everything is kept as the region wants it; beside that a recipe is made for whatever could have one. Two moments are
noted for each: when the forward lets go of the tensor (from then on only autograd would keep it alive), and when
backward asks for it (from then on it would be there again). Between them it is what lean saves spare.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mimose.actions.lean.handles import Handle, Kept, Use, View, is_plain
from lightning_mimose.actions.lean.lost import needs_lost, sources_of
from lightning_mimose.actions.lean.making import comparing_bytes, rebuilding
from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.saves import LeanSaves, Saved
from lightning_mimose.actions.lean.sites import References, Sites
from lightning_mimose.measure.call import LeanItem, ResultItem
from lightning_mimose.measure.casts import may_be_cached
from lightning_mimose.measure.trace import DIES, GOES, IS_USED
from lightning_mimose.menu import GRADES


class _Found:
    """An item while it is being found: a storage, and what its packs could be instead."""

    def __init__(self, index: int, number: int, storage: torch.UntypedStorage) -> None:
        self.index, self.number, self.nbytes = index, number, storage.nbytes()
        self.storage = weakref.ref(storage)
        self.handle: Handle | None = None
        self._kept = False
        self.is_cached = False
        self.alive: set[int] = set()
        self.watches: list[weakref.ref[torch.Tensor]] = []
        self.since: list[int] = []

    @property
    def kept(self) -> bool:
        """Whether some of it has no other form, for now."""
        return self._kept or (self.handle is not None and self.handle.is_kept)

    def keep(self) -> None:
        """Some of it has none."""
        self._kept = True

    def settle(self) -> None:
        """The forward is over: let go of the handle."""
        self._kept, self.handle = self.kept, None


class Surveyed:
    """Stands for a saved tensor: what the region keeps, and (until its forward is over) the handle."""

    __slots__ = ("handle", "packed")

    def __init__(self, packed: Any, handle: Handle | None) -> None:
        self.packed, self.handle = packed, handle


class LeanSurvey:
    """See `measure.replay.Survey`.

    Args:
        sites: What is known about the unit's places.
        held: What somebody else keeps alive, see `LeanSaves`.
        given: See `LeanSaves`.
        leaves: See `LeanSaves`.
        told: Told how many places the call had, what it would have taken to compare the recipes in those of them that
            were not met before, and in all, in bytes.
    """

    def __init__(
        self,
        sites: Sites,
        held: Iterable[Any] = (),
        given: Iterable[Any] = (),
        leaves: Sequence[torch.Tensor] | None = None,
        told: Callable[[int, int, int], None] = lambda places, new_bytes, all_bytes: None,
    ) -> None:
        self._sites, self._leaves, self._tell = sites, leaves, told
        self._on_host = True
        self._held, self._given = References(held), References(given)
        self._packs: list[_Found | None] = []
        self._found: list[_Found] = []
        self._items: tuple[LeanItem, ...] = ()
        self._results: tuple[ResultItem, ...] = ()
        self._versions: dict[int, int] = {}
        self._watching = False
        self._saves: LeanSaves | None = None
        self._latest: _Found | None = None
        self._is_lost = False
        self._lost: Any = WeakIdKeyDictionary()
        """Storages that only such parts of the graph saved as go before the forward returns."""
        self._used: set[int] = set()
        self._sources: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Number of an item -> its storage, if another one that is rebuilt from it holds it."""
        self._gone: set[torch.UntypedStorage] = set()
        self._own: dict[int, int] = {}
        """`id` of the handle of what is rebuilt -> its number."""

    def begin(self, identify: Callable[[torch.UntypedStorage], int], happens: Callable[[str, int], None]) -> None:
        """See `Survey`."""
        self._identify, self._happens = identify, happens

    @contextmanager
    def forward_run(self) -> Iterator[None]:
        """Number what is saved, so that backward's first use of it is seen."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            yield
            return
        pack_outer, unpack_outer = outer
        count = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal count
            count += 1
            return count - 1, pack_outer(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            number, inner = packed
            tensor: torch.Tensor = unpack_outer(inner)
            self._is_used(number)
            return tensor

        with saved_tensors_hooks(pack, unpack):
            yield

    @contextmanager
    def recompute_run(self) -> Iterator[None]:
        """Watch what is saved."""
        self._versions = {self._identify(each.untyped_storage()): each._version for each in _plain(self._given.live())}
        self._saves = LeanSaves(
            self._sites,
            len(GRADES),
            self._told,
            applies=False,
            leaves=self._leaves,
            held=self._held.live(),
            given=self._given.live(),
        )
        self._by_storage: Any = WeakIdKeyDictionary()
        self._surveyed: list[Surveyed] = []
        self._watching = True
        try:
            with self._saves.constants():
                yield
        finally:
            self._watching = False
            self._look_back()
            self._items = tuple(self._item(found) for found in self._found)
            unmet = self._saves.verdicts.unmet
            new_bytes = max((comparing_bytes(handle, on_host=self._on_host) for handle in unmet), default=0)
            all_bytes = max((item.comparing_bytes for item in self._items), default=0)
            self._tell(len(self._packs), new_bytes, all_bytes)
            for surveyed in self._surveyed:
                surveyed.handle = None
            self._saves.close_and_leave_out(lambda: self._gone)
            self._gone, self._own = set(), {}
            self._surveyed.clear()
            self._by_storage.clear()
            for found in self._found:
                found.settle()
            self._saves = None

    def pack(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], *, is_lost: bool = False) -> Any:
        """See `Survey`."""
        if self._saves is None:
            return pack(tensor)
        self._latest, self._is_lost = None, is_lost
        handle = self._saves.pack(tensor, is_lost=is_lost)
        surveyed = Surveyed(pack(_alias(tensor)), handle.handle if isinstance(handle, Use) else handle)
        self._packs.append(self._latest)
        for late in self._saves.lowered:
            self._is_lowered(late)
        self._saves.lowered.clear()
        self._surveyed.append(surveyed)
        return surveyed

    def _is_lowered(self, late: Handle) -> None:
        """What it is made from is saved by now: grades that have it since then let go of it now."""
        for index, found in enumerate(self._found):
            if found.handle is late and found.since:
                found.since.append(late.grade)
                self._happens(DIES, index)

    def _told(self, saved: Saved) -> None:
        """A tensor that may be worth a recipe was saved."""
        found = self._by_storage.get(saved.storage)
        if saved.again:  # as it was when it was shown first, whatever is saved now
            if found is None:
                return
        elif self._is_lost:
            self._lost[saved.storage] = True
            return
        self._on_host = saved.tensor.device.type == "cpu"
        if found is None:
            found = _Found(len(self._found), self._identify(saved.storage), saved.storage)
            self._by_storage[saved.storage] = found
            self._found.append(found)
            found.handle = saved.handle.base if isinstance(saved.handle, View) else saved.handle
        if isinstance(saved.handle, Kept):
            found.keep()
        found.is_cached |= may_be_cached(saved.tensor)
        if not saved.again:
            self._latest = found
        if not found.kept and id(saved.tensor) not in found.alive:
            key = id(saved.tensor)
            found.alive.add(key)

            def dies(_: Any, self: LeanSurvey = self, found: _Found = found, key: int = key) -> None:
                found.alive.discard(key)
                if self._watching and not found.alive:
                    found.since.append(0 if found.handle is None else found.handle.grade)
                    self._happens(DIES, found.index)

            found.watches.append(weakref.ref(saved.tensor, dies))

    def _item(self, found: _Found) -> LeanItem:
        handle = found.handle
        if found.kept or handle is None or handle.grade == 0 or needs_lost(handle, self._gone):
            return LeanItem(found.number, 0, 0, 0.0)
        held = handle.held_bytes if isinstance(handle, Mask) else 0
        also: set[int] = set()
        temporary, work = rebuilding(handle, self._own, also)
        if found.nbytes <= held:
            return LeanItem(found.number, 0, 0, 0.0)
        return LeanItem(
            found.number,
            found.nbytes - held,
            handle.grade,
            work,
            temporary,
            tuple(sorted(also)),
            found.is_cached,
            held,
            tuple({self._identify(each) for each in _arguments(handle)}),
            tuple(found.since),
            comparing_bytes(handle, on_host=self._on_host),
            tuple(self._late_sources(handle, found.index)),
        )

    def _late_sources(self, handle: Handle, number: int) -> Iterator[tuple[int, int]]:
        """Items that one is made from and that were saved after it, whether they are kept or not."""
        for each in handle.inputs if isinstance(handle, Recipe) else ():
            base = each.base if isinstance(each, View) else each
            index = self._own.get(id(base))
            storage = base.kept_storage if index is None else None
            if storage is not None and storage in self._by_storage:
                index = self._by_storage[storage].index
            if index is None:
                yield from self._late_sources(base, number)
            elif index > number:
                self._watch(self._found[index])
                yield index, self._found[index].nbytes

    def _watch(self, source: _Found) -> None:
        storage = source.storage()
        if source.index not in self._sources and storage is not None:
            self._sources[source.index] = weakref.ref(storage, partial(_goes, weakref.ref(self), source.index))

    def _look_back(self) -> None:
        """Upon what the call has saved so far."""
        self._gone = {each for each in self._lost if each not in self._by_storage}
        self._own = {id(found.handle): found.index for found in self._found if not found.kept}

    def returned(self, out: Any) -> None:
        """See `Survey`."""
        if self._saves is not None:
            self._look_back()
            found = (self._result(base, recipe) for base, recipe in self._saves.results(out))
            self._results = tuple(each for each in found if each is not None)

    def _result(self, base: torch.Tensor, recipe: Recipe) -> ResultItem | None:
        kept = self._by_storage.get(base.untyped_storage())
        if (kept is not None and kept.kept) or needs_lost(recipe, self._gone):
            return None
        also: set[int] = set()
        temporary, work = rebuilding(recipe, {key: i for key, i in self._own.items() if key != id(recipe)}, also)
        given = {each.untyped_storage()._cdata for each in _plain(self._given.live())}
        needed: dict[int, int] = {}
        for storage, grade in sources_of(recipe):
            if storage._cdata in given:
                number = self._identify(storage)
                needed[number] = min(grade, needed.get(number, grade))
        return ResultItem(
            self._identify(base.untyped_storage()),
            base.untyped_storage().nbytes(),
            recipe.grade,
            work,
            temporary,
            tuple(sorted(also)),
            self._own.get(id(recipe), -1),
            tuple(sorted(needed.items())),
            base._version,
        )

    def _is_used(self, number: int) -> None:
        """Backward asks for something that was saved."""
        found = self._packs[number] if number < len(self._packs) else None
        if found is not None and not found.kept and found.index not in self._used:
            self._used.add(found.index)
            self._happens(IS_USED, found.index)

    def source_goes(self, index: int) -> None:
        """A source is gone that a recipe would hold until it is used itself."""
        self._happens(GOES, index)

    def items(self) -> tuple[LeanItem, ...]:
        """See `Survey`."""
        return self._items

    def results(self) -> tuple[ResultItem, ...]:
        """See `Survey`."""
        return self._results

    def versions(self) -> dict[int, int]:
        """See `Survey`."""
        return self._versions


def _goes(survey: weakref.ref[LeanSurvey], index: int, _: object) -> None:
    live = survey()
    if live is not None:
        live.source_goes(index)


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (each for each in tensors if is_plain(each) and not each.is_inference())


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under another name: the tensor itself, or what it is a view of, must die when it would die."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return tensor
    if tensor.is_conj() or tensor.is_neg():  # which is no part of the memory
        return tensor
    with torch.no_grad(), _disable_current_modes():  # a mode that counts memory would count it twice
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _arguments(handle: Handle) -> Iterator[torch.UntypedStorage]:
    """What the call was given, of that which a value is rebuilt from on the spot."""
    for each in handle.inputs if isinstance(handle, Recipe) else ():
        base = each.base if isinstance(each, View) else each
        if isinstance(base, Kept) and base.needed_grade:  # see `Values.given`
            if base.kept_storage is not None:
                yield base.kept_storage
        elif not base.is_saved:
            yield from _arguments(base)
