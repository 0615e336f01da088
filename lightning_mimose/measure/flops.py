"""Counts floating-point operations while it is entered, by torch's own registry of formulas."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from torch.utils.flop_counter import flop_registry

from lightning_mimose.measure.mode import ThreadedMode


class FlopTally(ThreadedMode):
    """Adds up the operations of everything that is dispatched.

    Attributes:
        total: Operations so far.
    """

    _local = threading.local()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def active(cls) -> FlopTally | None:
        """The tally that this thread has entered now, if any."""
        tally: FlopTally | None = getattr(cls._local, "current", None)
        return tally

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled: otherwise they run eagerly here, and save other tensors than in forward."""
        return True

    def __enter__(self) -> Any:
        FlopTally._local.current = self
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        FlopTally._local.current = None
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            # A formula that cannot read these arguments must not end a training.
            with suppress(Exception):
                self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out
