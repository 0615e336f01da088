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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_mimose.actions.contents import content_of, is_readable, same_content

if TYPE_CHECKING:
    from lightning_mimose.actions.state import Entry, Place

SMALL_BYTES = 1 << 16
"""Tensors up to here are copied before a forward that may write them for the first time."""

_CONTAINERS = (list, dict, set, deque)


class _Watched(NamedTuple):
    """Names in one module under which nothing was written yet."""

    module: weakref.ref[nn.Module]
    buffers: tuple[str, ...]
    attributes: tuple[str, ...]


class Look(NamedTuple):
    """What was found before a forward.

    Attributes:
        found: (owner, name, object, copy of its content or None, version).
        counts: (owner, how many names it had).
    """

    found: list[tuple[nn.Module, str, Any, Any, int]]
    counts: list[tuple[nn.Module, int]]


class Late(NamedTuple):
    """What a forward wrote for the first time.

    Attributes:
        written: (owner, name, object, content) as they were before it.
        grown: Modules that have new names.
        lost: What cannot be put back, readable.
    """

    written: list[tuple[nn.Module, str, Any, Any]]
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
        names: dict[int, tuple[nn.Module, list[str], list[str]]] = {}
        for entry in state:
            owner = entry.owner
            if owner is None or _is_plain_layer(owner):
                continue
            _, buffers, attributes = names.setdefault(id(owner), (owner, [], []))
            if (id(owner), entry.name) not in known:
                (buffers if entry.name in owner._buffers else attributes).append(entry.name)
        self._watched = [_Watched(weakref.ref(owner), tuple(b), tuple(a)) for owner, b, a in names.values()]

    def look(self) -> Look:
        """Note what is there, before a forward."""
        found: list[tuple[nn.Module, str, Any, Any, int]] = []
        counts = []
        for ref, buffers, attributes in self._watched:
            module = ref()
            if module is not None:
                held, inside = module._buffers, vars(module)
                found += [_note(module, name, held.get(name)) for name in buffers]
                found += [_note(module, name, inside.get(name)) for name in attributes]
                counts.append((module, len(held) + len(inside)))
        return Look(found, counts)

    def written_since(self, look: Look) -> Late:
        """What a forward wrote for the first time."""
        late = Late([], [], [])
        for module, name, value, content, version in look.found:
            now = module._buffers[name] if name in module._buffers else vars(module).get(name)
            replaced = now is not value and not (isinstance(now, torch.Tensor) and now.requires_grad)
            if replaced or (content is not None and not same_content(value, content)):
                late.written.append((module, name, value, content))
            elif content is None and isinstance(value, torch.Tensor) and value._version != version:
                late.lost.append(f"{type(module).__name__}.{name} ({value.nbytes:,} bytes)")
        late.grown.extend(m for m, count in look.counts if len(m._buffers) + len(vars(m)) != count)
        return late


def _note(module: nn.Module, name: str, value: Any) -> tuple[nn.Module, str, Any, Any, int]:
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            return module, name, value, None, 0
        small = is_readable(value) and value.nbytes <= SMALL_BYTES
        return module, name, value, content_of(value) if small else None, value._version
    return module, name, value, content_of(value) if isinstance(value, _CONTAINERS) else None, 0


def _is_plain_layer(module: nn.Module) -> bool:
    """Torch's own layers write buffers, if anything."""
    return not module._buffers and type(module).__module__.startswith("torch.nn.modules.")
