"""Runs one step with units patched, and hands back what was recorded or alive; the engine has no part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_mimose.actions.caches import CacheSwitch
from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.patch import unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.gradients import GradientLedger
from lightning_mimose.measure.meters.profiler import ProfilerMeter
from lightning_mimose.measure.saved import resident_tensors
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.units import Unit, find_units

Loss = Callable[[nn.Module, Any], torch.Tensor]


def model_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a model returns."""
    return model(**batch).loss


@contextmanager
def patched(
    model: nn.Module, patterns: Sequence[str] | None = None, *, lean: bool = False
) -> Iterator[tuple[tuple[Unit, ...], Session]]:
    """The model's units, patched, and their session; surveyed for lean saves or not."""
    units, session, caches = find_units(model, patterns), Session(proves=False, lean=lean), CacheSwitch()
    caches.off(model)
    for unit in units:
        patch_unit(unit, session)
    try:
        yield units, session
    finally:
        session.disarm()
        for unit in units:
            unpatch(unit.module)
        caches.restore()


def shelter_of(units: Sequence[Unit]) -> dict[str, str]:
    """The plan of a step about which nothing is known."""
    return {unit.name: "recompute" for unit in units if unit.shelter}


def recorded(
    model: nn.Module,
    batch: Any,
    patterns: Sequence[str] | None = None,
    loss_fn: Loss = model_loss,
    *,
    lean: bool = False,
) -> StepTrace:
    """The trace of one sheltered step (forward, zeroed gradients, backward)."""
    with patched(model, patterns, lean=lean) as (units, session):
        gradients = GradientLedger([(p, p.numel() * p.element_size()) for p in model.parameters()], follow=True)
        recorder = StepRecorder(torch.device("cpu"), resident_tensors(model, batch), gradients)
        session.arm(shelter_of(units), recorder)
        recorder.start()
        try:
            loss = loss_fn(model, batch)
            model.zero_grad(set_to_none=True)
            gradients.begin_backward()
            recorder.begin_backward(loss)
            loss.backward()
            recorder.mark("step", "end")
        finally:
            trace = recorder.stop()
            gradients.close()
    return trace


def alive_before_backward(
    model: nn.Module,
    batch: Any,
    actions: Mapping[str, str],
    patterns: Sequence[str] | None = None,
    loss_fn: Loss = model_loss,
) -> int:
    """Live bytes that a forward under some actions leaves behind for backward, the loss included."""
    with patched(model, patterns) as (_, session):
        session.arm(actions, None)
        meter = ProfilerMeter()
        meter.start()
        loss = loss_fn(model, batch)
        meter.mark()
        del loss
        return meter.stop()[-1].level_bytes
