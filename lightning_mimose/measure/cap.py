"""The allocator's own limit: what makes a budget hard on an accelerator."""

from __future__ import annotations

import os
import weakref

import torch

from lightning_mimose.measure import counters

PAGE_BYTES = 20 << 20
"""What expandable segments grow by. The allocator looks at its limit before it rounds up to that, and so may end up
above it: by 3 MB of 578 in a training on an NVIDIA H100.
https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDACachingAllocator.cpp (`map_block`)
"""

_applied: list[weakref.ref[ReservedCap]] = []
"""Those in force, in the order in which they were set: each has found what the one before it on its device has set."""


def expands_segments() -> bool:
    """Whether the allocator was told by the environment to let its segments grow."""
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"  # in torch's order
    told = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return "expandable_segments:True" in told.replace(" ", "")


def barred_bytes(device: torch.device, budget_bytes: int) -> int:
    """What of a budget the allocator must not give out, so that what it reserves stays inside.

    Args:
        device: The device.
        budget_bytes: What may be reserved.

    Example:
        >>> barred_bytes(torch.device("cpu"), 1 << 30)
        0
    """
    return min(PAGE_BYTES, budget_bytes // 2) if device.type == "cuda" and expands_segments() else 0


class ReservedCap:
    """Caps what this process may reserve on a CUDA device, and gives the old limit back.

    With the cap a misprediction fails in this process, as an out-of-memory error, not in a neighbour's. Before it
    fails the allocator returns cached blocks and tries again. What it has cached beyond the budget when the cap is set
    is returned at once. Other devices have no such limit, and nothing is done.

    Args:
        device: The device.
        budget_bytes: What may be reserved.
        lasts: Whether it stays in steps that do not fit into it.
    """

    def __init__(self, device: torch.device, budget_bytes: int, *, lasts: bool = True) -> None:
        self._device, self._lasts = device, lasts
        self._limit_bytes = budget_bytes - barred_bytes(device, budget_bytes)
        self._before: float | None = None
        self._gave_way = False

    def apply(self) -> None:
        """Set the cap."""
        if self._device.type != "cuda":
            return
        # The getter came later than the setter; without it, no limit is what there was.
        current = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._before = float(current(self._device)) if current is not None else 1.0
        _applied.append(weakref.ref(self))
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total), self._device)
        if counters.read(self._device).reserved_bytes > self._limit_bytes:
            torch.cuda.empty_cache()

    @property
    def in_force(self) -> bool:
        """Whether it is set."""
        return self._before is not None

    @property
    def may_give_way(self) -> bool:
        """Whether `give_way` would do something."""
        return self.in_force and not self._lasts

    def give_way(self) -> bool:
        """A step does not fit into it: put the old limit back, if it may be, and say whether that was so."""
        gives_way = self.may_give_way
        if gives_way:
            self.restore()
            self._gave_way = True
        return gives_way

    def renew(self) -> None:
        """A step has fitted: set the cap again, if it gave way."""
        if self._gave_way:
            self._gave_way = False
            self.apply()

    def restore(self) -> None:
        """Put the old limit back, if `apply` changed it; where another has been set since, that one will."""
        self._gave_way = False
        if self._before is None:
            return
        before, self._before = self._before, None
        alive = [cap for ref in _applied if (cap := ref()) is not None]
        later = [cap for cap in alive[alive.index(self) + 1 :] if cap._device == self._device]
        _applied[:] = [weakref.ref(cap) for cap in alive if cap is not self]
        if later:
            later[0]._before = before
        else:
            torch.cuda.set_per_process_memory_fraction(before, self._device)
