"""The state that a whole training step writes, so that the step can run again as if it had not begun.

Which state that is, is learnt in the steps that learn; afterwards only that is copied, in one piece per dtype,
because it happens on every step. On the host a copy is bytes, no tensor: it is no part of what the step holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.checksum import checksum
from lightning_mimose.actions.contents import is_readable
from lightning_mimose.actions.state import (
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

FIRST_STEPS = 3
"""Steps in which everything is suspected, whatever is known about memory."""
LARGE_BYTES = 1 << 16
"""Tensors above it are not copied on the mere suspicion that a step might write them."""


class _Pieces(NamedTuple):
    """Tensors of one dtype and device, and their elements one after the other."""

    tensors: list[torch.Tensor]
    content: bytes | torch.Tensor


class StepState:
    """Learns what steps write, and copies it.

    Args:
        modules: What a step may write.
    """

    def __init__(self, modules: Callable[[], Sequence[nn.Module]]) -> None:
        self._modules = modules
        self._written: dict[tuple[int, str], Place] = {}
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


class StepCopy:
    """What one step found."""

    def __init__(self, state: StepState, modules: Sequence[nn.Module] | None) -> None:
        self._state, self._modules = state, modules
        self._suspects: list[tuple[Entry, bytes | int]] = []
        if modules is None:
            found, self._pieces = [], []
            known = state.known()
            if known:
                found = copy_places(known, tensors=False)
                self._pieces = _in_pieces(
                    [e.value for e in found if isinstance(e.value, torch.Tensor) and is_readable(e.value)]
                )
        else:
            found, self._pieces = [], []
            for owner, name, value in state_of(modules):
                if isinstance(value, torch.Tensor) and is_readable(value):
                    copied = value.nbytes <= LARGE_BYTES or state.writes(owner, name)
                    entry = Entry(owner, name, value, None)
                    self._suspects.append((entry, _bytes(value) if copied else checksum(value)))
                    found.append(entry)
            found += copy_all(modules, tensors=False)
        self._entries: Saved = found

    def learn(self) -> None:
        """The step is over: see what it has written."""
        if self._modules is not None:
            written = [entry for entry, content in self._suspects if _differs(entry.value, content)]
            self._state.add(changes(self._entries) + written + appeared(self._modules, self._entries))

    def put_back(self) -> bool:
        """Put everything back; False if a large tensor was written that nobody knew steps write."""
        self.learn()
        lost = [e for e, content in self._suspects if isinstance(content, int) and _differs(e.value, content)]
        put_back(self._entries)
        if self._modules is not None:
            put_back(appeared(self._modules, self._entries))
        for entry, content in self._suspects:
            if isinstance(content, bytes) and _differs(entry.value, content):
                _fill([entry.value], content)
        for tensors, pieces in self._pieces:
            _fill(tensors, pieces)
        return not lost


def _in_pieces(tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return [
        _Pieces(group, _bytes(flat) if flat.device.type == "cpu" else flat)
        for group in groups.values()
        for flat in (torch.cat([tensor.reshape(-1) for tensor in group]),)
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _differs(tensor: torch.Tensor, content: bytes | int) -> bool:
    return (checksum(tensor) if isinstance(content, int) else _bytes(tensor)) != content


def _fill(tensors: Sequence[torch.Tensor], content: bytes | torch.Tensor) -> None:
    if isinstance(content, bytes):
        if not content:
            return
        content = torch.frombuffer(bytearray(content), dtype=tensors[0].dtype)
    pieces: Any = content.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.data.copy_(piece.view(tensor.shape))
