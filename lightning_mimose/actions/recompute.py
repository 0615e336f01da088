"""Recompute: keep a region's inputs, run its forward again in backward (activation checkpointing).

`torch.utils.checkpoint` without reentrance, around `forward`. Its traps, and what guards against each:
tensors in keyword arguments are invisible to its RNG stash and version checks, so all tensors are passed
positionally; buffers that the forward writes would be written twice, so they are put back; the arguments must
not be kept alive by the region's closure, so tensors are taken out of it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_mimose.actions.again import running_again
from lightning_mimose.actions.copies import Saved
from lightning_mimose.actions.members import SIMPLE
from lightning_mimose.actions.parametrized import cached_again, cached_in
from lightning_mimose.actions.setting import PLAIN, Setting
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.stored import Place, left_in
from lightning_mimose.actions.structures import Structure, flatten, unflatten
from lightning_mimose.actions.switches import EVERYTHING

# The switch is one for the whole process: where trainings run in several threads, each must say it by argument.
_TAKES_EARLY_STOP = "early_stop" in inspect.signature(checkpoint).parameters


class RegionObserver(Protocol):
    """Watches one region's runs; how the collector measures without an extra forward.

    Attributes:
        stops_early: Whether a recomputation may stop at the last tensor that is needed.
    """

    stops_early: bool

    def forward_run(self) -> AbstractContextManager[None]:
        """Entered around the run in forward."""

    def recompute_run(self, given: Sequence[Any], results: list[Any]) -> AbstractContextManager[None]:
        """Entered around every run in backward.

        Args:
            given: The leaves of the arguments that it is given, which may be in other memory than in forward.
            results: Where what it returns will be, if it runs to its end; nobody asks for it, so it may be emptied.
        """

    def recomputed(self, out: Any, left: Callable[[], Mapping[Place, Sequence[torch.Tensor]]]) -> None:
        """Shown what a run in backward returned, and told what it left in attributes, if it ran to its end."""


_NO_ORIGINALS: Mapping[int, weakref.ref[torch.Tensor]] = {}
_NOTHING: AbstractContextManager[None] = nullcontext()

_PLAIN = (*PLAIN, slice, nn.Module)


def unrepeatable_argument(leaves: Sequence[Any]) -> str | None:
    """What among the leaves of the arguments could not be given to a region again, in words; None if all of it can.

    An object that pytree cannot take apart may be changed by whoever holds it before backward, and the recomputation
    would then see other tensors, of the same shapes and with no error.
    """
    differentiates = forward_ad._current_level >= 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_inference():
                return "tensor that was made in inference mode, which nothing can save"
            if differentiates and forward_ad.unpack_dual(leaf).tangent is not None:
                return "dual number of forward-mode differentiation, which a checkpoint cannot give again"
        elif not isinstance(leaf, _PLAIN) and not callable(leaf):
            return f"{type(leaf).__name__}, which may change before it runs again"
    return None


def given_twice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """A container that a call is given twice, in words; None if there is none.

    A recomputation would be given two, and not read in one what it writes into the other.
    """
    containers = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, dict))]
    if len(containers) < 2:
        return None
    repeated = next((each for i, each in enumerate(containers) if any(each is other for other in containers[:i])), None)
    return None if repeated is None else f"{type(repeated).__name__} twice, which would be two when it runs again"


def recompute(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    observer: RegionObserver | None = None,
    flat: tuple[list[Any], Any] | None = None,
    setting: Setting | None = None,
    originals: Mapping[int, weakref.ref[torch.Tensor]] = _NO_ORIGINALS,
) -> Any:
    """Run a unit's forward as a checkpointed region.

    Args:
        original: The unit's own forward.
        args: Its positional arguments, any structure.
        kwargs: Its keyword arguments, any structure.
        state: What the unit writes, and what it finds set; both are put back around a recomputation.
        observer: Watches the runs; one that measures wants a recomputation to run to its end.
        flat: What `flattened` made of the arguments, where that is known; its leaves are taken out.
        setting: What is found set in it, where that was noted.
        originals: Index of a leaf that stands for another tensor -> that one, which is given again if it is still
            there: others may compare it with what they hold.

    Returns:
        What the forward returned.
    """
    leaves, spec = flattened(args, kwargs) if flat is None else flat
    # The first run gets the caller's own containers, which it may fill (a list of auxiliary losses); a recomputation
    # gets copies of what they held then.
    first: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(args, kwargs)]
    del args, kwargs
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    # One that is given several times is one again: a forward may ask whether its query is its key.
    unique = {id(leaves[i]): leaves[i] for i in where}
    tensors, numbers = list(unique.values()), {key: number for number, key in enumerate(unique)}
    which = [numbers[id(leaves[i])] for i in where]
    del unique
    for i in where:
        leaves[i] = None
    before: Saved = []
    outside: Saved = []
    found, switches = setting or state.settings.note(), EVERYTHING.positions()
    weights = cached_in(state.modules)
    early = observer is None or observer.stops_early

    def region(*given: torch.Tensor) -> Any:
        nonlocal before, outside
        if first:
            inner_args, inner_kwargs = first.pop()
            copies = state.before_forward()
            with observer.forward_run() if observer else _NOTHING:
                out = original(*inner_args, **inner_kwargs)
            before, outside = state.after_forward(copies), state.found_outside()
            state.settings.ran(found)
            return out
        filled = list(leaves)
        same: Any = None
        for i, number in zip(where, which, strict=True):
            same = originals[i]() if i in originals else None
            if same is not None:
                same._fix_weakref()  # it may have lost its Python object once: see torch.utils.weak
            filled[i] = given[number] if same is None else same
        inner_args, inner_kwargs = _arguments(filled, spec)
        results: list[Any] = []
        watched = observer.recompute_run(filled, results) if observer else _NOTHING
        # The region holds what it was given only until its own forward has bound it.
        del filled, given, same
        as_found = state.settings.as_found(found)
        kept = state.restored(before, outside) if before or outside else _NOTHING
        stopped = _StoppedInTorchScript() if early else _NOTHING
        with EVERYTHING.lent(switches), cached_again(weights), as_found, kept, running_again(), stopped, watched:
            results.append(original(*inner_args, **inner_kwargs))
            if observer:
                observer.recomputed(results[0], lambda: left_in(state.modules()))
        return None

    if _TAKES_EARLY_STOP and getattr(checkpointing, "_enable_checkpoint_early_stop", None) is None:
        return checkpoint(region, *tensors, use_reentrant=False, early_stop=early)
    with set_checkpoint_early_stop(early):
        return checkpoint(region, *tensors, use_reentrant=False)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments, and their structure: how many have no name, and the names of the others.

    As pytree has it where some of them are neither tensors nor plain values.
    """
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in SIMPLE:
            return flatten((args, kwargs))
    return leaves, (len(args), tuple(kwargs))


def _arguments(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The reverse of `flattened`."""
    if not isinstance(spec, Structure):
        count, names = spec
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, spec)
    return arguments


class _StoppedInTorchScript:
    """Lets a recomputation be stopped early inside a function or module that `torch.jit.script` made.

    The exception that stops it cannot pass through TorchScript's interpreter, which raises another in its place. If
    it was anything else that went wrong, tensors are missing afterwards, and the checkpoint says so.
    """

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Whether it was that other exception."""
        return isinstance(error, RuntimeError) and "failed in the TorchScript interpreter" in str(error)
