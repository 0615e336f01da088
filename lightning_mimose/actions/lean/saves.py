"""Lean saves of one unit: the hook that decides, for every tensor that is saved, whether a recipe does as well.

A recipe is built from what the graph's nodes saved through this very hook, so it never reaches into another unit, a
recomputed one or somebody else's hooks. The first time a place in the unit is met, the tensor is rebuilt at once and
compared bit for bit; a place where it differs keeps its tensor from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_mimose.actions.lean.constants import Constants
from lightning_mimose.actions.lean.handles import (
    Handle,
    Kept,
    Recipe,
    Use,
    View,
    base_of,
    is_plain,
    rebuilt_now,
    storages_of,
    unpack,
)
from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.node import Node
from lightning_mimose.actions.lean.recipes.table import TABLE, VIEW, Made, MissingError
from lightning_mimose.actions.lean.sites import Place, Sites
from lightning_mimose.errors import is_out_of_memory
from lightning_mimose.menu import ATTENTION, MASKS

SMALL_BYTES = 2048
"""Smaller tensors are not worth a recipe."""
LONGEST_CHAIN = 12
"""Operations that may be run to rebuild one tensor from what is kept."""
WIDEST = 8
"""How many times its own size may be made on the way to a tensor: to rebuild a sum over much spares next to nothing."""


class Saved(NamedTuple):
    """One tensor that was saved, for who measures.

    Attributes:
        storage: Its storage.
        tensor: The tensor itself, or the one it is a view of.
        handle: What could be kept instead of it.
    """

    storage: torch.UntypedStorage
    tensor: torch.Tensor
    handle: Handle


class LeanSaves:
    """Takes over what one call of a unit saves.

    Attributes:
        compared: Whether a place was met for the first time, so that its tensor was there twice.
        differed: Whether it could not be rebuilt bit for bit.
        borrowed: Arguments that recipes use, and that autograd would not look at again.
        owner: Stands for this object in the handles that it has made.
        notes: What operations were called with.
        in_scores: While attention's scores are looked for.

    Args:
        sites: What is known about the unit's places.
        grade: What may be rebuilt, see `grades.GRADES`; 1 is the first of them.
        told: Shown everything that is saved, in order.
        applies: Whether what is decided comes true. Otherwise (in a survey) a recipe that was never tried is taken to
            be right, and masks are not packed.
        small_bytes: What is smaller keeps its tensor. A trial leaves nothing out: other batches are larger.
        leaves: Parameters that values may be rebuilt from, as long as nobody changes them; None for any.
        held: What somebody else keeps alive (arguments, buffers): another form of it would be more memory.
        given: What of it may be used again in backward (arguments): whoever uses it has to see that nobody changes it.
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
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._sites, self._grade, self._told, self._applies = sites, grade, told, applies
        self._leaves = None if leaves is None else {id(leaf): leaf._version for leaf in leaves}
        self._held: set[int] = set()
        self._given: set[int] = set()
        self.hold(held, given)
        self._count = 0
        self._values: dict[tuple[Any, int], Handle | None] = {}
        self._numbers: dict[tuple[Any, int], int] = {}
        self._storages: dict[int, tuple[Any, Handle | None, Any]] = {}
        self.owner = object()
        self._start = 0
        self.in_scores = False
        self._small_bytes = small_bytes
        self.compared = self.differed = False
        self.borrowed: list[torch.Tensor] = []
        self.notes = Constants()

    def hold(self, held: Iterable[Any], given: Iterable[Any]) -> None:
        """Name tensors that somebody else keeps alive, and those of them that may be used again."""
        self._given |= storages_of(given)
        self._held |= self._given | storages_of(held)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around the unit's forward. Afterwards only what nodes hold is left."""
        try:
            with self.constants(), saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self.close()

    def constants(self) -> TorchFunctionMode:
        """Has to be entered around the forward: sees numbers that operations are called with."""
        self._start = torch._C._autograd._get_sequence_nr()
        return self.notes

    def close(self) -> None:
        """Let go of everything that nodes do not hold."""
        self._values.clear()
        self._numbers.clear()
        self._storages.clear()
        self.notes.forget()
        self._held.clear()
        self._given.clear()

    # --- what is saved --------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | Use:
        """What is kept for a tensor that an operation saves."""
        self._count += 1
        base = base_of(tensor)
        node, output = base.grad_fn, base.output_nr
        handle = self._handle(tensor, base, node, output)
        handle.owner = self.owner
        handle.is_saved = True
        # Whether or not it is kept: small ones are, except in a trial. Nor may the same operations be possible, or
        # bit-equal, on another order of the elements.
        handle.identity = 2 * self._count + bool(handle.shape and tensor.is_contiguous())
        if node is not None:
            self._numbers.setdefault((node, output), handle.identity)
        rebuilt = handle.rebuilt
        if rebuilt is None:
            return handle
        rebuilt.is_saved = True
        return Use(handle, rebuilt)

    def _handle(self, tensor: torch.Tensor, base: torch.Tensor, node: Any, output: int) -> Handle:
        if node is None and base.requires_grad:
            return Kept(tensor)  # a parameter
        if not is_plain(tensor) or not (base is tensor or is_plain(base)):
            return Kept(tensor)
        storage = base.untyped_storage()
        if storage.nbytes() < self._small_bytes or storage._cdata in self._held:
            return Kept(tensor)
        # The same memory is the same value if it looks the same and nobody has changed it in between.
        state = base._version, base.shape, base.stride(), base.storage_offset(), base.dtype
        # By its address, which is another storage's once it is gone.
        ref, known, as_found = self._storages.get(storage._cdata, (None, None, state))
        if ref is not None and ref() is not storage:
            ref, known, as_found = None, None, state
        if as_found != state:
            known = None
        elif known is None:
            known = self._find(base, storage, node, output)
        handle: Handle | None = None
        if known is not None and not isinstance(known, Kept) and tensor.dtype == base.dtype:
            handle = known if base is tensor else View(known, tensor)
            place = Place(self._count, node.name() if node is not None else "", handle.identity)
            handle = handle if self._is_right(place, handle, tensor) else None
        if handle is None:
            handle = Kept(tensor)  # with a version of its own
            known = handle if base is tensor else Kept(base)
        if ref is None:
            self._storages[storage._cdata] = weakref.ref(storage), known, state
        if node is not None:
            self._values[node, output] = known if as_found == state else None
        if self._told is not None:
            self._told(Saved(storage, base, handle))
        return handle

    def _find(self, base: torch.Tensor, storage: torch.UntypedStorage, node: Any, output: int) -> Handle | None:
        found: Handle | None = None
        if base.storage_offset() != 0 or storage.nbytes() != base.nbytes:
            return None
        if node is None:
            found = self._mask(base)
        elif self.notes.is_result(base):
            found = self.rebuilt(node, output, 0)
        if found is None or isinstance(found, Kept) or found.grade > self._grade:
            return None
        return None if isinstance(found, Recipe) and found.widest_bytes > WIDEST * found.nbytes else found

    def _is_right(self, place: Place, handle: Handle, tensor: torch.Tensor) -> bool:
        """By a comparison, the first time that the place is met."""
        if self._applies and place not in self._sites.checked and place not in self._sites.different:
            self.compared = True
            same = _rebuilds(handle, tensor)
            (self._sites.checked if same else self._sites.different).add(place)
            self.differed |= not same
        return place not in self._sites.different

    def _mask(self, tensor: torch.Tensor) -> Handle | None:
        if self._grade < MASKS or tensor.requires_grad:
            return None
        if tensor.dtype == torch.bool:
            return Mask(tensor, 1.0, MASKS, packs=self._applies)
        dropout = self.notes.dropout
        if dropout is None or not tensor.is_floating_point() or tensor._version != 2 or dropout >= 1:
            return None
        return Mask(tensor, _kept_number(float(dropout), tensor.dtype, tensor.device), MASKS, packs=self._applies)

    def given(self, tensor: torch.Tensor) -> Handle | None:
        """A tensor without gradients, if it is an argument; one that would only live for a recipe is no gain.

        Nor a buffer: a unit may write its own after it has used it, which autograd would allow.
        """
        if not is_plain(tensor) or tensor.is_inference() or tensor.untyped_storage()._cdata not in self._given:
            return None
        self.borrowed.append(tensor)
        kept = Kept(tensor)
        kept.grade = ATTENTION  # from this grade on, timelines count that units keep their arguments alive
        return kept

    # --- how it is rebuilt ----------------------------------------------------------------------------------------

    def rebuilt(self, node: Any, output: int, depth: int) -> Handle | None:
        """The value of an operation's output, from what is kept."""
        key = (node, output)
        if key in self.notes.changed:
            return None
        if key not in self._values:
            self._values[key] = self._from_table(node, output, depth)
        found = self._values[key]
        if found is not None:
            found.identity = self._numbers.get(key, found.identity)
        return found

    def _from_table(self, node: Any, output: int, depth: int) -> Handle | None:
        name = node.name()
        if name == _LEAF:
            leaf = node.variable
            # One that was changed since the unit began is not what the operation was given.
            known = self._leaves is None or self._leaves.get(id(leaf)) == leaf._version
            return Kept(leaf) if known else None
        entry = TABLE.get(name)
        if entry is None or output != 0 or depth > LONGEST_CHAIN:
            return None
        own = ATTENTION if self.in_scores and name == "BmmBackward0" else entry.grade
        if own > self._grade:
            return None
        if node._sequence_nr() < self._start:  # somebody else's, made before; for those after, see `Node.saved`
            return None
        if entry.needs_first and self._leads_nowhere(node):
            return None
        try:
            view = Node(self, node, depth)
            made: Made | None = entry.make(view)
        except MissingError:
            return None
        if made is None:
            return None
        own = own if own == ATTENTION else max(own, made.grade)
        if own > self._grade:
            return None
        inputs = [each for each in made.inputs if each is not None]
        if len(inputs) != len(made.inputs) or not all(each.is_intact for each in inputs if isinstance(each, Kept)):
            return None
        grade = max(own, *(each.needed_grade for each in inputs), 0)
        shape = view.shape
        elements = prod(shape)
        work = made.work + made.work_per_element * elements
        is_view = made.work_per_element == VIEW and not made.work
        recipe = Recipe(
            made.rebuild,
            inputs,
            elements * view.dtype.itemsize,
            shape,
            grade,
            work,
            is_view=is_view,
            gives_away=made.gives_away,
            takes_out=made.takes_out,
        )
        recipe.identity = hash((name, *(each.identity for each in inputs)))
        return recipe

    def _leads_nowhere(self, node: Any) -> bool:
        """Whether operations that need their first input lead to one without a recipe, looked at before any is made."""
        while True:
            key = node, _ = node.next_functions[0]
            if node is None or key in self._values:
                return self._values.get(key) is None
            name: str = node.name()
            entry = TABLE.get(name)
            if entry is None:
                return name != _LEAF
            if node._sequence_nr() < self._start:  # somebody else's
                return True
            if entry.grade > self._grade:
                return not self.in_scores
            if not entry.needs_first:
                return False


_LEAF = "torch::autograd::AccumulateGrad"


@lru_cache(maxsize=64)
def _kept_number(dropout: float, dtype: torch.dtype, device: torch.device) -> float:
    """What a dropout's mask has where it is not 0, as torch makes it in the tensor's own precision: drawn, divided."""
    return torch.ones((), dtype=dtype, device=device).div_(1 - dropout).item()


def _rebuilds(handle: Handle, tensor: torch.Tensor) -> bool:
    try:
        return _same(rebuilt_now(handle), tensor)
    except Exception as error:  # a recipe that cannot be followed here is no reason to end a training
        if is_out_of_memory(error):
            raise
        return False


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, zeros with their signs and what is not a number included."""
    if (one.shape, one.dtype, one.device, one.stride()) != (other.shape, other.dtype, other.device, other.stride()):
        return False
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    if integers is None:
        return torch.equal(one, other)
    return torch.equal(one.detach().view(integers), other.detach().view(integers))
