"""A trial: a call of a unit that runs beside the step, on copies, and leaves nothing.

What it saves for backward is noted and dropped as it comes, what it writes is put back, and so are generators.
Collectives and written inputs are noted, by operators watched.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.actions.again import running_again
from lightning_mimose.actions.checksum import checksum
from lightning_mimose.actions.copies import appeared, held_in, put_back
from lightning_mimose.actions.lean.lost import Packs
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.outside import iterator_in
from lightning_mimose.actions.parametrized import cached_again, cached_in
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.stored import left_alone
from lightning_mimose.actions.structures import flatten, unflatten
from lightning_mimose.errors import MimoseError, is_out_of_memory
from lightning_mimose.measure.mode import ThreadedMode
from lightning_mimose.parts import plain_parts, storages_in
from lightning_mimose.units import is_compiled

CHANGES_INPUT = "its input is changed in place"
COLLECTIVE = "its forward talks to other ranks"
WRITES_PARAMETERS = "its forward writes parameters"
NESTED = "it saves nested tensors of strided layout, of which torch.utils.checkpoint cannot read the shape"


class _Packed(NamedTuple):
    """What is noted of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: int


@dataclass
class Called:
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
        learnt: The states of nested units of which nothing was known before.
        is_over: Whether it has run.
    """

    packed: list[_Packed] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    workspaces: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    is_over: bool = False
    learnt: list[WrittenState] = field(default_factory=list)

    @contextmanager
    def call(self, unit: str, args: Any) -> Iterator[None]:
        """Around the call of a unit."""
        call = Called(unit, [weakref.ref(storage) for storage in storages_in(args)], len(self.packed))
        self.calls.append(call)
        yield
        call.last = len(self.packed)

    def nested(self, unit: str, state: WrittenState, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a nested unit's forward, and learn what it writes."""
        if not state.known():
            self.learnt.append(state)
        before = state.before_forward()
        with self.call(unit, (args, kwargs)):
            out = original(*args, **kwargs)
        state.after_forward(before)
        state.watch_anew()
        return out

    def pack(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor, and let go of it."""
        if tensor.is_nested and tensor.layout is torch.strided:
            self._all_running(NESTED)
            return
        for part in filter(_is_plain, plain_parts(tensor)):
            storage = part.untyped_storage()
            content = 0 if any(ref() is storage for ref in self.workspaces) else checksum(part)
            self.packed.append(_Packed(tuple(part.shape), part.dtype, content))

    def changed(self, written: torch.UntypedStorage) -> None:
        """Note that a storage is written: whoever was given it cannot be given it again."""
        for call in self.calls:
            if any(ref() is written for ref in call.inputs):
                self.reasons.setdefault(call.unit, CHANGES_INPUT)

    def talks(self) -> None:
        """Note a collective: it is part of every call that is running."""
        self._all_running(COLLECTIVE)

    def _all_running(self, reason: str) -> None:
        for call in self.calls:
            if call.last < 0:
                self.reasons.setdefault(call.unit, reason)


class WritesParameterError(Exception):
    """Ends a trial before a parameter is written: nothing could put it back without a copy of all of them.

    Or where one was given other memory: it has its own again.
    """


class WritesInputError(Exception):
    """Ends a trial before it writes what it was lent."""


class _Watch(ThreadedMode):
    """Sees what a trial writes, and may fill what would be uninitialised."""

    def __init__(self, trial: Trial, modules: Sequence[nn.Module], fill: bool, lent: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial, self._fill = trial, fill
        self._lent = {tensor.untyped_storage()._cdata for tensor in lent}
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
                    for storage in storages_in(kwargs.get(argument.name, named.get(argument.name))):
                        if storage._cdata in self._parameters:
                            raise WritesParameterError
                        if storage._cdata in self._lent:
                            raise WritesInputError
                        self._trial.changed(storage)
        out = func(*args, **kwargs)
        for index in _workspaces(func):
            if isinstance(out[index], torch.Tensor):
                self._trial.workspaces.append(weakref.ref(out[index].untyped_storage()))
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
_UNFILLED = {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
"""Results of attention's kernels that nobody fills without dropout; what they decide is in the first result."""


@lru_cache(maxsize=1024)
def _workspaces(func: Any) -> tuple[int, ...]:
    """Which of an operation's results have a content that says nothing."""
    returns = func._schema.returns
    if func.overloadpacket in _WITH_WORKSPACE:
        return (len(returns) - 1,)
    return tuple(index for index, each in enumerate(returns) if each.name in _UNFILLED) if len(returns) > 1 else ()


@dataclass(frozen=True)
class Candidate:
    """A call of a unit that is to be tried.

    Attributes:
        unit: The unit's name.
        original: Its own forward.
        args: Its positional arguments, any structure.
        kwargs: Its keyword arguments, any structure.
        state: What the unit is known to write; a trial that runs to its end adds what that has shown.
        enter: Told of a trial before it runs, and of None after it: nested units report to it.
    """

    unit: str
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: WrittenState
    enter: Callable[[Trial | None], None]

    def run(
        self,
        trial: Trial,
        *,
        watch: bool = False,
        fill: bool = False,
        lend: bool = False,
        lean: LeanSaves | None = None,
    ) -> str:
        """Run it beside the step.

        Args:
            trial: Learns what is written, and what is saved, without recipes.
            watch: Whether operators are watched, for what they write; compiled code would be compiled again for it.
            fill: Whether memory is filled that would be uninitialised, if operators are watched.
            lend: Whether it is given its arguments themselves, if operators are watched, and nothing is noted of what
                it saves: then it takes no more memory than the call that follows.
            lean: Learns which recipes give the same bits.

        Returns:
            Why it could not; empty if it did. Its own forward will say the same, if it is a mistake of the unit's and
            not of running it beside the step.

        Raises:
            WritesParameterError: It was about to write a parameter, or gave it other memory, which it has no more.
                Not where recipes are compared.
            WritesInputError: It was about to write what it was lent.
        """
        try:
            iterator = iterator_in(self.state.modules())
            if iterator is not None:
                return f"its forward draws from {iterator}, which cannot be put back"
            self._run(trial, watch, fill, lend and watch, lean)
        except (MimoseError, WritesInputError):
            raise
        except WritesParameterError:
            if lean is None:
                raise
            return WRITES_PARAMETERS
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"its forward cannot run on copies of its inputs ({type(error).__name__}: {error})"
        return ""

    def _run(self, trial: Trial, watch: bool, fill: bool, lend: bool, lean: LeanSaves | None) -> None:
        state, modules = self.state, self.state.modules()
        leaves, spec = flatten((self.args, self.kwargs))
        own = [p for module in modules for p in module._parameters.values() if p is not None]
        memory = [(p, p.detach()) for p in own if _is_plain(p)]
        devices = sorted({t.device.index for t in [*leaves, *own] if isinstance(t, torch.Tensor) and t.is_cuda})
        lent = [leaf for leaf in leaves if lend and _is_plain(leaf)]
        give = _lend if lend else _copy
        copies = [give(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        versions = [leaf._version for leaf in copies if _is_plain(leaf)]
        args, kwargs = unflatten(copies, spec)
        everything = not state.known()  # then all there is gets copied, and what is there besides afterwards is new
        before, held = state.before_forward(), held_in(modules)
        done = False
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(running_again())
            if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and not any(map(is_compiled, modules)):
                stack.enter_context(_casts_not_cached())  # compiled code would be compiled again for it
            stack.enter_context(cached_again(cached_in(lambda: modules)))
            stack.enter_context(_without_forward_hooks(modules))
            stack.enter_context(left_alone(modules))
            if lean is not None:
                lean.hold(state.buffers(), copies)
                stack.callback(lean.close)
                stack.enter_context(lean.constants())
            never = partial(_never, self.unit, trial)
            packs = None if lean is None else Packs(lean)
            pack = _drop if lend else trial.pack if packs is None else packs.pack
            stack.enter_context(saved_tensors_hooks(pack, never))
            if watch:
                stack.enter_context(_Watch(trial, modules, fill, lent))
            self.enter(trial)
            try:
                with trial.call(self.unit, copies):
                    out = self.original(*args, **kwargs)
                    if packs is not None:
                        packs.end(out)
                    del out
                done = True
            finally:
                self.enter(None)
                trial.is_over = True
                if done:
                    put_back(state.after_forward(before))
                else:
                    put_back([*before, *(appeared(modules, before) if everything else ())])
                held.clear()
                replaced = _given_back(memory)
        if replaced:
            raise WritesParameterError
        if versions != [leaf._version for leaf in copies if _is_plain(leaf)]:
            trial.reasons.setdefault(self.unit, CHANGES_INPUT)


@contextmanager
def _casts_not_cached() -> Iterator[None]:
    """What autocast makes of weights in a trial goes with it: cached, it would be there before the unit itself runs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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


def _given_back(memory: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> bool:
    """Give parameters the memory that they had; returns whether one had been given other (`weight.data = ...`)."""
    replaced = [(parameter, before) for parameter, before in memory if parameter.data_ptr() != before.data_ptr()]
    for parameter, before in replaced:
        parameter.data = before
    return bool(replaced)


def _never(unit: str, trial: Trial, _: Any) -> torch.Tensor:
    if not trial.is_over:
        raise RuntimeError("its forward runs a backward pass itself")
    raise MimoseError(
        f"Unit {unit!r} runs twice beside its first step, to see whether it can run again, and the step's backward "
        "came to what these runs made: its forward leaves activations where nothing here can find and drop them (in "
        "an object that a global or a closure holds?). Let it return them or keep them as its attributes, or leave "
        "the unit out with units=[...]."
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Never a leaf: in-place operations on a leaf that requires gradients are forbidden.
    return tensor.clone() if tensor.requires_grad else tensor.detach().clone()


def _lend(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_plain(tensor):
        return _copy(tensor)
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()


def _drop(tensor: torch.Tensor) -> None:
    pass


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout == torch.strided and not leaf.is_nested
