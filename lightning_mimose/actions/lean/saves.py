"""Lean saves of one unit: the hook that decides, for every tensor that is saved, whether a recipe does as well.

A recipe is built from what the graph's nodes saved through this very hook, so it never reaches into another unit, a
recomputed one or somebody else's hooks. The first time a place in the unit is met, the tensor is rebuilt at once and
compared bit for bit; a place where it differs keeps its tensor from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mimose.actions.lean.handles import Handle, Kept, Mask, Recipe, View, unpack
from lightning_mimose.actions.lean.recipes import MASKS, TABLE, VIEW, Made

SMALL_BYTES = 2048
"""Smaller tensors are not worth a recipe."""
LONGEST_CHAIN = 12
"""Operations that may be run to rebuild one tensor from what is kept."""


class Place(NamedTuple):
    """Where in a unit's forward a tensor is saved: how many were before it, and by which operation it was made."""

    number: int
    made_by: str


@dataclass
class Sites:
    """What is known about the places of one unit, over all steps.

    Attributes:
        checked: Places whose recipe gave the same bits.
        different: Places whose recipe did not; they keep their tensor.
    """

    checked: set[Place] = field(default_factory=set)
    different: set[Place] = field(default_factory=set)


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

    Args:
        sites: What is known about the unit's places.
        grade: What may be rebuilt, see `recipes.GRADES`; 1 is the first of them.
        told: Shown everything that is saved, in order.
    """

    def __init__(self, sites: Sites, grade: int, told: Callable[[Saved], None] | None = None) -> None:
        self._sites, self._grade, self._told = sites, grade, told
        self._count = 0
        self._values: dict[tuple[Any, int], Handle | None] = {}
        self._storages: Any = WeakIdKeyDictionary()
        self._constants: dict[Any, dict[str, Any]] = {}
        self._ours: set[int] = set()
        self._dropout: float | None = None

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
        return _Constants(self)

    def close(self) -> None:
        """Let go of everything that nodes do not hold."""
        self._values.clear()
        self._storages.clear()
        self._constants.clear()
        self._ours.clear()

    # --- what is saved --------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle:
        """What is kept for a tensor that an operation saves."""
        handle = self._handle(tensor)
        handle.saved_once_more()
        self._ours.add(id(handle))
        return handle

    def _handle(self, tensor: torch.Tensor) -> Handle:
        self._count += 1
        if not _is_plain(tensor) or tensor.nbytes < SMALL_BYTES:
            return Kept(tensor)
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        storage = base.untyped_storage()
        known: Handle | None = self._storages.get(storage)
        if known is None:
            known = self._find(base, storage)
            self._storages[storage] = known
        handle = known if base is tensor else View(known, tensor)
        if isinstance(known, Kept):
            handle = Kept(tensor)  # with a version of its own
        if self._told is not None:
            self._told(Saved(storage, base, handle))
        return handle

    def _find(self, base: torch.Tensor, storage: torch.UntypedStorage) -> Handle:
        node = base.grad_fn
        found: Handle | None = None
        place = Place(self._count, node.name() if node is not None else "")
        if place not in self._sites.different and base.storage_offset() == 0 and storage.nbytes() == base.nbytes:
            if node is None:
                found = self._mask(base)
            elif base._version == 0:
                found = self.rebuilt(node, base.output_nr, 0)
        if found is not None and found.grade > self._grade:
            found = None
        if found is not None and place not in self._sites.checked:
            if _same(found.value(), base):
                self._sites.checked.add(place)
            else:
                self._sites.different.add(place)
                found = None
        if found is None:
            found = Kept(base)
        if node is not None:
            self._values[node, base.output_nr] = found
        return found

    def _mask(self, tensor: torch.Tensor) -> Handle | None:
        if self._grade < MASKS or tensor.requires_grad:
            return None
        if tensor.dtype == torch.bool:
            return Mask(tensor, 1.0, MASKS)
        if self._dropout is None or not tensor.is_floating_point() or tensor._version != 2 or self._dropout >= 1:
            return None
        # As torch makes it, in the tensor's own precision: drawn, then divided.
        number = torch.ones((), dtype=tensor.dtype, device=tensor.device).div_(1 - self._dropout)
        return Mask(tensor, number.item(), MASKS)

    # --- how it is rebuilt ----------------------------------------------------------------------------------------

    def rebuilt(self, node: Any, output: int, depth: int) -> Handle | None:
        """The value of an operation's output, from what is kept."""
        key = (node, output)
        if key not in self._values:
            self._values[key] = self._from_table(node, output, depth)
        return self._values[key]

    def _from_table(self, node: Any, output: int, depth: int) -> Handle | None:
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return Kept(node.variable)
        entry = TABLE.get(name)
        if entry is None or output != 0 or depth > LONGEST_CHAIN or entry.grade > self._grade:
            return None
        view = _Node(self, node, depth)
        made: Made | None = entry.make(view)
        if made is None:
            return None
        inputs = [each for each in made.inputs if each is not None]
        if len(inputs) != len(made.inputs):
            return None
        grade = max(entry.grade, *(each.needed_grade for each in inputs), 0)
        elements = prod(view.shape)
        nbytes = elements * view.dtype.itemsize
        work = made.work + made.work_per_element * elements
        is_view = made.work_per_element == VIEW and not made.work
        return Recipe(made.rebuild, inputs, nbytes, view.shape, grade, work, is_view=is_view)


class _Node:
    """See `recipes.Node`."""

    def __init__(self, saves: LeanSaves, raw: Any, depth: int) -> None:
        self._saves, self.raw, self._depth = saves, raw, depth
        like = raw._input_metadata[0]
        self.shape, self.dtype = tuple(like.shape), like.dtype

    def saved(self, name: str) -> Handle | None:
        data = getattr(getattr(self.raw, f"_raw_saved_{name}", None), "data", None)
        data = getattr(data, "handle", data)  # a survey's stand-in
        return data if isinstance(data, Handle) and id(data) in self._saves._ours else None

    def edge(self, index: int) -> Handle | None:
        following = self.raw.next_functions
        if index >= len(following) or following[index][0] is None:
            return None
        node, output = following[index]
        return self._saves.rebuilt(node, output, self._depth + 1)

    def operand(self, name: str, index: int) -> Handle | None:
        saved = self.saved(name)
        if saved is not None:
            return saved
        following = self.raw.next_functions[index][0]
        if following is not None:
            return self.edge(index)
        number = getattr(self.raw, f"_saved_{name}", None)  # a number is saved as a tensor without dimensions
        return Kept(number) if isinstance(number, torch.Tensor) and number.dim() == 0 else None

    def constant(self, name: str) -> Any:
        return self._saves._constants.get(self.raw, {}).get(name)


class _Constants(TorchFunctionMode):
    """Sees numbers that operations are called with and that their nodes do not keep."""

    def __init__(self, saves: LeanSaves) -> None:
        super().__init__()
        self._saves = saves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            name, position, default = _DROPOUTS[func]
            before, self._saves._dropout = self._saves._dropout, _argument(args, kwargs, position, name, default)
            try:
                return func(*args, **kwargs)
            finally:
                self._saves._dropout = before
        out = func(*args, **kwargs)
        if func in _SUMS:
            if len(args) > 1 and isinstance(args[1], (int, float)):
                self._note(out, operand=args[1], swapped=_SUMS[func])
        elif func in _NORMS:
            self._note(out, eps=_argument(args, kwargs, 4, "eps", 1e-5))
        return out

    def _note(self, out: Any, **constants: Any) -> None:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            self._saves._constants[out.grad_fn] = constants


_DROPOUTS: dict[Any, tuple[str, int, float]] = {
    functional.dropout: ("p", 1, 0.5),
    torch.dropout: ("p", 1, 0.5),
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
}
_NORMS = {functional.layer_norm, torch.layer_norm}
_SUMS = {
    torch.add: False,
    torch.Tensor.add: False,
    torch.Tensor.__add__: False,
    torch.Tensor.__radd__: True,
    torch.sub: False,
    torch.Tensor.sub: False,
    torch.Tensor.__sub__: False,
    torch.rsub: False,
    torch.Tensor.__rsub__: False,
}


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, zeros with their signs and what is not a number included."""
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    if integers is None:
        return torch.equal(one, other)
    return torch.equal(one.detach().view(integers), other.detach().view(integers))
