"""Late writes: state that a unit's first forward left alone, and a later one writes.

A codebook that waits for a warm-up, a schedule that starts at its hundredth call: the forward that begins to write
was not announced, so before every forward what might be written is noted. That is cheap: modules of torch's own
without buffers write nothing, objects are told apart by identity, small tensors are copied. A large one is told by
its version, and cannot be put back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.contents import content_of, is_readable, same_content
from lightning_mimose.actions.copies import Entry, Place
from lightning_mimose.actions.members import SIMPLE, Names
from lightning_mimose.actions.outside import NO_STATE, is_of_process
from lightning_mimose.actions.outside import look as outer

SMALL_BYTES = 1 << 16
"""Tensors up to here are copied before a forward that may write them for the first time."""

_WITH_CONTENT = (torch.Tensor, list, dict, set, deque)


class _Watched(NamedTuple):
    """Names in one module under which nothing was written yet."""

    module: weakref.ref[nn.Module]
    buffers: Names
    attributes: Names

    def values(self, module: nn.Module) -> tuple[Any, ...]:
        """What is under them now, buffers first; None where nothing is."""
        try:
            return self.buffers.get(module._buffers) + self.attributes.get(module.__dict__)
        except KeyError:  # a name is gone, or a buffer is no buffer any more
            held, inside = module._buffers, vars(module)
            return tuple(held[name] if name in held else inside.get(name) for name in self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of `values`."""
        return self.buffers.names + self.attributes.names


class _Content(NamedTuple):
    """Of a tensor or a container: its place among the values, a copy of what is in it or None, its version."""

    place: int
    content: Any
    version: int


class _Seen(NamedTuple):
    """One module before a forward, and how many names it had."""

    module: nn.Module
    watched: _Watched
    values: tuple[Any, ...]
    contents: Sequence[_Content]
    size: int


class Look(NamedTuple):
    """What was found before a forward, module after module."""

    found: list[_Seen]
    outside: list[tuple[str, Any, Any]]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Every owner and name."""
        return [(seen.module, name) for seen in self.found for name in seen.watched.names]


class Late(NamedTuple):
    """What a forward wrote for the first time.

    Attributes:
        written: (owner, name, object, content) as they were before it.
        grown: Modules that have new names.
        lost: What cannot be put back, readable.
    """

    written: list[tuple[nn.Module | None, str, Any, Any]]
    grown: list[nn.Module]
    lost: list[str]


class LateWrites:
    """Watches what a unit was not seen to write.

    Args:
        state: Everything that may be state of the unit now.
        written: Where its forward is known to write.
    """

    def __init__(self, state: Sequence[Entry], written: Sequence[Place]) -> None:
        known = {(id(ref()), name) for ref, name in written if ref is not None}
        elsewhere = {name for ref, name in written if ref is None}
        self._outside = [
            entry.name
            for entry in state
            if entry.owner is None and entry.name not in elsewhere and not is_of_process(entry.name)
        ]
        names: dict[int, tuple[nn.Module, list[str], list[str]]] = {}
        for entry in state:
            owner = entry.owner
            if owner is None or _is_plain_layer(owner):
                continue
            _, buffers, attributes = names.setdefault(id(owner), (owner, [], []))
            if (id(owner), entry.name) not in known:
                (buffers if entry.name in owner._buffers else attributes).append(entry.name)
        self._watched = [
            _Watched(weakref.ref(owner), Names.of(buffers), Names.of(attributes))
            for owner, buffers, attributes in names.values()
        ]

    def look(self) -> Look:
        """Note what is there, before a forward."""
        found = []
        for watched in self._watched:
            module = watched.module()
            if module is not None:
                values = watched.values(module)
                contents: Sequence[_Content] = ()
                if not SIMPLE.issuperset(map(type, values)):
                    contents = [
                        _content(index, value)
                        for index, value in enumerate(values)
                        if type(value) not in SIMPLE and isinstance(value, _WITH_CONTENT)
                    ]
                found.append(_Seen(module, watched, values, contents, _count(module)))
        outside = [
            (name, value, None if type(value) in SIMPLE else content_of(value))
            for name in self._outside
            if (value := outer(name)) is not NO_STATE
        ]
        return Look(found, outside)

    def copied_bytes(self) -> int:
        """Bytes of the tensors that a look copies."""
        values = [
            value
            for watched in self._watched
            if (module := watched.module()) is not None
            for value in watched.values(module)
            if type(value) not in SIMPLE and isinstance(value, torch.Tensor)
        ]
        return sum([value.nbytes for value in values if _is_copied(value)])

    def written_since(self, look: Look) -> Late:
        """What a forward wrote for the first time."""
        late = Late([], [], [])
        for name, value, content in look.outside:
            if outer(name) is not value or not same_content(value, content):
                late.written.append((None, name, value, content))
        for module, watched, values, contents, count in look.found:
            now = watched.values(module)
            if contents or not all(map(is_, now, values)):
                _compare(late, module, watched.names, values, now, contents)
            if _count(module) != count:
                late.grown.append(module)
        return late


def _compare(
    late: Late,
    module: nn.Module,
    names: Sequence[str],
    values: Sequence[Any],
    now: Sequence[Any],
    contents: Sequence[_Content],
) -> None:
    """Note what of one module was written."""
    content_at = {each.place: each for each in contents}
    for index, (name, value, other) in enumerate(zip(names, values, now, strict=True)):
        if other is value and index not in content_at:
            continue
        _, content, version = content_at.get(index, (index, None, 0))
        replaced = other is not value and not (isinstance(other, torch.Tensor) and other.requires_grad)
        if replaced or (content is not None and not same_content(value, content)):
            late.written.append((module, name, value, content))
        elif content is None and isinstance(value, torch.Tensor) and not _is_version(value, version):
            late.lost.append(f"{type(module).__name__}.{name} ({value.nbytes:,} bytes)")


def _content(index: int, value: Any) -> _Content:
    if not isinstance(value, torch.Tensor):
        return _Content(index, content_of(value), 0)
    if value.is_inference():
        return _Content(index, None, 0)
    return _Content(index, content_of(value) if _is_copied(value) else None, value._version)


def _is_copied(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and is_readable(tensor) and tensor.nbytes <= SMALL_BYTES


def _is_version(tensor: torch.Tensor, version: int) -> bool:
    return tensor.is_inference() or tensor._version == version


def _count(module: nn.Module) -> int:
    return len(module._buffers) + len(module.__dict__)


def _is_plain_layer(module: nn.Module) -> bool:
    """Torch's own layers write buffers, if anything; what is hooked to one may write more."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not (module._buffers or hooked) and type(module).__module__.startswith("torch.nn.modules.")
