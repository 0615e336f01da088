"""Dynamic tensor rematerialization (arXiv 2006.09616), simulated on a recorded step.

The real one is a patched PyTorch. The simulation follows the paper's: whenever an operation needs room, the storage
with the lowest h = (its cost + the cost of its evicted neighbourhood) / (bytes x staleness) is evicted; what is needed
again is made again, with whatever that needs in turn. Operations and seconds are those of the recorded plain step.

Left out, in its favour: the search for what to evict, which the paper's own logs put above the recomputation itself,
and scratch memory inside kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_mimose.bench.trace import Operation, Trace


@dataclass(frozen=True)
class Simulated:
    """What a step would have been.

    Attributes:
        fits: Whether it could be run at all.
        peak_bytes: Highest sum of live storages that the step made.
        added_seconds: Time in operations that ran again.
        evictions: How often something was evicted.
    """

    fits: bool
    peak_bytes: int
    added_seconds: float
    evictions: int


class _NoRoomError(Exception):
    """Nothing is left to evict."""


def simulate(trace: Trace, budget_bytes: int) -> Simulated:
    """Run a trace under a budget.

    Args:
        trace: What the plain step does.
        budget_bytes: For the storages that the step makes; what was there before is outside.

    Example:
        >>> from lightning_mimose.bench.trace import Release
        >>> events = [Operation((), (0,), (), 1.0), Operation((0,), (1,), (), 1.0), Operation((1,), (2,), (), 1.0),
        ...           Operation((0, 2), (3,), (), 1.0), Release(0), Release(1), Release(2)]
        >>> simulate(Trace(events, {0: 10, 1: 10, 2: 10, 3: 10}), 40)
        Simulated(fits=True, peak_bytes=40, added_seconds=0.0, evictions=0)
        >>> simulate(Trace(events, {0: 10, 1: 10, 2: 10, 3: 10}), 20).fits
        False
    """
    machine = _Machine(trace.sizes_bytes, budget_bytes)
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(max(depth, 20_000))  # what is needed again needs others, a chain as long as the step
    try:
        for event in trace.events:
            if isinstance(event, Operation):
                machine.run(event)
            else:
                machine.release(event.storage)
        machine.finish()
    except _NoRoomError:
        return Simulated(False, machine.peak_bytes, machine.added_seconds, machine.evictions)
    finally:
        sys.setrecursionlimit(depth)
    return Simulated(True, machine.peak_bytes, machine.added_seconds, machine.evictions)


class _Machine:
    """Memory with a budget: what is in it, how to make what is not, and when each was used."""

    def __init__(self, sizes_bytes: dict[int, int], budget_bytes: int) -> None:
        self._sizes, self._budget = sizes_bytes, budget_bytes
        self._live: set[int] = set()
        self._released: set[int] = set()
        self._makers: dict[int, list[Operation]] = {}
        self._users: dict[int, list[int]] = {}
        self._used_at: dict[int, float] = {}
        self._locked: dict[int, int] = {}
        self._clock = 0.0
        self._bytes = 0
        self.peak_bytes, self.added_seconds, self.evictions = 0, 0.0, 0

    def run(self, operation: Operation) -> None:
        """An operation of the step itself."""
        self._execute(operation)
        for storage in (*operation.outputs, *operation.writes):
            if storage in self._sizes:
                self._makers.setdefault(storage, []).append(operation)
                for source in operation.inputs:
                    if source in self._sizes and source != storage:
                        self._users.setdefault(source, []).append(storage)

    def release(self, storage: int) -> None:
        """The step will not ask for it again; it may still be needed to make others, so it is only evicted."""
        if storage in self._sizes:
            self._released.add(storage)
            if storage in self._live:
                self._drop(storage)

    def finish(self) -> None:
        """What outlives the step (its gradients) must be there, all of it at once."""
        self._need(storage for storage in self._makers if storage not in self._released)

    def _execute(self, operation: Operation) -> None:
        needed = tuple(s for s in operation.inputs if s in self._sizes)
        self._need(needed)
        self._allocate(operation.outputs)
        self._clock += operation.seconds
        for storage in (*needed, *operation.outputs):
            self._used_at[storage] = self._clock
        self._unlock((*needed, *operation.outputs))
        for storage in needed:  # made again only for this
            if storage in self._released and storage in self._live and storage not in self._locked:
                self._drop(storage)

    def _need(self, storages: Iterable[int]) -> None:
        """Lock storages in memory, making those again that are not there."""
        storages = tuple(storages)
        for storage in storages:
            self._locked[storage] = self._locked.get(storage, 0) + 1
        for storage in storages:
            if storage not in self._live:
                self._make_again(storage)

    def _make_again(self, storage: int) -> None:
        for index, maker in enumerate(self._makers[storage]):
            sources = tuple(s for s in maker.inputs if s in self._sizes and s != storage)
            self._need(sources)
            if index == 0:
                self._allocate((storage,), lock=False)
            self._clock += maker.seconds
            self.added_seconds += maker.seconds
            self._unlock(sources)
            for source in sources:
                self._used_at[source] = self._clock
                if source in self._released and source in self._live and source not in self._locked:
                    self._drop(source)
        self._used_at[storage] = self._clock

    def _allocate(self, storages: Iterable[int], lock: bool = True) -> None:
        for storage in storages:
            if lock:
                self._locked[storage] = self._locked.get(storage, 0) + 1
            if storage in self._live:
                continue
            while self._bytes + self._sizes[storage] > self._budget:
                self._evict()
            self._live.add(storage)
            self._bytes += self._sizes[storage]
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _unlock(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._locked[storage] -= 1
            if not self._locked[storage]:
                del self._locked[storage]

    def _evict(self) -> None:
        candidates = [s for s in self._live if s not in self._locked and self._sizes[s] and s in self._makers]
        if not candidates:
            raise _NoRoomError
        self._drop(min(candidates, key=lambda storage: (self._score(storage), storage)))
        self.evictions += 1

    def _drop(self, storage: int) -> None:
        self._live.discard(storage)
        self._bytes -= self._sizes[storage]

    def _score(self, storage: int) -> float:
        """The paper's h_DTR."""
        staleness = self._clock - self._used_at.get(storage, 0.0)
        cost = self._cost(storage) + sum(map(self._cost, self._evicted_around(storage)))
        return cost / (self._sizes[storage] * max(staleness, 1e-9))

    def _cost(self, storage: int) -> float:
        return sum(maker.seconds for maker in self._makers[storage])

    def _evicted_around(self, storage: int) -> set[int]:
        """What must be made again before it, and what would then have to be made from it again."""
        found: set[int] = set()
        for sources in (True, False):
            pending, seen = [storage], {storage}
            while pending:
                at = pending.pop()
                near = [i for maker in self._makers[at] for i in maker.inputs] if sources else self._users.get(at, [])
                for other in near:
                    if other in self._makers and other not in self._live and other not in seen:
                        seen.add(other)
                        pending.append(other)
            found |= seen
        found.discard(storage)
        return found
