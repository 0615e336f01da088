"""The state that a whole training step writes, so that the step can run again as if it had not begun.

Which state that is, is learnt in the steps that learn; afterwards only that is copied, in one piece per dtype,
because it happens on every step. On the host a copy is bytes, no tensor: it is no part of what the step holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_mimose.actions.checksum import checksum
from lightning_mimose.actions.contents import is_readable
from lightning_mimose.actions.copies import (
    Entry,
    Place,
    Saved,
    appeared,
    changes,
    copy_all,
    copy_places,
    places,
    put_back,
    state_of,
)
from lightning_mimose.actions.stored import lost

FIRST_STEPS = 3
"""Steps in which everything is suspected, whatever is known about memory."""
LARGE_BYTES = 1 << 16
"""Tensors above it are not copied on the mere suspicion that a step might write them."""


ALONE = 2
"""How many use the memory of a tensor that shares it with none: that tensor, and whoever asks."""


class _Pieces(NamedTuple):
    """Tensors of one dtype and device, what they looked like, and their elements one after the other."""

    tensors: list[torch.Tensor]
    shapes: list[torch.Size]
    content: bytes | torch.Tensor


class _Object:
    """A tensor that may be replaced in the step; not kept alive where nobody could tell another one from it.

    Args:
        tensor: The tensor, which is there now.
    """

    __slots__ = ("_device", "_dtype", "_held", "_ref", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        plain = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
        alone = tensor.is_contiguous() and not tensor._is_view() and not _shares_memory(tensor)
        self._held = None if plain and alone else tensor
        self._ref = TensorWeakRef(tensor)
        self.shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def alive(self) -> torch.Tensor | None:
        """The tensor, if it is still there."""
        found: torch.Tensor | None = self._ref()
        return found

    def again(self) -> torch.Tensor:
        """The tensor, or one like it, that has to be filled: the same one whenever it is asked for."""
        alive = self.alive()
        if alive is None:
            alive = self._held = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            self._ref = TensorWeakRef(alive)
        return alive


class _Suspect(NamedTuple):
    """A tensor that a step may write or replace, and its content (see `_content`) or a checksum of it."""

    owner: nn.Module | None
    name: str
    found: _Object
    content: bytes | torch.Tensor | int

    def entry(self, value: torch.Tensor | None) -> Entry:
        """Where it is found, with a value."""
        return Entry(self.owner, self.name, value, None)

    def is_replaced(self) -> bool:
        """Whether another object is in its place."""
        alive = self.found.alive()
        return alive is None or bool(changes([self.entry(alive)]))

    def is_written(self) -> bool:
        """Whether its content is another one, or is gone."""
        alive = self.found.alive()
        return alive is None or _differs(alive, self.content)

    def put_back(self) -> None:
        """Put the tensor back where it was, or one like it, and its content."""
        value = self.found.alive() if isinstance(self.content, int) else self.found.again()
        if value is not None:
            put_back([self.entry(value)])
            if not isinstance(self.content, int) and _differs(value, self.content):
                _fill([value], [self.found.shape], self.content)


class StepState:
    """Learns what steps write, and copies it.

    Args:
        modules: What a step may write.
    """

    def __init__(self, modules: Callable[[], Sequence[nn.Module]]) -> None:
        self._modules = modules
        self._written: dict[tuple[int, str], Place] = {}
        self.replaced: set[tuple[int, str]] = set()
        """Where steps were seen to put other tensors: identities of owners, and names."""
        self._copies = 0

    def copy(self, *, learning: bool) -> StepCopy:
        """Copy what a step is known to write; while learning, and at first, all there is but large tensors."""
        self._copies += 1
        return StepCopy(self, self._modules() if learning or self._copies <= FIRST_STEPS else None)

    def known(self) -> list[Place]:
        """Where steps were seen to write."""
        return list(self._written.values())

    def writes(self, owner: nn.Module | None, name: str) -> bool:
        """Whether steps were seen to write there."""
        return (id(owner), name) in self._written

    def add(self, found: Saved) -> None:
        """Remember what was written."""
        for entry, place in zip(found, places(found), strict=True):
            self._written[id(entry.owner), entry.name] = place

    def add_replaced(self, found: Saved) -> None:
        """Remember where another tensor was put."""
        self.add(found)
        self.replaced.update((id(entry.owner), entry.name) for entry in found)


class StepCopy:
    """What one step found. What it replaces is not kept alive by that: it is held as it would be without."""

    def __init__(self, state: StepState, modules: Sequence[nn.Module] | None) -> None:
        self._state, self._modules = state, modules
        self._suspects: list[_Suspect] = []
        self._objects: dict[int, _Object] = {}
        """By identity, as one tensor may be found in several places."""
        self._entries: Saved = []
        self._pieces: list[_Pieces] = []
        if modules is None:
            self._copy_known(state.known())
            return
        for owner, name, value in state_of(modules):
            if isinstance(value, torch.Tensor) and is_readable(value):
                copied = value.nbytes <= LARGE_BYTES or state.writes(owner, name)
                self._suspect(owner, name, value, _bytes(value) if copied else checksum(value))
        self._entries = copy_all(modules, tensors=False)

    def _copy_known(self, known: list[Place]) -> None:
        tensors, replaced = [], self._state.replaced
        for entry in copy_places(known, tensors=False) if known else ():
            value = entry.value
            if not (isinstance(value, torch.Tensor) and is_readable(value)):
                self._entries.append(entry)
            elif replaced and (id(entry.owner), entry.name) in replaced:
                self._suspect(entry.owner, entry.name, value, _content(value))
            else:
                self._entries.append(entry)
                tensors.append(value)
        self._pieces = _in_pieces(tensors)

    def _suspect(
        self, owner: nn.Module | None, name: str, value: torch.Tensor, content: bytes | torch.Tensor | int
    ) -> None:
        found = self._objects.setdefault(id(value), _Object(value))
        self._suspects.append(_Suspect(owner, name, found, content))

    def learn(self) -> None:
        """The step is over: see what it has written."""
        if self._modules is not None:
            self._state.add_replaced([each.entry(None) for each in self._suspects if each.is_replaced()])
            written = [each.entry(None) for each in self._suspects if each.is_written()]
            self._state.add(changes(self._entries) + written + appeared(self._modules, self._seen()))

    def _seen(self) -> list[tuple[Any, ...]]:
        return [*self._entries, *self._suspects]

    def put_back(self) -> bool:
        """Put everything back; False if a large tensor was written or replaced and nobody knew that steps do so."""
        self.learn()
        unknown = [each for each in self._suspects if isinstance(each.content, int) and each.is_written()]
        put_back(self._entries, lost())
        for each in self._suspects:
            each.put_back()
        if self._modules is not None:
            put_back(appeared(self._modules, self._seen()))
        for pieces in self._pieces:
            _fill(*pieces)
        return not unknown


def _in_pieces(tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [
        _Pieces(group, [tensor.shape for tensor in group], _bytes(flat) if flat.device.type == "cpu" else flat)
        for group in groups.values()
        for flat in (torch.cat([tensor.detach().reshape(-1) for tensor in group]),)
    ]


def _content(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """A copy, where the tensor is: an accelerator does not wait for that."""
    return _bytes(tensor) if tensor.device.type == "cpu" else tensor.detach().flatten().clone()


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _differs(tensor: torch.Tensor, content: bytes | torch.Tensor | int) -> bool:
    if isinstance(content, torch.Tensor):
        return not torch.equal(tensor.detach().flatten(), content)
    return (checksum(tensor) if isinstance(content, int) else _bytes(tensor)) != content


def _fill(tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], content: bytes | torch.Tensor) -> None:
    if isinstance(content, bytes):
        content = torch.frombuffer(bytearray(content), dtype=tensors[0].dtype) if content else tensors[0].new_empty(0)
    pieces: Any = content.split([shape.numel() for shape in shapes])
    for tensor, shape, piece in zip(tensors, shapes, pieces, strict=True):
        if tensor.shape != shape:  # it was given other memory (`queue.data = torch.cat(...)`) or resized in place
            tensor.data = tensor.new_empty(shape)
        tensor.data.copy_(piece.view(shape))


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Whether other tensors have the same memory: `b = a.data` is no view of `a`."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > ALONE)
