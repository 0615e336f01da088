"""Lean saves of one unit: the hook that decides, for every tensor that is saved, whether a recipe does as well.

A recipe is built from what the graph's nodes saved through this very hook, so it never reaches into another unit, a
recomputed one or somebody else's hooks. The first time a place in the unit is met, the tensor is rebuilt at once and
compared bit for bit; a place where it differs keeps its tensor from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_mimose.actions.lean.handles import (
    Handle,
    Kept,
    Rebuilt,
    Use,
    View,
    base_of,
    is_plain,
    unpack,
)
from lightning_mimose.actions.lean.late import Late, WaitingRoom
from lightning_mimose.actions.lean.lost import in_vain
from lightning_mimose.actions.lean.masks import mask_of
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.returned import Result, Returned, state_of
from lightning_mimose.actions.lean.sites import BUSY, SURE, Place, Sites, Spot
from lightning_mimose.actions.lean.storages import Storages
from lightning_mimose.actions.lean.values import Key, Values
from lightning_mimose.actions.lean.verdicts import Verdicts, place_of
from lightning_mimose.menu import MASKS
from lightning_mimose.parts import leaves_in

RETURNED = "another unit"
"""In place of the operation that made a tensor: it is another unit's result."""
WIDEST = 8
"""How many times its own size may be made on the way to a tensor: to rebuild a sum over much spares next to nothing."""


class Saved(NamedTuple):
    """One tensor that was saved, for who measures.

    Attributes:
        storage: Its storage.
        tensor: The tensor itself, or the one it is a view of.
        handle: What could be kept instead of it.
        again: Whether it was shown before, when that was not known.
    """

    storage: torch.UntypedStorage
    tensor: torch.Tensor
    handle: Handle
    again: bool = False


class LeanSaves:
    """Takes over what one call of a unit saves.

    Attributes:
        verdicts: Which recipes gave the same bits, and what was compared for that.
        notes: What operations were called with.
        took: Whether it has saved what another unit had returned.
        taken: By what that is rebuilt.
        spoiled: Units whose results were changed before this one saved them.
        lowered: In a survey, what lower grades have from now on, although its tensor was gone before.

    Args:
        sites: What is known about the unit's places.
        grade: What may be rebuilt, see `grades.GRADES`; 1 is the first of them. 0 for nothing of the unit's own.
        told: Shown everything that is saved, in order.
        applies: Whether what is decided comes true. Otherwise (in a survey) a recipe that was never tried is taken to
            be right, and masks are not packed.
        settles: Whether it is learnt where it is in vain to look for recipes. A trial looks everywhere.
        leaves: Parameters that values may be rebuilt from, as long as nobody changes them; None for any.
        held: What somebody else keeps alive (arguments, buffers): another form of it would be more memory.
        given: What of it may be used again in backward (arguments): whoever uses it has to see that nobody changes it.
        returned: What lean units before this one have returned: it is rebuilt wherever this one would keep it.
    """

    def __init__(
        self,
        sites: Sites,
        grade: int,
        told: Callable[[Saved], None] | None = None,
        *,
        applies: bool = True,
        leaves: Iterable[torch.Tensor] | None = None,
        held: Iterable[Any] = (),
        given: Iterable[Any] = (),
        settles: bool = True,
        returned: Returned | None = None,
    ) -> None:
        self._sites, self._grade, self._told, self._applies = sites, grade, told, applies
        self._returned = returned
        self._values = Values(grade, leaves)
        self.notes = self._values.notes
        self._held = Storages()
        self.hold(held, given)
        self._count = 0
        self._storages: dict[int, tuple[Any, Handle | None, Any]] = {}
        self._settles = applies and settles and told is None
        self.verdicts = Verdicts(sites, grade, applies=applies, notes=not self._settles)
        self._kept_in_vain: list[tuple[Spot, tuple[Handle | None, ...]]] = []
        self._rebuilt_here: list[Handle] = []
        self._waiting = WaitingRoom()
        self._awaited: list[Key] = []
        """What was missing for the latest tensor that was looked for in vain."""
        self._in_vain = False
        """Whether there was no recipe for the latest tensor, whatever its size."""
        self.took = False
        self.taken: list[Rebuilt] = []
        self.spoiled: set[str] = set()
        self.lowered: list[Recipe] = []

    @property
    def compared_in(self) -> tuple[int, int]:
        """How many places the call has had, and up to which grade the recipes there are known to be right or wrong."""
        return self._count, self._grade if self._applies else 0

    @property
    def borrowed(self) -> list[torch.Tensor]:
        """Arguments that recipes use, and that autograd would not look at again."""
        return [tensor for ref in self._values.borrowed if (tensor := ref()) is not None]

    def hold(self, held: Iterable[Any], given: Iterable[Any]) -> None:
        """Name tensors that somebody else keeps alive, and those of them that may be used again."""
        given = list(given)
        self._values.arguments.add(given)
        self.notes.begins_with(given)
        self._held.add(given)
        self._held.add(held)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around the unit's forward. Afterwards only what nodes hold is left."""
        with self.closing(), self.watching():
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Around `watching` and whoever looks at the result: learns at its end, and lets go of everything else."""
        try:
            yield
            self.settle()
        finally:
            self.close()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward alone: inside, each look at a tensor is a call that is watched, which takes far longer."""
        with self.constants(), saved_tensors_hooks(self.pack, unpack):
            yield

    def settle(self) -> None:
        """Learn where it was in vain to look for recipes; to be called before `close`, when the forward has run."""
        if self._settles:
            self._sites.settle(self._kept_in_vain, self._rebuilt_here)

    def constants(self) -> TorchFunctionMode:
        """Has to be entered around the forward: sees numbers that operations are called with."""
        self._values.start = torch._C._autograd._get_sequence_nr()
        return self.notes

    def close(self) -> None:
        """Let go of everything that nodes do not hold."""
        self._values.forget()
        self._waiting.clear()
        self._awaited = []
        self._storages.clear()
        self._held.clear()
        self._kept_in_vain.clear()
        self._rebuilt_here.clear()
        self.lowered.clear()
        self.verdicts.close()

    def pack(self, tensor: torch.Tensor, *, is_lost: bool = False) -> Handle | Use:
        """What is kept for a tensor that an operation saves.

        Args:
            tensor: The tensor.
            is_lost: Whether the operation is known to be none of what is there of the graph when the forward returns.
        """
        self._count += 1
        base = tensor._base  # as `base_of`: this is done for every tensor that is saved
        base = tensor if base is None else base
        node = base.grad_fn
        if node is None and base.requires_grad:  # a parameter
            kept = Kept(tensor)
            self._tell_apart(kept, tensor)
            return kept
        output, values, spot = base.output_nr, self._values, None
        if node is not None and self._settles:
            spot = (self._grade, self._count, node._sequence_nr() - values.start, node.name())
        if spot is not None and self._sites.idle.get(spot, 0) >= SURE and self._is_own(base):
            handle: Handle = Kept(tensor)
            if base is tensor:
                values.enter((node, output), handle)
        else:
            self._in_vain = False
            handle = self._handle(tensor, base, node, output)
            if spot is not None and self._in_vain:
                self._kept_in_vain.append((spot, (handle, values.found[node, output])))
        rebuilt = handle.rebuilt
        if rebuilt is not None and not rebuilt.is_saved and not is_lost:
            rebuilt.is_saved = True
            self.lowered += self._waiting.lower(rebuilt)
        self._tell_apart(handle, tensor, is_saved=not is_lost or handle.is_saved)
        packed = handle if rebuilt is None else Use(handle, rebuilt)
        if node is not None:
            values.numbers.setdefault((node, output), handle.identity)
            if (node, output) in self._waiting.awaited:
                self._resolve((node, output), base)
        if rebuilt is None:
            return packed
        if isinstance(rebuilt, Late) and rebuilt.is_kept:
            self._waiting.packed(rebuilt, spot)
        elif spot is not None:
            self._sites.idle[spot] = BUSY
            self._rebuilt_here.append(handle)
        return packed

    def _tell_apart(self, handle: Handle, tensor: torch.Tensor, *, is_saved: bool = True) -> None:
        """Say which saved tensor of this call a handle stands for."""
        handle.owner, handle.is_saved = self._values.owner, is_saved
        # Whether or not it is kept. Nor may the same operations be possible, or bit-equal, on another order of the
        # elements.
        ordered = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() and tensor.is_contiguous()
        handle.identity = 2 * self._count + bool(ordered)

    def _resolve(self, key: Key, base: torch.Tensor) -> None:
        """A value is saved: what was kept for want of it may be rebuilt from it."""
        if self._values.found.get(key) is None or not self.notes.is_result(base):
            return
        for each in self._waiting.awaited.pop(key):
            late = each.handle
            if not isinstance(late, Late) or not each.may_change:
                continue
            found, awaited = self._values.again(each.key, is_contiguous=late.value().is_contiguous())
            if found is None:
                self._waiting.wait_on(late, awaited)
            if not isinstance(found, Recipe) or found.is_kept or not self._is_worth(found):
                continue
            kept = late.value()
            place = place_of(each.number, each.key[0], found, kept)
            if not self.verdicts.is_right(place, found, kept):
                continue
            late.become(found)
            if each.spots:
                self._sites.idle.update(dict.fromkeys(each.spots, BUSY))
                self._rebuilt_here.append(late)
            if self._told is not None:
                # The tensor itself, if it is there: it goes when the forward lets go of it.
                tensor = each.tensor()
                self._told(Saved(kept.untyped_storage(), kept if tensor is None else tensor, late, again=True))

    def _is_own(self, base: torch.Tensor) -> bool:
        """Whether a tensor is as its operation made it, and not another unit's result."""
        return not base._version and (not self._returned or self._returned.of(base.untyped_storage()) is None)

    def _handle(self, tensor: torch.Tensor, base: torch.Tensor, node: Any, output: int) -> Handle:
        if not is_plain(tensor) or not (base is tensor or is_plain(base)):
            return Kept(tensor)
        storage = base.untyped_storage()
        result = self._returned.of(storage) if self._returned else None
        if result is not None:
            return self._anothers(result, tensor, base)
        if not self._grade or not storage.nbytes():
            return Kept(tensor)
        if storage in self._held:
            if node is not None and storage in self._values.arguments:
                # A residual stream: something is added to it.
                self._values.enter_argument((node, output), base)
            return Kept(tensor)
        # The same memory is the same value if it looks the same and nobody has changed it in between.
        state = state_of(base)
        # By its address, which is another storage's once it is gone.
        ref, known, as_found = self._storages.get(storage._cdata, (None, None, state))
        if ref is not None and ref() is not storage:
            ref, known, as_found = None, None, state
        if as_found != state:
            known = None
        elif known is None:
            known = self._find(base, storage, node, output)
            if known is None and self._awaited:
                known = self._waiting.wait(base, (node, output), self._count, self._awaited)
            elif self._told is not None and isinstance(known, Recipe) and known.grade > known.own_grade:
                self._waiting.wait_for_less(known, (node, output), self._count, base)
        handle: Handle | None = None
        if known is not None and not isinstance(known, Kept) and tensor.dtype == base.dtype:
            handle = known if base is tensor else View(known, tensor)
            if not known.is_kept:
                place = place_of(self._count, node, handle, base)
                handle = handle if self.verdicts.is_right(place, handle, tensor) else None
        if handle is None:
            handle = Kept(tensor)  # with a version of its own
            known = handle if base is tensor else Kept(base)
        if ref is None:
            self._storages[storage._cdata] = weakref.ref(storage), known, state
        if node is not None:
            self._values.enter((node, output), known if as_found == state else None)
        if self._told is not None:
            self._told(Saved(storage, base, handle))
        return handle

    def _anothers(self, result: Result, tensor: torch.Tensor, base: torch.Tensor) -> Handle:
        """What another unit has returned, and this one saves."""
        handle: Handle | None = None
        self.took = result.taken = True
        # A conjugate, say, is no window on the memory.
        plain = (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == (base.dtype, False, False)
        if result.is_unchanged(base) and plain:
            handle = result.handle if base is tensor else View(result.handle, tensor)
            place = Place(self._count, RETURNED, 0)
            if place not in self._sites.checked and result.has_bits_of(base):
                self._sites.checked.add(place)  # without the memory of another copy
            handle = handle if self.verdicts.is_right(place, handle, tensor) else None
        if handle is None:
            self.spoiled.add(result.unit)
        elif result.handle not in self.taken:
            self.taken.append(result.handle)
        if base.grad_fn is not None:
            self._values.enter((base.grad_fn, base.output_nr), None if handle is None else result.handle)
        return Kept(tensor) if handle is None else handle

    def results(self, out: Any, only: torch.UntypedStorage | None = None) -> Iterator[tuple[torch.Tensor, Recipe]]:
        """What of a call's result is rebuilt from what it saves; to be asked for before `close`.

        Args:
            out: What the forward returned.
            only: The storage of what is asked for, if it is not all.
        """
        for number, (base, node) in enumerate(_made_in(out)):
            if only is not None and base.untyped_storage() is not only:
                continue
            recipe = self._result(base, node, base.output_nr)
            if recipe is not None and self.verdicts.is_right(place_of(-1 - number, node, recipe, base), recipe, base):
                yield base, recipe

    def compare_results(self, out: Any) -> None:
        """Find out which of them are rebuilt bit for bit."""
        for _ in self.results(out):
            pass

    def may_lose(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is there no longer than what has saved it: not arguments, buffers and parameters."""
        base = base_of(tensor)
        if not is_plain(base) or (base.is_leaf and base.requires_grad):
            return False
        storage = base.untyped_storage()
        return storage not in self._held

    def close_and_leave_out(self, lost: Callable[[], Collection[torch.UntypedStorage]]) -> None:
        """`close`, and from the next call on rebuild nothing from what is lost.

        Args:
            lost: Tells, when it is closed, which storages only such parts of the graph have saved as are gone by now.
        """
        met = list(self.verdicts.met)
        self.close()  # nodes that it knows are not gone
        self._sites.vain.update(in_vain(met, lost()))

    def keep_results(self, out: Any, only: torch.UntypedStorage) -> None:
        """Others keep one of them as long: what saved it as well need not rebuild it.

        Args:
            out: What the forward returned.
            only: The storage of that one.
        """
        for base, node in _made_in(out):
            recipe = self._result(base, node, base.output_nr) if base.untyped_storage() is only else None
            if recipe is not None and recipe.is_saved:
                recipe.keep(base)

    def _result(self, base: torch.Tensor, node: Any, output: int) -> Recipe | None:
        """What rebuilds it: that by which it was saved, or another if nothing has saved it."""
        storage = base.untyped_storage()
        if storage in self._held:
            return None
        found = self._find(base, storage, node, output)
        return found if isinstance(found, Recipe) else None

    def _find(self, base: torch.Tensor, storage: torch.UntypedStorage, node: Any, output: int) -> Handle | None:
        found: Handle | None = None
        self._awaited = []
        if base.storage_offset() != 0 or storage.nbytes() != base.nbytes:
            return None
        if node is None:
            found = mask_of(base, self.notes.dropout, packs=self._applies) if self._grade >= MASKS else None
        elif self.notes.is_result(base):
            found = self._values.rebuilt(node, output, 0, is_contiguous=base.is_contiguous())
            if found is None:
                self._awaited = self._values.awaited((node, output))
        if found is None or found.is_kept or found.grade > self._grade:
            self._in_vain = True
            return None
        return found if self._is_worth(found) else None

    def _is_worth(self, found: Handle) -> bool:
        return found.grade <= self._grade and not (
            isinstance(found, Recipe) and found.widest_bytes > WIDEST * found.nbytes
        )


def _made_in(out: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors with gradients that a unit returned, or that it returned views of, and the nodes that made them."""
    known: set[int] = set()
    for tensor in leaves_in(out):
        if isinstance(tensor, torch.Tensor) and is_plain(tensor):
            base = base_of(tensor)
            node = base.grad_fn
            if node is not None and is_plain(base) and base.untyped_storage()._cdata not in known:
                known.add(base.untyped_storage()._cdata)
                yield base, node
