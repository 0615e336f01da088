"""What both doors are asked for, checked before anything is touched."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.budget import parse_budget
from lightning_mimose.errors import BudgetError, LossError, MimoseError
from lightning_mimose.measure.optimizers import optimized


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check an argument that is one of a few names.

    Raises:
        MimoseError: It is none of them.

    Example:
        >>> check_choice("on_oom", "retry", ("retry", "raise"))
    """
    if value not in allowed:
        raise MimoseError(f"{name}={value!r} was asked for; it is one of {', '.join(map(repr, allowed))}.")


def check_choices(on_infeasible: object, on_oom: object) -> None:
    """Check what to do where a budget cannot be kept, and where the device runs out all the same.

    Raises:
        MimoseError: One of them is none of the names there are.

    Example:
        >>> check_choices("raise", "retry")
    """
    check_choice("on_infeasible", on_infeasible, ("raise", "warn"))
    check_choice("on_oom", on_oom, ("retry", "raise"))


def check_host_budget(host_budget: Any) -> None:
    """Check how much host memory offloading may take, also where nothing is offloaded.

    Raises:
        BudgetError: It is nothing that a budget is written as.

    Example:
        >>> check_host_budget("16GB")
    """
    if host_budget is None:
        return
    try:
        parse_budget(host_budget)
    except BudgetError as error:
        raise BudgetError(
            f"host_budget={host_budget!r} was asked for, which is written as budget is: {error}"
        ) from None


def check_functions(loss_fn: object, backward_fn: object, update_fn: object) -> None:
    """Check what a step is made of.

    Raises:
        MimoseError: One of them cannot be called, or the loss is one of torch's, which know of no model.

    Example:
        >>> check_functions(lambda model, batch: model(batch).mean(), None, None)
    """
    for name, given in (("loss_fn", loss_fn), ("backward_fn", backward_fn), ("update_fn", update_fn)):
        if given is not None and not callable(given):
            raise MimoseError(f"{name}={given!r} was asked for; it is a function, or left out.")
    if isinstance(loss_fn, type) or type(loss_fn).__module__ == "torch.nn.modules.loss":
        name = loss_fn.__name__ if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise MimoseError(
            f"loss_fn is {name}, but it is called with the model and the batch, and returns the loss: say, "
            f"criterion = {name}(); loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])."
        )


def checked_optimizers(given: Any, update_fn: object, model: nn.Module) -> tuple[Optimizer, ...]:
    """Check what is to update a model.

    Args:
        given: An optimizer, several, or None.
        update_fn: What updates with them, if it is not they themselves.
        model: The model.

    Returns:
        The optimizers.

    Raises:
        MimoseError: It is no optimizer, or one is missing; or the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise MimoseError(f"model is a {type(model).__name__}; it is the torch.nn.Module that is trained.")
    if isinstance(given, Sequence) and not given:
        raise MimoseError("optimizer is empty; name those that update the model, or leave it out to update after step.")
    optimizers = tuple(given) if isinstance(given, Sequence) else () if given is None else (given,)
    for optimizer in optimizers:
        if isinstance(optimizer, type):
            raise MimoseError(
                f"optimizer is the class {optimizer.__name__}; call it with the model's parameters, as "
                f"optimizer={optimizer.__name__}(model.parameters(), lr=1e-3)."
            )
        missing = [name for name in ("step", "zero_grad", "param_groups", "state") if not hasattr(optimizer, name)]
        if missing:  # wrappers need not be of torch's class
            raise MimoseError(
                f"optimizer is a {type(optimizer).__name__}, which has no {', no '.join(missing)}; it is one "
                "torch.optim.Optimizer, or a list of them."
            )
    if not optimizers:
        if update_fn is not None:
            raise MimoseError(
                "update_fn was given without an optimizer. Name the one that it steps as optimizer=..., too: its state "
                "is memory that the budget has to hold."
            )
        return optimizers
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    updated = set(map(id, optimized(*optimizers)))
    if trained and not trained & updated:
        warnings.warn(
            f"mimose: none of the {len(updated)} parameters that the optimizer updates is one of the model's "
            f"{len(trained)} trained ones, so the model will not be trained, unless it keeps copies of them. Was it "
            "made for another model?",
            stacklevel=3,
        )
    return optimizers


def check_loss(loss: object) -> torch.Tensor:
    """Check what `loss_fn` returned.

    Raises:
        LossError: It is no tensor of one number with gradients.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(
            f"loss_fn returned a {type(loss).__name__}; it has to return the loss, a tensor of one number, with its "
            "graph (no .item(), no dict)."
        )
    if loss.numel() != 1:
        raise LossError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; the loss is one number: take its mean or its sum."
        )
    if not loss.requires_grad:
        raise LossError(
            "loss_fn returned a loss without gradients: it was computed under torch.no_grad(), detached, or every "
            "parameter is frozen."
        )
    return loss
