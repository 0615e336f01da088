"""Calls of units inside what others have put around them: a checkpoint, saved-tensor hooks, a functional transform."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.session import Session


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward in it is a region's (or a checkpoint of the user's) once more."""
    return torch._C._current_graph_task_id() != -1


def out_of_reach(name: str, session: Session) -> bool:
    """Whether a call is no business of the plan's: it is in somebody else's transform, region or recomputation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True  # torch.func refuses saved-tensor hooks
    if in_backward():
        return True  # such a forward must save what it saved before
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return True  # torch.autograd.graph.disable_saved_tensors_hooks
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or isinstance(getattr(hooks[0], "__self__", None), LeanSaves):
        return False  # ours, around a unit that is given what another one has returned
    if not session.foreign:
        session.foreign = True
        warnings.warn(_whose(name, hooks[0]), stacklevel=2)
    return True


def _whose(name: str, pack: Any) -> str:
    if getattr(pack, "__qualname__", "").startswith("_checkpoint_hook"):
        return (
            f"Unit {name!r} is called inside a torch.utils.checkpoint region of your own, so it is recomputed "
            "whatever the plan says. Remove that checkpoint to let the budget decide."
        )
    # They may change what they are given (offload it, compress it), and a recomputation would pass them by.
    return (
        f"Unit {name!r} is called inside saved-tensor hooks of your own (torch.autograd.graph.save_on_cpu or "
        "saved_tensors_hooks): they decide what is kept, so it is not recomputed. Remove them to let the budget decide."
    )
