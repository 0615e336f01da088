"""Advice: where PyTorch leaves a choice of operators that would lower the peak. Told in the report, never taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.budget import format_bytes
from lightning_mimose.measure.cap import expands_segments
from lightning_mimose.measure.optimizers import works_in_groups
from lightning_mimose.predict.structure import Structure

WORTH_SHARE = 0.02
"""Advice that would lower the peak by less than this share of it is not given."""
FRAGMENTED_SHARE = 0.03
"""Share of the budget that the allocator may hold for nobody without advice."""
SCATTERED_SHARE = 0.5
"""Share of the planned steps that may miss their predictions before that is worth mentioning."""
_WITHOUT_SOFTMAX, _WITH_SOFTMAX = "lean+masks", "lean+attention"


def update_hint(
    optimizers: Sequence[Optimizer], transient_bytes: int, update_peak_bytes: int, step_peak_bytes: int
) -> str | None:
    """What to do about an update that is the step's peak.

    Args:
        optimizers: Those that update.
        transient_bytes: What an update holds besides its state.
        update_peak_bytes: Its peak, resident memory included.
        step_peak_bytes: That of forward and backward.

    Returns:
        Advice; None where there is nothing to choose, or nothing to gain.
    """
    gain = min(transient_bytes, update_peak_bytes - step_peak_bytes)
    if gain < WORTH_SHARE * update_peak_bytes:
        return None
    grouped = [type(each).__name__ for each in optimizers if any(works_in_groups(g) for g in each.param_groups)]
    if not grouped:
        return None
    return (
        f"The update of {grouped[0]} is the peak of the step ({format_bytes(update_peak_bytes)}), for it makes "
        f"temporaries of all parameters at once ({format_bytes(transient_bytes)}). With foreach=False, or fused=True "
        f"where the device has it, the peak would be up to {format_bytes(gain)} lower."
    )


def staying_hint(staying_bytes: int, count: int) -> str | None:
    """What to do about gradients that are made in every step and that nobody uses.

    Args:
        staying_bytes: What they take, in all steps.
        count: Of how many parameters they are.

    Returns:
        Advice; None where there are none.
    """
    if not count:
        return None
    return (
        f"{count} parameters are trained that no optimizer has: their gradients are never zeroed, and stay "
        f"({format_bytes(staying_bytes)} so far). With requires_grad_(False) from the start neither they nor what they "
        "are made from would take memory and time."
    )


def allocator_hint(fragmentation_bytes: int, budget_bytes: int) -> str | None:
    """What to do about an allocator that holds much beyond what tensors ask it for.

    Batches of many sizes leave parts of segments unused that fit no other tensor.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf

    Args:
        fragmentation_bytes: What that comes to in a step that fills the budget.
        budget_bytes: The budget.

    Returns:
        Advice; None where it is little, or where the advice was followed.
    """
    if fragmentation_bytes < FRAGMENTED_SHARE * budget_bytes or expands_segments():
        return None
    return (
        f"The device's allocator holds up to {format_bytes(fragmentation_bytes)} of the budget beyond what tensors ask "
        "it for, and plans leave that free. Started with PYTORCH_ALLOC_CONF=expandable_segments:True in the "
        "environment, it mostly holds less."
    )


def size_hint(steps: int, varying: Sequence[str]) -> str:
    """What to do about steps that are hardly ever known, for sizes have many dimensions or tell too little.

    Args:
        steps: How many sheltered ones were measured.
        varying: The dimensions that vary.

    Returns:
        Advice.
    """
    if len(varying) <= 2:
        return (
            f"{steps} steps and more ran sheltered, for batches of one size take other memory each time: chance "
            "decides, or something that no shape in the batch tells. If it can be told from the batch, name it: "
            "size_fn=lambda batch: {'longest': ..., 'real': ...}."
        )
    named = ", ".join(varying[:4]) + (", ..." if len(varying) > 4 else "")
    return (
        f"{steps} steps and more ran sheltered, for batches vary in {len(varying)} dimensions ({named}), and memory is "
        "hardly ever known for all of them together. If few numbers decide (the longest, the largest, the total), name "
        "those: size_fn=lambda batch: {'longest': ...}."
    )


def scatter_hint(missed: int, of: int) -> str | None:
    """What to do about steps that take other memory than batches of their sizes have taken.

    Args:
        missed: How many planned steps of late missed their predictions by more than 1 %.
        of: How many of late were measured.

    Returns:
        Advice; None where they are few.
    """
    if missed < SCATTERED_SHARE * of:
        return None
    return (
        f"{missed} of the last {of} planned steps that were measured took more than 1 % more or less than predicted: "
        "something decides that no shape in the batch tells (how many tokens are real, how wide the widest graph is). "
        "Plans keep room for it, and need not where it is named: size_fn=lambda batch: {'longest': ..., 'real': ...}."
    )


def attention_hint(model: nn.Module, structure: Structure, values: NDArray[np.float64]) -> str | None:
    """What to do about attention that keeps its probabilities because it was asked to be eager.

    Args:
        model: The model.
        structure: The shape of a measured step.
        values: Its columns.
    """
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    if not any(getattr(config, "_attn_implementation", None) == "eager" for config in configs):
        return None
    spared = {
        action: sum(float(values[shape.saved]) for shape in structure.lean if shape.action == action)
        for action in (_WITHOUT_SOFTMAX, _WITH_SOFTMAX)
    }
    gain = int(spared[_WITH_SOFTMAX] - spared[_WITHOUT_SOFTMAX])
    if gain < WORTH_SHARE * float(structure.summary(values[None])[0, 0]):
        return None
    return (
        f'Attention is "eager" and keeps its probabilities ({format_bytes(gain)} in a measured step). Made with '
        'attn_implementation="sdpa", the model keeps none of them wherever a memory-efficient kernel applies.'
    )
