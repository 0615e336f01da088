"""Proof: before a unit is recomputed for the first time it runs twice beside the step, and both runs must agree.

A forward that takes another path when it runs again (routers with near ties, randomness that nobody stashes,
kernels that save memory nobody wrote) would end in torch's `CheckpointError` or, worse, in wrong gradients. So
number, shapes and content of everything it saves for backward are compared, the second run on memory that is
filled where it would be uninitialised. Its inputs must be left alone, and no collective may be in it. Nested
units are proven along with it. Nothing of the two runs stays: saved tensors are dropped as they come, written
state and generators are put back.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_mimose.actions.again import running_again
from lightning_mimose.actions.checksum import checksum
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.state import WrittenState, appeared, put_back
from lightning_mimose.actions.stored import left_alone, watched
from lightning_mimose.errors import MimoseError, is_out_of_memory
from lightning_mimose.measure.mode import ThreadedMode

CARRIES = "it carries {} from call to call, as its attribute"
DIFFERS = "its forward saves other tensors when it runs again"
CHANGES_INPUT = "its input is changed in place"
COLLECTIVE = "its forward talks to other ranks"
WRITES_PARAMETERS = "its forward writes parameters"


class _Packed(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: int


@dataclass
class _Call:
    """One nested call in one run: what it was given, and which part of what was saved is its own."""

    unit: str
    inputs: list[weakref.ref[Any]]
    first: int
    last: int = -1


@dataclass
class Trial:
    """One run of a unit beside the step.

    Attributes:
        packed: What was saved for backward, in order.
        calls: The unit's own call, and those of nested units.
        reasons: Unit -> why it cannot be recomputed, as far as one run shows it.
        workspaces: Storages that kernels fill as they like, and not wholly: their content says nothing.
    """

    packed: list[_Packed] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    workspaces: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    @contextmanager
    def call(self, unit: str, args: Any) -> Iterator[None]:
        """Around the call of a unit."""
        storages = [weakref.ref(t.untyped_storage()) for t in tree_leaves(args) if _is_plain(t)]
        call = _Call(unit, storages, len(self.packed))
        self.calls.append(call)
        yield
        call.last = len(self.packed)

    def nested(self, unit: str, state: WrittenState, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a nested unit's forward, and learn what it writes."""
        before = state.before_forward()
        with self.call(unit, (args, kwargs)):
            out = original(*args, **kwargs)
        state.after_forward(before)
        return out

    def pack(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor, and let go of it."""
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            content = 0 if any(ref() is storage for ref in self.workspaces) else checksum(tensor)
            self.packed.append(_Packed(tuple(tensor.shape), tensor.dtype, content))

    def changed(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is written: whoever was given it cannot be given it again."""
        written = tensor.untyped_storage()
        for call in self.calls:
            if any(ref() is written for ref in call.inputs):
                self.reasons.setdefault(call.unit, CHANGES_INPUT)

    def talks(self) -> None:
        """Note a collective: it is part of every call that is running."""
        for call in self.calls:
            if call.last < 0:
                self.reasons.setdefault(call.unit, COLLECTIVE)


class _WritesParameterError(Exception):
    """Ends a trial before a parameter is written: nothing could put it back without a copy of all of them."""


class _Watch(ThreadedMode):
    """Sees what a trial writes, and may fill what would be uninitialised."""

    def __init__(self, trial: Trial, modules: Sequence[nn.Module], fill: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial, self._fill = trial, fill
        parameters = (p for module in modules for p in module._parameters.values() if p is not None and _is_plain(p))
        self._parameters = {p.untyped_storage()._cdata for p in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self._trial.talks()
        if func._schema.is_mutable:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tree_leaves(kwargs.get(argument.name, named.get(argument.name))):
                        if _is_plain(leaf):
                            if leaf.untyped_storage()._cdata in self._parameters:
                                raise _WritesParameterError
                            self._trial.changed(leaf)
        out = func(*args, **kwargs)
        if func.overloadpacket in _WITH_WORKSPACE:
            self._trial.workspaces.append(weakref.ref(out[-1].untyped_storage()))
        if self._fill and func.overloadpacket in _UNINITIALISED and _is_plain(out):
            out.fill_(float("nan") if out.is_floating_point() else 1)
        return out


_UNINITIALISED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


_WITH_WORKSPACE = {torch.ops.aten.mkldnn_rnn_layer}
"""Operations whose last result is a workspace: LSTMs on a CPU (oneDNN)."""


def prove(
    unit: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    enter: Callable[[Trial | None], None],
    watch: bool = True,
) -> dict[str, str]:
    """Run a unit's forward twice, and compare.

    Args:
        unit: Its name.
        original: Its own forward.
        args: Its positional arguments, any structure.
        kwargs: Its keyword arguments, any structure.
        state: What it is known to write; it learns here.
        enter: Told of the trial before each run, and of None after it: nested units report to it.
        watch: Whether operators may be watched; compiled code would be compiled again for it.

    Returns:
        Unit -> why it cannot be recomputed; empty when everything agrees.
    """
    trials = []
    for number in range(2):
        trial = Trial()
        trials.append(trial)
        try:
            _run(trial, unit, original, args, kwargs, state, enter, watch, fill=number == 1)
        except _WritesParameterError:
            return {call.unit: WRITES_PARAMETERS for call in trial.calls if call.last < 0}
        except MimoseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Its own forward will say the same, if it is a mistake of the unit's and not of running it beside the step.
            return {unit: f"its forward cannot run on copies of its inputs ({type(error).__name__}: {error})"}
    first, second = trials
    reasons = first.reasons | second.reasons
    if len(first.calls) != len(second.calls):
        return {call.unit: DIFFERS for trial in trials for call in trial.calls} | reasons
    for one, other in zip(first.calls, second.calls, strict=True):
        if one.unit != other.unit or first.packed[one.first : one.last] != second.packed[other.first : other.last]:
            reasons.setdefault(one.unit, DIFFERS)
    return reasons


def find_carried(
    unit: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    enter: Callable[[Trial | None], None],
    unknown: Mapping[nn.Module, Sequence[str]],
) -> dict[str, str]:
    """Run the forward of a unit that was proven once more, and see what it does with activations that it holds.

    Args:
        unit: Its name.
        original: Its own forward.
        args: Its positional arguments, any structure.
        kwargs: Its keyword arguments, any structure.
        state: Learns which of them are left alone.
        enter: Told of the trial before the run, and of None after it.
        unknown: The activations, names by module.

    Returns:
        Unit -> why it cannot be recomputed, if it goes on from what it left in an earlier call: that is gone by then.
    """
    with watched(unknown) as looks:
        try:
            _run(Trial(), unit, original, args, kwargs, state, enter, watch=False, fill=False)
        except MimoseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return {unit: f"its forward cannot run on copies of its inputs ({type(error).__name__}: {error})"}
    carried = state.settings.settle(unknown, looks)
    return {unit: CARRIES.format(", ".join(map(repr, carried)))} if carried else {}


def try_recipes(
    unit: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    enter: Callable[[Trial | None], None],
    lean: LeanSaves,
) -> bool:
    """Run the forward of a unit that was proven once more, with every recipe of lean saves compared with the tensor.

    Args:
        unit: Its name.
        original: Its own forward.
        args: Its positional arguments, any structure.
        kwargs: Its keyword arguments, any structure.
        state: What it is known to write.
        enter: Told of the trial before the run, and of None after it.
        lean: Learns which recipes give the same bits.

    Returns:
        Whether it did. The unit's own call will say what is wrong with it, if it is a mistake of the unit's.
    """
    try:
        _run(Trial(), unit, original, args, kwargs, state, enter, watch=False, fill=False, lean=lean)
    except MimoseError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _run(
    trial: Trial,
    unit: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: WrittenState,
    enter: Callable[[Trial | None], None],
    watch: bool,
    fill: bool,
    lean: LeanSaves | None = None,
) -> None:
    leaves, spec = tree_flatten((args, kwargs))
    own = [p for module in state.modules() for p in module._parameters.values()]
    devices = sorted({t.device.index for t in [*leaves, *own] if isinstance(t, torch.Tensor) and t.is_cuda})
    copies = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    versions = [leaf._version for leaf in copies if _is_plain(leaf)]
    copied_args, copied_kwargs = tree_unflatten(copies, spec)
    everything = not state.known()  # then all there is gets copied, and what is there besides afterwards is new
    before = state.before_forward()
    done = False
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(running_again())
        stack.enter_context(_without_forward_hooks(state.modules()))
        stack.enter_context(left_alone(state.modules()))
        if lean is not None:
            lean.hold(state.buffers(), copies)
            stack.callback(lean.close)
            stack.enter_context(lean.constants())
        stack.enter_context(saved_tensors_hooks(_both(trial, lean), _never))
        if watch:
            stack.enter_context(_Watch(trial, state.modules(), fill))
        enter(trial)
        try:
            with trial.call(unit, copies):
                original(*copied_args, **copied_kwargs)
            done = True
        finally:
            enter(None)
            if done:
                put_back(state.after_forward(before))
            else:
                put_back([*before, *(appeared(state.modules(), before) if everything else ())])
    if versions != [leaf._version for leaf in copies if _is_plain(leaf)]:
        trial.reasons.setdefault(unit, CHANGES_INPUT)


@contextmanager
def _without_forward_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Hooks that collect what modules return (hidden states, router logits) must not collect it from a trial.

    Pre-hooks stay: some of them make the weights.
    """
    hooked = [(module, module._forward_hooks) for module in modules if module._forward_hooks]
    for module, _ in hooked:
        module._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, hooks in hooked:
            module._forward_hooks = hooks


def _both(trial: Trial, lean: LeanSaves | None) -> Callable[[torch.Tensor], Any]:
    if lean is None:
        return trial.pack

    def pack(tensor: torch.Tensor) -> Any:
        trial.pack(tensor)
        return lean.pack(tensor)

    return pack


def _never(_: Any) -> torch.Tensor:
    raise RuntimeError("A unit that is tried beside the step ran a backward pass through itself.")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Never a leaf: in-place operations on a leaf that requires gradients are forbidden.
    return tensor.clone() if tensor.requires_grad else tensor.detach().clone()


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout == torch.strided and not leaf.is_nested
