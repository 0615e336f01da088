"""Puts a unit's action in the place of `module.forward`, and takes it away again.

`forward` is replaced, never `__call__`, so module hooks stay outside a recomputed region and run once. The
replacement is a plain function bound to the instance: a deep copy made during training (SWA, EMA) binds it to
the copy, which nobody registered, and so runs the copy's own forward.

Of a module that was compiled in place (`module.compile()`) the compiled call is replaced instead, so that plans are
read outside compiled code. Where a patched module is called inside somebody's compiled code, it does as it would alone.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

Handler: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Switch(Protocol):
    """Says whether a handler has anything to do; where it has not, a call costs next to nothing."""

    @property
    def armed(self) -> bool:
        """Whether it has."""

    @property
    def stops(self) -> Any:
        """Where calls may have to wait, if they may."""


class _On:
    """Says that it always has."""

    armed = True
    stops = None


_ON = _On()


class _Entry(NamedTuple):
    handler: Handler
    switch: Switch
    replacement: Callable[..., Any] | None
    had_own: bool
    alive: weakref.ref[nn.Module]
    ran: set[int] | None
    lent: bool = False
    """Whether that forward was only looked up by way of the instance, and is put back nowhere."""


_ORIGINAL = "_mimose_original_forward"
_handlers: dict[int, _Entry] = {}
"""By identity, which is several times faster than a dictionary of weak keys; an entry dies with its module."""
_replacements: weakref.WeakKeyDictionary[type[nn.Module], Callable[..., Any]] = weakref.WeakKeyDictionary()
"""By kind of module: what takes the place of its forward."""
_IS_OURS, _BENEATH = "_mimose_forward", "_mimose_beneath"
_compiles_frames: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def _replacement(kind: type[nn.Module] | None) -> Callable[..., Any]:
    """What takes the place of the forward of modules of a kind; who asks for its signature gets theirs.

    Its name makes a pickled bound method resolve to the class's own forward.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _own_forward(self, args, kwargs, forward)
        entry = _handlers.get(id(self))
        if entry is None:
            return _own_forward(self, args, kwargs, forward)
        if entry.replacement is not forward:  # called by what somebody has put above us, and we are above that now
            return _beneath(forward, self)(*args, **kwargs)
        if entry.ran is not None:
            entry.ran.add(id(self))
        switch = entry.switch
        if switch.armed or switch.stops is not None:
            if _compiles_frames() is not None:  # around us, in a step that is compiled: not ours, nor what we call
                return torch.compiler.disable(entry.handler)(args, kwargs)
            return entry.handler(args, kwargs)
        # As `_own_forward`: a step that fits comes here once for every unit.
        return self.__dict__[_ORIGINAL](*args, **kwargs) if entry.had_own else type(self).forward(self, *args, **kwargs)

    setattr(forward, _IS_OURS, True)
    with suppress(TypeError, ValueError):  # it is no Python function
        if kind is not None:
            forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


class _CompiledCall:
    """Stands in the place of a module's compiled call; copies and pickles of a module leave that behind."""

    def __init__(self, key: int, original: Callable[..., Any]) -> None:
        self.key, self.original = key, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        entry = _handlers.get(self.key)
        if entry is None:
            return self.original(*args, **kwargs)
        if entry.ran is not None:
            entry.ran.add(self.key)
        return entry.handler(args, kwargs)


def patch(
    module: nn.Module,
    make_handler: Callable[[Callable[..., Any]], Handler],
    switch: Switch = _ON,
    ran: set[int] | None = None,
) -> None:
    """Replace a module's forward by the handler that `make_handler` builds around the original one.

    Args:
        module: The module.
        make_handler: Makes it.
        switch: Says whether it has anything to do.
        ran: Given the module's identity whenever it is called, whatever the switch says.
    """
    if module._compiled_call_impl is not None:
        _patch_compiled(module, module._compiled_call_impl, make_handler, switch, ran)
        return
    original = module.__dict__.get("forward")
    ours = getattr(original, "__func__", None)
    if hasattr(ours, _IS_OURS):  # a copy of a patched module, or put back by somebody who had kept it
        original = module.__dict__.get(_ORIGINAL) or getattr(ours, _BENEATH, None)
    lent = original is None and isinstance(module, torch.jit.ScriptModule)
    if lent:  # a traced one, whose class has none that can be read
        original = module.forward
    if original is not None:
        module.__dict__[_ORIGINAL] = original
    kind, key = type(module), id(module)
    replacement = _replacement(None) if original is not None else _replacements.get(kind) or _replacement(kind)
    if original is None:
        _replacements[kind] = replacement
    alive = weakref.ref(module, lambda _: _handlers.pop(key, None))
    own = _own(alive, original is not None)
    _handlers[key] = _Entry(make_handler(own), switch, replacement, original is not None, alive, ran, lent)
    module.__dict__["forward"] = types.MethodType(replacement, module)


def _patch_compiled(
    module: nn.Module,
    original: Callable[..., Any],
    make_handler: Callable[[Callable[..., Any]], Handler],
    switch: Switch,
    ran: set[int] | None,
) -> None:
    key = id(module)
    alive = weakref.ref(module, lambda _: _handlers.pop(key, None))
    vars(module)["_compiled_call_impl"] = _CompiledCall(key, original)

    def call(*args: Any, **kwargs: Any) -> Any:
        compiled = alive()
        assert compiled is not None
        return vars(compiled)["_compiled_call_impl"].original(*args, **kwargs)

    _handlers[key] = _Entry(make_handler(call), switch, None, False, alive, ran)


def unpatch(module: nn.Module) -> None:
    """Undo `patch`; does nothing on a module that is not patched."""
    entry = _handlers.pop(id(module), None)
    if entry is None:
        return
    compiled = module._compiled_call_impl
    if isinstance(compiled, _CompiledCall):
        vars(module)["_compiled_call_impl"] = compiled.original
        return
    own = module.__dict__.pop(_ORIGINAL) if entry.had_own else None
    ours = module.__dict__.get("forward")
    if getattr(ours, "__func__", None) is not entry.replacement:  # somebody's, which was put above ours and may call it
        if own is not None:
            setattr(entry.replacement, _BENEATH, own)
        return
    module.__dict__.pop("forward")
    if own is not None and not entry.lent:
        module.__dict__["forward"] = own


def undoing(
    owner: object, modules: Sequence[weakref.ref[nn.Module]], *last: Callable[[], object]
) -> weakref.finalize[..., Any]:
    """Undo `patch` on some modules, once: when what is returned is called, or else when their owner is gone.

    Args:
        owner: Whose patches they are.
        modules: The modules; more may be added.
        last: Called after that; each of all these, whatever another one raises.
    """
    undo = weakref.finalize(owner, _undo, modules, last)
    undo.atexit = False
    return undo


def _undo(modules: Sequence[weakref.ref[nn.Module]], last: Sequence[Callable[[], object]]) -> None:
    with ExitStack() as stack:  # the last that was put on it comes first
        for call in reversed(last):
            stack.callback(call)
        for ref in modules:
            if (module := ref()) is not None:
                stack.callback(unpatch, module)


def is_patched(module: nn.Module) -> bool:
    """Whether `patch` is in force on a module."""
    return id(module) in _handlers


def _own_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], replacement: Callable[..., Any]
) -> Any:
    """What a module does by itself: the forward that its instance had, or its class's."""
    original = module.__dict__.get(_ORIGINAL)
    return (_beneath(replacement, module) if original is None else original)(*args, **kwargs)


def _beneath(replacement: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """What a replacement had taken the place of, where somebody put another forward above it before it went."""
    own: Callable[..., Any] | None = getattr(replacement, _BENEATH, None)
    return partial(type(module).forward, module) if own is None else own


def _own(alive: weakref.ref[nn.Module], had_own: bool) -> Callable[..., Any]:
    """Calls a module's own forward, without holding the module: nothing of ours must keep it alive."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module = alive()
        assert module is not None
        if had_own:
            return module.__dict__[_ORIGINAL](*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    return call
