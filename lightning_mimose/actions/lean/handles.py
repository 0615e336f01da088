"""Handles: how a saved tensor is got back in backward. None of them holds a node of autograd's graph.

Autograd checks no versions of what hooks took over, so `Kept` does. A rebuilt value that several operations saved
is shared among them while one backward pass lasts, and let go of with the last of its uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

Rebuild = Callable[..., torch.Tensor]


class Handle:
    """A saved tensor in another form.

    Attributes:
        nbytes: Bytes of the value.
        shape: Its shape.
        grade: The least grade of lean saves that has it (see `recipes.GRADES`); 0 for what is kept.
        is_saved: Whether an operation saved it.
    """

    __slots__ = ("grade", "is_saved", "nbytes", "shape")

    def __init__(self, nbytes: int, shape: tuple[int, ...], grade: int) -> None:
        self.nbytes, self.shape, self.grade = nbytes, shape, grade
        self.is_saved = False

    @property
    def needed_grade(self) -> int:
        """The grade that something rebuilt from it needs for its sake: what was saved is there in any."""
        return 0 if self.is_saved else self.grade

    def value(self) -> torch.Tensor:
        """The tensor, for another handle that is rebuilt from it."""
        raise NotImplementedError

    def unpacked(self) -> torch.Tensor:
        """The tensor, for the operation that saved it."""
        return self.value()

    def saved_once_more(self) -> None:
        """Told that another operation saved it."""
        self.is_saved = True


class Kept(Handle):
    """The tensor itself. A detached one: a hook that returns an operation's own result makes a cycle that leaks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.nbytes, tuple(tensor.shape), 0)
        self._tensor = tensor.detach()
        self._version = tensor._version

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


class View(Handle):
    """A view of another handle's value."""

    __slots__ = ("_geometry", "base")

    def __init__(self, base: Handle, view: torch.Tensor) -> None:
        super().__init__(base.nbytes, tuple(view.shape), base.grade)
        self.base = base
        self._geometry = (view.shape, view.stride(), view.storage_offset())

    def value(self) -> torch.Tensor:
        """The view."""
        return self.base.value().as_strided(*self._geometry)

    def unpacked(self) -> torch.Tensor:
        """The view."""
        return self.base.unpacked().as_strided(*self._geometry)

    def saved_once_more(self) -> None:
        """Its base is what is rebuilt."""
        self.is_saved = True
        self.base.saved_once_more()


class Mask(Handle):
    """A tensor of zeros and one other number, a bit for each element."""

    __slots__ = ("_bits", "_count", "_table")

    _tables: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}  # noqa: RUF012 (of the class)

    def __init__(self, tensor: torch.Tensor, number: float, grade: int) -> None:
        super().__init__(tensor.nbytes, tuple(tensor.shape), grade)
        flat = tensor.detach().reshape(-1)
        flags = flat if flat.dtype == torch.bool else flat != 0
        if missing := -flags.numel() % 8:
            flags = torch.cat([flags, flags.new_zeros(missing)])
        # Eight bools are eight bytes of one integer; the product gathers their lowest bits in its highest byte.
        self._bits = ((flags.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)
        self._count = tensor.numel()
        key = (number, tensor.dtype, tensor.device)
        if key not in Mask._tables:
            bits = torch.arange(256, device=tensor.device)[:, None] >> torch.arange(8, device=tensor.device) & 1
            Mask._tables[key] = bits.to(tensor.dtype) if tensor.dtype == torch.bool else bits.to(tensor.dtype) * number
        self._table = Mask._tables[key]

    @property
    def held_bytes(self) -> int:
        """Bytes that stay."""
        return self._bits.nbytes

    def value(self) -> torch.Tensor:
        """The mask."""
        return self._table.index_select(0, self._bits.int()).view(-1)[: self._count].view(self.shape)


class Recipe(Handle):
    """A value that is rebuilt from those of other handles.

    Args:
        rebuild: Makes it from the values of `inputs`.
        inputs: What it is made from.
        nbytes: Its bytes.
        shape: Its shape.
        grade: See `Handle`.
        work: What rebuilding costs, in floating-point operations or as much time.
        is_view: Whether it takes no memory of its own.
    """

    __slots__ = ("_memo", "_rebuild", "_task", "_threads", "_uses", "_uses_left", "inputs", "is_view", "work")

    def __init__(
        self,
        rebuild: Rebuild,
        inputs: Sequence[Handle],
        nbytes: int,
        shape: tuple[int, ...],
        grade: int,
        work: float,
        *,
        is_view: bool = False,
    ) -> None:
        super().__init__(nbytes, shape, grade)
        self._rebuild, self.inputs, self.work, self.is_view = rebuild, tuple(inputs), work, is_view
        self._uses = self._uses_left = 0
        self._task = -1
        self._memo: torch.Tensor | None = None
        self._threads = torch.get_num_threads()

    def saved_once_more(self) -> None:
        """Another operation will ask for it."""
        self.is_saved = True
        self._uses += 1

    def value(self) -> torch.Tensor:
        """The value, rebuilt or from another use in the same backward pass."""
        self._enter_task()
        if self._memo is not None:
            return self._memo
        made = self._made()
        if self._uses_left > 0:
            self._remember(made)
        return made

    def unpacked(self) -> torch.Tensor:
        """The value; the last operation that saved it lets go of it."""
        self._enter_task()
        self._uses_left -= 1
        made = self._memo if self._memo is not None else self._made()
        if self._uses_left > 0:
            self._remember(made)
        else:
            self._memo = None
        return made

    def _enter_task(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:
            # Outside of a backward pass (somebody looks at what a node saved) nothing is remembered.
            self._task, self._memo = task, None
            self._uses_left = self._uses if task != -1 else 0

    def _remember(self, made: torch.Tensor) -> None:
        if self._memo is None:
            self._memo = made
            # A pass over a part of the graph may not come to the last use.
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)

    def forget(self) -> None:
        """Let go of a value that was shared."""
        self._memo = None

    def _made(self) -> torch.Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            threads = torch.get_num_threads()
            if threads != self._threads:  # some kernels give other last bits with another number of threads
                torch.set_num_threads(self._threads)
                stack.callback(torch.set_num_threads, threads)
            return self._rebuild(*[each.value() for each in self.inputs])


def unpack(handle: Handle) -> torch.Tensor:
    """What is given to autograd as the hook for unpacking.

    Autocast is off: a backward pass inside an autocast region would otherwise rebuild in another precision.
    """
    if isinstance(handle, Kept):
        return handle.value()
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return handle.unpacked()
    return handle.unpacked()
