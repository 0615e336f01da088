"""An accelerator played on the CPU: a caching allocator like CUDA's that serves every storage an operator makes.

Blocks are rounded up, taken from segments, split, merged and cached as in
https://github.com/pytorch/pytorch/blob/v2.8.0/c10/cuda/CUDACachingAllocator.cpp, with all sizes divided by `SCALE`.
A library takes a workspace with its first product and keeps it. Only what kernels use inside is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.counters import Counters
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.parts import storages_in

SCALE = 32
_MIB = (1 << 20) // SCALE
GRANULE, SMALL = 512 // SCALE, _MIB
WORKSPACE_BYTES = 8 * _MIB
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    segment: list[Block]
    size: int
    requested: int = 0
    free: bool = True


def _up(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule


class CachingAllocator:
    """Gives out blocks, and counts.

    Args:
        fragments: Whether there are segments at all; expandable ones leave no gaps that nothing fits into.

    Attributes:
        limit_bytes: What may be reserved.
        highest_bytes: The most that was requested since `watch`, whoever resets peaks meanwhile.
        most_reserved_bytes: The same of what was reserved.
    """

    def __init__(self, *, fragments: bool = True) -> None:
        self.limit_bytes: int | None = None
        self._fragments = fragments
        self._pools: tuple[list[list[Block]], list[list[Block]]] = ([], [])
        self._requested = self._allocated = self._reserved = 0
        self.reset_peaks()
        self.watch()

    def watch(self) -> None:
        self.highest_bytes, self.most_reserved_bytes = self._requested, self._reserved

    def reset_peaks(self) -> None:
        self._requested_peak, self._allocated_peak = self._requested, self._allocated
        self._reserved_peak = self._reserved

    def take(self, nbytes: int) -> Block:
        size = max(GRANULE, _up(nbytes, GRANULE))
        if not self._fragments:
            return self._give(Block([], size), nbytes)
        small = size <= SMALL
        pool = self._pools[not small]
        fitting = [block for segment in pool for block in segment if block.free and block.size >= size]
        block = min(fitting, key=lambda each: each.size, default=None) or self._new(size, pool, small=small)
        rest = block.size - size
        if rest >= (GRANULE if small else SMALL + 1):
            at = block.segment.index(block)
            block.segment.insert(at + 1, Block(block.segment, rest))
            block.size = size
        return self._give(block, nbytes)

    def _give(self, block: Block, nbytes: int) -> Block:
        block.free, block.requested = False, nbytes
        if not block.segment:
            self._reserve(max(0, self._allocated + block.size - self._reserved))
        self._requested += nbytes
        self._allocated += block.size
        self._requested_peak = max(self._requested_peak, self._requested)
        self._allocated_peak = max(self._allocated_peak, self._allocated)
        self.highest_bytes = max(self.highest_bytes, self._requested)
        return block

    def _new(self, size: int, pool: list[list[Block]], *, small: bool) -> Block:
        whole = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else _up(size, 2 * _MIB)
        self._reserve(whole)
        segment: list[Block] = []
        segment.append(Block(segment, whole))
        pool.append(segment)
        return segment[0]

    def _reserve(self, nbytes: int) -> None:
        if self.limit_bytes is not None and self._reserved + nbytes > self.limit_bytes:
            self.empty()
            if self._reserved + nbytes > self.limit_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to reserve {nbytes} bytes.")
        self._reserved += nbytes
        self._reserved_peak = max(self._reserved_peak, self._reserved)
        self.most_reserved_bytes = max(self.most_reserved_bytes, self._reserved)

    def empty(self) -> None:
        """Give back what nothing lies in."""
        for pool in self._pools:
            for segment in [each for each in pool if len(each) == 1 and each[0].free]:
                pool.remove(segment)
                self._reserved -= segment[0].size

    def give_back(self, block: Block) -> None:
        self._requested -= block.requested
        self._allocated -= block.size
        block.free = True
        segment = block.segment
        if not segment:
            return
        at = segment.index(block)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(segment) and segment[neighbour].free:
                block.size += segment.pop(neighbour).size
        block.requested = 0

    def read(self) -> Counters:
        split = [segment for pool in self._pools for segment in pool if len(segment) > 1]
        unused = sum(block.size for segment in split for block in segment if block.free)
        return Counters(
            self._requested,
            self._requested_peak,
            max(self._allocated_peak, self._allocated + unused),
            self._reserved,
            self._reserved_peak,
        )


class Accelerator(ThreadedMode):
    """The mode in which a training runs on it. Everything the training has must be made in it.

    Attributes:
        allocator: Its allocator.
        scratch_bytes: What a kernel takes while it runs: (operator, its arguments) -> bytes.
    """

    def __init__(self, *, fragments: bool = True) -> None:
        super().__init__()
        self.scratch_bytes: Callable[[Any, Any], int] = lambda func, args: 0
        self.allocator = CachingAllocator(fragments=fragments)
        self._known: dict[int, Block] = {}
        self._workspace: Block | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._workspace is None and func.overloadpacket in _PRODUCTS:
            self._workspace = self.allocator.take(WORKSPACE_BYTES)
        out = func(*args, **(kwargs or {}))
        if scratch_bytes := self.scratch_bytes(func, args):
            self.allocator.give_back(self.allocator.take(scratch_bytes))
        given = {storage._cdata for storage in storages_in((args, kwargs))}
        for storage in storages_in(out):
            key = storage._cdata
            if key not in given and key not in self._known and storage.nbytes():
                self._known[key] = self.allocator.take(storage.nbytes())
                weakref.finalize(storage, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.allocator.give_back(self._known.pop(key))


class Event:
    """A point of a stream, that is reached when somebody waits for it."""

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert enable_timing
        self._at: float | None = None
        self._reached = False

    def record(self, stream: None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        self._reached = self._at is not None
        return self._reached

    def synchronize(self) -> None:
        self._reached = self._at is not None

    def elapsed_time(self, end: Event) -> float:
        assert end._reached, "nobody has waited for it"
        assert self._at is not None
        assert end._at is not None
        return (end._at - self._at) * 1e3


def play(monkeypatch: pytest.MonkeyPatch, *, fragments: bool = True) -> Accelerator:
    """Have the package take the CPU for an accelerator."""
    accelerator = Accelerator(fragments=fragments)
    monkeypatch.setattr(counters, "exist", lambda device: True)
    monkeypatch.setattr(counters, "read", lambda device: accelerator.allocator.read())
    monkeypatch.setattr(counters, "reset_peaks", lambda device: accelerator.allocator.reset_peaks())
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    return accelerator
