"""Doing nothing, and keeping what is saved in host memory."""

from __future__ import annotations

from functools import partial

from torch.autograd.graph import save_on_cpu

from lightning_mimose.bench.runner import Case, Runner


def plain(case: Case) -> Runner:
    """Everything is kept."""
    return Runner(case)


def on_cpu(case: Case) -> Runner:
    """`torch.autograd.graph.save_on_cpu`: every saved tensor is copied to host memory and back.

    With `pin_memory` it copies on a CPU, too, into memory that is not pinned; without it would do nothing there.
    """
    notes = ["On a CPU it copies into the same memory: it pays for its copies, and spares nothing."]
    return Runner(case, around=partial(save_on_cpu, pin_memory=True), notes=notes if case.device.type == "cpu" else ())
