"""What else lies on an accelerator: what libraries take and keep, metrics, averaged weights, another model."""

from __future__ import annotations

import torch

from lightning_mimose.measure import counters

GRAIN_BYTES = 1 << 20
"""Rounded up to a multiple of it, so that a few numbers more that are logged make no plan another."""
LOWER_STEPS = 50
"""Steps in a row with less before less is counted on: what comes and goes is there in some of them."""


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
    """Counts that at the start of every step: a little more than there is, and no less than a short while ago.

    Args:
        device: Where training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known_bytes = self._lately_bytes = self._lower = 0

    def count(self, resident_bytes: int) -> int:
        """What to reckon with, see `bytes_beside`."""
        now = -(-bytes_beside(self._device, resident_bytes) // GRAIN_BYTES) * GRAIN_BYTES
        self._lately_bytes, self._lower = max(self._lately_bytes, now), self._lower + 1
        if now >= self._known_bytes or self._lower >= LOWER_STEPS:
            self._known_bytes, self._lately_bytes, self._lower = max(now, self._lately_bytes), 0, 0
        return self._known_bytes


def take_workspaces(device: torch.device) -> None:
    """Have cuBLAS take its workspaces now, not in the midst of the first step that is measured.

    It takes one for every thread and stream with its first product, and keeps it: 8 to 32 MiB for the thread that runs
    the forward, and as much for autograd's own.
    https://docs.nvidia.com/cuda/cublas/#cublassetworkspace
    """
    if not counters.exist(device):
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        one = torch.ones(8, 8, device=device, requires_grad=True)
        (one @ one).sum().backward()
