"""Records which operations a step runs, on which storages, and when each storage dies."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        inputs: Storages it reads.
        outputs: Storages it makes.
        writes: Storages it changes that were there before.
        seconds: What it took.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Release:
    """The last reference to a storage goes away."""

    storage: int


@dataclass
class Trace:
    """One step, in order.

    Attributes:
        events: Operations and releases.
        sizes_bytes: Storage -> its bytes, of those that operations made.
    """

    events: list[Operation | Release] = field(default_factory=list)
    sizes_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time in operations."""
        return sum(event.seconds for event in self.events if isinstance(event, Operation))


class _Recorder(TorchDispatchMode):
    """Writes a trace while it is entered."""

    def __init__(self, trace: Trace, synchronize: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._synchronize = trace, synchronize
        self._numbers: dict[int, int] = {}  # address of the storage object -> its number, while it lives
        self._count = 0

    def _number(self, tensor: torch.Tensor, made: bool) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = self._count
            if made:
                self._trace.sizes_bytes[self._count] = storage.nbytes()
            weakref.finalize(storage, self._dies, key, self._count)
            self._count += 1
        return self._numbers[key]

    def _dies(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
            self._trace.events.append(Release(number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = dict.fromkeys(self._number(t, False) for t in tree_leaves((args, kwargs)) if _is_tensor(t))
        self._synchronize()
        began = time.perf_counter()
        out = func(*args, **kwargs)
        self._synchronize()
        seconds = time.perf_counter() - began
        results = dict.fromkeys(self._number(t, True) for t in tree_leaves(out) if _is_tensor(t))
        writes = tuple(number for number in results if number in inputs) if func._schema.is_mutable else ()
        made = tuple(number for number in results if number not in inputs)
        if made or writes:  # a view makes nothing
            self._trace.events.append(Operation(tuple(inputs), made, writes, seconds))
        return out


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def record(step: Callable[[], Any], synchronize: Callable[[], None] = lambda: None) -> Trace:
    """Run something and write down its operations; releases after it do not count."""
    trace = Trace()
    with _Recorder(trace, synchronize):
        step()
        events = list(trace.events)
    return Trace(events, trace.sizes_bytes)
