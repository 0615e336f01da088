"""What every patched unit consults when it is called: is the engine armed, and what is this unit to do?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_mimose.actions.patch import Handler, patch
from lightning_mimose.actions.recompute import RegionObserver, can_recompute, recompute
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.units import Unit


@dataclass
class Session:
    """The state of the step that is running, shared by the units of one model.

    Attributes:
        armed: Whether a step is under way; otherwise every unit runs its own forward.
        actions: Unit name -> action, for this step.
        recorder: Records the units' calls, in the steps that learn.
        inside: Depth of regions whose forward is running; nested units then do as their own forward says.
        foreign: Whether units were seen inside somebody else's checkpoint.
    """

    armed: bool = False
    actions: Mapping[str, str] = field(default_factory=dict)
    recorder: StepRecorder | None = None
    inside: int = 0
    foreign: bool = False

    def arm(self, actions: Mapping[str, str], recorder: StepRecorder | None) -> None:
        """Put a plan in force until `disarm`; a step that keeps everything and records nothing needs no arming."""
        self.actions, self.recorder, self.inside = actions, recorder, 0
        self.armed = bool(actions) or recorder is not None

    def disarm(self) -> None:
        """Let every unit run its own forward again."""
        self.armed, self.recorder, self.inside = False, None, 0


def patch_unit(unit: Unit, session: Session) -> None:
    """Make a unit do what the session says whenever its forward is called."""
    name, state = unit.name, WrittenState(unit.module)

    def make(original: Callable[..., Any]) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Gated on gradients, never on `.training`: a frozen or eval block whose input needs gradients
            # saves as much as any.
            if not session.armed or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            recorder = session.recorder
            if not session.inside and not (recorder is not None and recorder.replaying):
                if _out_of_reach(name, session):
                    return original(*args, **kwargs)
                if session.actions.get(name) == "recompute" and can_recompute(args, kwargs):
                    return _recomputed(name, original, args, kwargs, state, session)
            return recorder.run_kept(name, original, args, kwargs) if recorder else original(*args, **kwargs)

        return handle

    patch(unit.module, make)


def _recomputed(
    name: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    session: Session,
) -> Any:
    recorder = session.recorder
    region = recorder.region(name, args, kwargs) if recorder is not None else None
    observer: RegionObserver | None = region
    out: Any = None
    session.inside += 1
    try:
        out = recompute(original, args, kwargs, state, observer)
    finally:
        session.inside -= 1
        if region is not None:
            region.close(out)
    return out


def _out_of_reach(name: str, session: Session) -> bool:
    """Whether a call is no business of the plan's: it is in somebody else's transform, region or recomputation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True  # torch.func refuses saved-tensor hooks
    if torch._C._current_graph_task_id() != -1:
        return True  # a forward inside a backward pass runs a region again, which must save what it saved before
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook"):
        return False
    if not session.foreign:
        session.foreign = True
        warnings.warn(
            f"Unit {name!r} is called inside a torch.utils.checkpoint region of your own, so it is recomputed "
            "whatever the plan says. Remove that checkpoint to let the budget decide.",
            stacklevel=2,
        )
    return True
