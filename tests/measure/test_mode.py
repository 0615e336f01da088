"""Dispatch modes in several threads."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch

from lightning_mimose.measure.mode import ThreadedMode


class Doubles(ThreadedMode):
    """Doubles what `torch.ones` returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func.overloadpacket is torch.ops.aten.ones else out


def test_threads_that_overlap_leave_no_trace() -> None:
    """The first to enter is the first to leave: with torch's own modes the flags would stay set."""
    before = dispatch.is_in_torch_dispatch_mode()
    entered, left = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        with Doubles():
            entered.set()
            left.wait(10)
            seen.extend([dispatch.is_in_torch_dispatch_mode(), torch.ones(1).item()])

    thread = threading.Thread(target=other)
    with Doubles():
        thread.start()
        entered.wait(10)
        assert torch.ones(1).item() == 2
    left.set()
    thread.join()
    assert seen == [True, 2]
    assert dispatch.is_in_torch_dispatch_mode() == before
    assert torch.ones(1).item() == 1
