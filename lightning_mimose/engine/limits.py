"""What a training may take, before anything is known of its steps: which device, how much of it and of the host."""

from __future__ import annotations

import os
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_mimose.budget import DeviceMemory, device_memory, parse_budget
from lightning_mimose.errors import UnsupportedError
from lightning_mimose.measure import counters
from lightning_mimose.measure.meter import has_memory_counters
from lightning_mimose.measure.resident import ResidentLedger
from lightning_mimose.shared.budget import SHARED_BUDGETS, AnyBudget


def refuse_lazy(model: nn.Module) -> None:
    """See whether all that is resident has a size.

    Raises:
        UnsupportedError: The model has parameters or buffers that are made in its first forward.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has lazy modules, whose tensors ({lazy!r}, for one) have no size before the "
            "first forward: run it on one batch before training begins (under torch.no_grad(), in setup() say)."
        )


def device_of(model: nn.Module, device: torch.device | None) -> torch.device:
    """Where the steps of a model run.

    Args:
        model: The model.
        device: The device that was named; None asks the model's parameters.

    Example:
        >>> device_of(nn.Linear(2, 2), None)
        device(type='cpu')
    """
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    if device == torch.accelerator.current_accelerator():  # which has no index: the current one is meant
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


def device_bytes(budget: AnyBudget, device: torch.device, memory: DeviceMemory, ledger: ResidentLedger) -> int:
    """A budget in bytes.

    Args:
        budget: What was asked for.
        device: Where the steps run.
        memory: What that has.
        ledger: What the model has there already, as far as no allocator counts it.

    Raises:
        BudgetError: It cannot be understood, or exceeds the device.
        UnsupportedError: The device's memory cannot be read.
    """
    if not has_memory_counters(device):
        raise UnsupportedError(
            f"The allocator of {device} has no memory counters that torch {torch.__version__} can read. Train "
            "with torch's own allocator on cuda, or on cpu."
        )
    if isinstance(budget, SHARED_BUDGETS):
        return budget.resolve(device)
    return parse_budget(budget).resolve(memory, held_bytes=_held_bytes(device, ledger))


def host_bytes(host_budget: str | int | float | None) -> int:
    """How much host memory offloading may take.

    Args:
        host_budget: What was asked for; None for half of what is free.

    Raises:
        BudgetError: It cannot be understood, or exceeds the machine.
    """
    memory = device_memory(torch.device("cpu"))
    if host_budget is not None:
        return parse_budget(host_budget).resolve(memory)
    return memory.free_bytes // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # every rank takes its own


def _held_bytes(device: torch.device, ledger: ResidentLedger) -> int:
    if counters.exist(device):
        return counters.read(device).reserved_bytes
    return ledger.lasting_bytes() + ledger.gradient_bytes
