"""How fast things go from the device to host memory and back: measured once, before training."""

from __future__ import annotations

import time

import torch

from lightning_mimose.predict.assemble import Link

COPY_BYTES = 1 << 25
REPEATS = 3


def measure_link(device: torch.device, host_bytes: int) -> Link:
    """Copy some memory to the host and back.

    Args:
        device: Where training runs.
        host_bytes: What the host has room for.

    Returns:
        The link; the slower direction and the fastest of some copies decide.
    """
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    times = [max(seconds(there, here), seconds(here, there)) for _ in range(REPEATS)]
    return Link(COPY_BYTES / max(min(times), 1e-9), host_bytes, frees=device.type != "cpu")
