"""A job's random generators: put aside when another job's turn comes, put back when its own does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Generators:
    """The state of every generator that a training draws from: torch's, the device's, Python's and NumPy's.

    Example:
        >>> device = torch.device("cpu")
        >>> before = Generators.now(device)
        >>> first = torch.rand(3)
        >>> before.restore(device)
        >>> bool((torch.rand(3) == first).all())
        True
    """

    host: bytes
    accelerator: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """The present state; on CUDA it is kept on the host, so nothing is waited for."""
        # As bytes: a tensor would be measured as something that a step holds.
        host = torch.get_rng_state().numpy().tobytes()
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(host, accelerator, random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        """Put this state in force."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.host), dtype=torch.uint8))
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
