"""What else lies on an accelerator: what libraries take and keep, metrics, averaged weights, another model."""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

from lightning_mimose.measure import counters
from lightning_mimose.measure.cap import barred_bytes

GRAIN_SHARE = 1 / 512
"""Share of the budget to a multiple of which it is rounded up, so that what comes and goes makes no plan another."""


def bytes_beside(device: torch.device, resident_bytes: int) -> int:
    """What is on a device besides; on CPU, where nobody counts what a process has, nothing.

    Args:
        device: Where training runs.
        resident_bytes: What is known: parameters, buffers, gradients, optimizer state, the batch.

    Example:
        >>> bytes_beside(torch.device("cpu"), 1000)
        0
    """
    return max(0, counters.read(device).requested_bytes - resident_bytes) if counters.exist(device) else 0


class Others:
    """Counts that at the start of every step, and what the allocator must not give out.

    Args:
        device: Where training runs.
        budget_bytes: The budget.

    Attributes:
        barred_bytes: What the allocator must not give out.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device, self._grain_bytes = device, max(1, int(GRAIN_SHARE * budget_bytes))
        self._known_bytes, self.barred_bytes = 0, barred_bytes(device, budget_bytes)

    def count(self, resident_bytes: int) -> tuple[int, int]:
        """What there is besides, and what to reckon with: up to two grains more, the same for as long as it will do."""
        now = bytes_beside(self._device, resident_bytes) + self.barred_bytes
        if not now <= self._known_bytes < now + 2 * self._grain_bytes:
            self._known_bytes = -(-now // self._grain_bytes) * self._grain_bytes
        return now, self._known_bytes


def take_workspaces(device: torch.device) -> None:
    """Have cuBLAS take its workspaces now, not in the midst of the first step that is measured.

    It takes one for every thread and stream with its first product, and keeps it: 8 to 32 MiB for the thread that runs
    the forward, and as much for autograd's own.
    https://docs.nvidia.com/cuda/cublas/#cublassetworkspace
    """
    if not counters.exist(device):
        return
    # Torch complains where it is to be deterministic and was not set up for it; the model may have no products at all.
    with (
        suppress(RuntimeError),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        warnings.simplefilter("ignore")
        one = torch.ones(8, 8, device=device, requires_grad=True)
        (one @ one).sum().backward()
