"""Handles: how a saved tensor is got back in backward. None of them holds a node of autograd's graph.

Autograd checks no versions of what hooks took over, so `Kept` does. A rebuilt value that several operations saved
is shared among them while one backward pass lasts, and let go of with the last of its uses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a window on its storage: no subclass, not sparse, not nested."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


FEW_OPERATIONS = 64
"""In a comparison of so many nothing is shared: what is takes memory for as long."""


class Handle:
    """A saved tensor in another form.

    Attributes:
        nbytes: Bytes of the value.
        shape: Its shape.
        grade: The least grade of lean saves that has it (see `grades.GRADES`); 0 for what is kept.
        is_saved: Whether an operation saved it.
        owner: By whom it was packed.
        identity: Stands for which saved tensor it is, or else for what it is made from and how.
        is_kept: Whether it is the tensor itself, at least for now.
    """

    is_kept = False

    __slots__ = ("grade", "identity", "is_saved", "nbytes", "owner", "shape")

    def __init__(self, nbytes: int, shape: tuple[int, ...], grade: int) -> None:
        self.nbytes, self.shape, self.grade = nbytes, shape, grade
        self.is_saved = False
        self.owner: object = None
        self.identity = 0

    @property
    def needed_grade(self) -> int:
        """The grade that something rebuilt from it needs for its sake: what was saved is there in any."""
        return 0 if self.is_saved else self.grade

    @property
    def is_intact(self) -> bool:
        """Whether nobody has changed what it keeps."""
        return True

    @property
    def kept_storage(self) -> torch.UntypedStorage | None:
        """That of the tensor that it is, at least for now, whether or not somebody has changed it; None for others."""
        return None

    @property
    def is_given_away(self) -> bool:
        """Whether nobody else has what `value` returns, so that it may be written over."""
        return False

    def value(self) -> torch.Tensor:
        """The tensor, for another handle that is rebuilt from it."""
        raise NotImplementedError

    @property
    def rebuilt(self) -> Rebuilt | None:
        """What has to be made again for it, if anything."""
        return None

    @property
    def sources(self) -> Sequence[Handle]:
        """What its value is made from."""
        return ()


class Kept(Handle):
    """The tensor itself. A detached one: a hook that returns an operation's own result makes a cycle that leaks."""

    is_kept = True

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not by way of the base class, and no more than is needed: this is done for every tensor that is saved.
        self.grade = self.identity = 0
        self.is_saved, self.owner = False, None
        self._tensor = tensor.detach()
        self._version = tensor._version

    @property
    def _has_shape(self) -> bool:
        """Sparse tensors have no `nbytes`, and some nested ones no shape: nothing is rebuilt from them."""
        return self._tensor.layout is torch.strided and not self._tensor.is_nested

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the tensor."""
        return self._tensor.nbytes if self._has_shape else 0

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape."""
        return self._tensor.shape if self._has_shape else ()

    @property
    def kept_storage(self) -> torch.UntypedStorage | None:
        """Of a plain tensor."""
        return self._tensor.untyped_storage() if is_plain(self._tensor) else None

    @property
    def is_intact(self) -> bool:
        """Whether nobody has changed it."""
        return self._tensor._version == self._version

    def value(self) -> torch.Tensor:
        """The tensor, if nobody has changed it.

        Raises:
            RuntimeError: It was changed in place, as torch says it for tensors that no hook took over.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {self._tensor._version}; expected "
                f"version {self._version} instead."
            )
        return self._tensor


class Number(Handle):
    """A number that an operation was given."""

    __slots__ = ("_number",)

    def __init__(self, number: Any) -> None:
        super().__init__(0, (), 0)
        self._number = number

    def value(self) -> Any:
        """The number, as Python has it: a tensor would take part in deciding the result's dtype."""
        return self._number


class View(Handle):
    """A view of another handle's value."""

    __slots__ = ("_geometry", "base")

    def __init__(self, base: Handle, view: torch.Tensor) -> None:
        super().__init__(base.nbytes, tuple(view.shape), base.grade)
        self.base = base
        self.identity = base.identity
        self._geometry = (view.shape, view.stride(), view.storage_offset())

    def value(self) -> torch.Tensor:
        """The view."""
        return self.base.value().as_strided(*self._geometry)

    @property
    def rebuilt(self) -> Rebuilt | None:
        """Its base's."""
        return self.base.rebuilt

    @property
    def sources(self) -> Sequence[Handle]:
        """Its base."""
        return (self.base,)


class Rebuilt(Handle):
    """Something that has to be made again, and is shared while one backward pass lasts.

    It stays from its first use until the last operation that saved it has it, or is done if something else is made
    from it, too. What others keep anyway (`keep`) is not made again.

    Attributes:
        uses: How many operations that saved it are not done yet.
        builds: How many recipes there are that are made from it.
        is_handed_on: Whether it is a unit's result, which others may save after a pass has gone backward over it.
    """

    operations = 1
    """How many are run for it where nothing is made once for several."""

    __slots__ = ("__weakref__", "_kept", "_memo", "_over", "_task", "builds", "is_handed_on", "uses")

    def __init__(self, nbytes: int, shape: tuple[int, ...], grade: int) -> None:
        super().__init__(nbytes, shape, grade)
        self.uses = self.builds = 0
        self.is_handed_on = False
        self._task, self._over = (-1, 0), (-1, -1)
        self._memo: torch.Tensor | None = None
        self._kept: Kept | None = None

    def keep(self, tensor: torch.Tensor) -> None:
        """It is there after all, for somebody else keeps it as long."""
        self._kept = Kept(tensor)

    @property
    def rebuilt(self) -> Rebuilt:
        """Itself."""
        return self

    def value(self) -> torch.Tensor:
        """The value, made now or at another use in the same backward pass."""
        if self._kept is not None:
            return self._kept.value()
        task = _pass()
        if task[0] == -1 and _compared.made is not None:
            return self._shared(_compared.made)
        if task != self._task or task[0] == -1:
            # Outside of a backward pass (somebody looks at what a node saved) nothing is remembered.
            self._task, self._memo = task, None
        made = self._memo  # looked at once: another thread may let go of it
        if made is None:
            made = self._made()
            if self.uses > 0 and task[0] != -1:
                self._memo = made
                # A pass that keeps the graph, or runs a part of it, does not come to the last use.
                # Weakly: what a recipe is made from must not live to the end of the pass.
                torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, weakref.ref(self)))
        return made

    def _shared(self, values: dict[Rebuilt, torch.Tensor]) -> torch.Tensor:
        """The value, where some are shared: those of what was saved, as in backward."""
        made = values.get(self)
        if made is None:
            made = self._made()
            if self.uses > 0:
                values[self] = made
        return made

    def _made(self) -> torch.Tensor:
        raise NotImplementedError

    def forget_if_last(self) -> None:
        """Let go of the value for the operation that has it now, if nobody else needs it.

        Gradients of what was expanded are summed after the operation's own formula, which has let go of it by then.
        """
        if self.uses == 1 and not self.builds:
            self._memo, self._over = None, self._task

    @property
    def is_over(self) -> bool:
        """Whether nobody will ask for it again in the backward pass that runs."""
        return self._over == _pass()

    def forget(self) -> None:
        """Let go of a value that was shared."""
        self._memo = None


def _slow_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# By way of an object that stands for the stream it takes thirty times as long.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)


class _Compared(threading.local):
    """What a comparison in this thread has made so far: in loops each state is made from the last, in some twice."""

    made: dict[Rebuilt, torch.Tensor] | None = None


_compared = _Compared()


def _pass() -> tuple[int, int]:
    """The backward pass that runs, and the stream: on another one, a value may not be ready yet."""
    return torch._C._current_graph_task_id(), current_stream()


def current_stream() -> int:
    """Of this thread's accelerator; 0 where none is in use."""
    return _stream(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


def _forget(rebuilt: weakref.ref[Rebuilt]) -> None:
    live = rebuilt()
    if live is not None:
        live.forget()


class Use:
    """What an operation holds of a handle that is rebuilt; autograd drops it as soon as the operation is done."""

    __slots__ = ("_asked", "_rebuilt", "handle")

    def __init__(self, handle: Handle, rebuilt: Rebuilt) -> None:
        self.handle, self._rebuilt, self._asked = handle, rebuilt, False
        rebuilt.uses += 1

    def __del__(self) -> None:
        self._rebuilt.uses -= 1
        if self._rebuilt.uses == 0:
            self._rebuilt.forget()

    def value(self) -> torch.Tensor:
        """The tensor, for the operation."""
        found = _without_autocast(self.handle.value)
        if not self._asked:  # who asks several times (a function of the user's) is not given several
            self._asked = True
            self._rebuilt.forget_if_last()
        return found


def unpack(packed: Handle | Use) -> torch.Tensor:
    """What is given to autograd as the hook for unpacking."""
    if isinstance(packed, Kept):  # most are
        return packed.value()
    return packed.value() if isinstance(packed, Use) else _without_autocast(packed.value)


def with_sources(handles: Iterable[Handle], *, past_kept: bool = True) -> Iterator[Handle]:
    """Whatever these are made from, themselves included; in no chain of calls, for a loop makes long ones.

    Args:
        handles: They.
        past_kept: Whether what is kept counts, and what it is made from: it need not be made.
    """
    known: set[int] = set()
    waiting = list(handles)
    while waiting:
        handle = waiting.pop()
        if id(handle) not in known and (past_kept or not handle.is_kept):
            known.add(id(handle))
            yield handle
            waiting += handle.sources


def rebuilt_now(handle: Handle) -> torch.Tensor:
    """What `unpack` will give, for a comparison; counts as no use."""
    rebuilt = handle.rebuilt
    if rebuilt is None or rebuilt.operations <= FEW_OPERATIONS:
        return _without_autocast(handle.value)
    _compared.made = {}
    try:
        return _without_autocast(handle.value)
    finally:
        _compared.made = None


def _without_autocast(get: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A backward pass inside an autocast region would otherwise rebuild in another precision."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return get()
    return get()
