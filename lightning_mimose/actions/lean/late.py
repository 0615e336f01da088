"""Values whose source is saved after them: kept until then, and rebuilt from it from then on.

`sigmoid` saves its result before the product of `x * sigmoid(x)` saves `x`. Whoever has the handle by then, autograd
among them, has one that changes: so never more is kept than without it, and less as soon as the source is.

In backward the source's own operation comes first, then, and lets go of it before the value's last use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

from lightning_mimose.actions.lean.handles import Handle, View, current_stream
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.sites import Spot
from lightning_mimose.actions.lean.values import Key

_COPIED = tuple(name for name in Recipe.__slots__ if name != "_switches")
"""What a value's own recipe tells; the switches are those that its operation ran with, not its source's."""


class Late(Recipe):
    """A tensor that is kept as long as nothing is from which it could be rebuilt.

    Nothing may be made from it before: recipes count the operations that lead to them when they are made.

    Attributes:
        is_kept: Whether that is still so.
    """

    __slots__ = ("_lock", "_stayed", "is_kept")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(torch.clone, (), tensor.nbytes, tuple(tensor.shape), 0, 0.0)
        self.is_kept = True
        self._lock = threading.RLock()
        self._stayed: tuple[int, torch.cuda.Event | None] | None = None
        """Where it was made for good: the stream, and when it is ready there."""
        self.keep(tensor)

    @property
    def kept_storage(self) -> torch.UntypedStorage | None:
        """Of the tensor, as long as it is kept."""
        return None if self._kept is None else self._kept.kept_storage

    @property
    def is_intact(self) -> bool:
        """Whether nobody has changed the tensor."""
        return self._kept is None or self._kept.is_intact

    def become(self, recipe: Recipe) -> None:
        """Be rebuilt by a recipe from now on, and let go of the tensor."""
        for name in _COPIED:
            setattr(self, name, getattr(recipe, name))
        self._count(1)
        self.grade = recipe.grade
        self.is_kept = False
        self._kept = None

    def value(self) -> torch.Tensor:
        """As of others; once it is there again its source is let go of, if no later pass may ask for it anew."""
        with self._lock:  # another thread's pass may be at the same
            made = super().value()
            if self._memo is made and not self.is_handed_on and not _keeps_graph():
                self._stayed = self._task[1], torch.cuda.current_stream().record_event() if made.is_cuda else None
                self.keep(made)
                self._count(-1)
                self.inputs, self._memo = (), None
        stream, ready = self._stayed or (0, None)
        if ready is not None and stream != current_stream():
            torch.cuda.current_stream().wait_event(ready)
            made.record_stream(torch.cuda.current_stream())
        return made

    def forget_if_last(self) -> None:
        """Not of what could not be made once more."""
        if self._stayed is None:
            super().forget_if_last()

    def forget(self) -> None:
        """What cannot be made once more is there to its last use, in a later pass if this one does not come to it."""
        super().forget()
        if self._stayed is not None and not self.uses and not self.builds:
            self._kept = None


def _keeps_graph() -> bool:
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


class Waiting:
    """A value that is not rebuilt from what it could be.

    Attributes:
        handle: By which it is packed. In a survey, whose grade has everything, also one that would need a product only
            as long as its source is not saved.
        key: Of the value, not kept alive beyond the forward.
        number: Which saved tensor it is.
        spots: Where it was packed so far.
        tensor: The tensor, as long as the forward has it.
    """

    __slots__ = ("handle", "key", "number", "spots", "tensor")

    def __init__(self, handle: Recipe, key: Key, number: int, tensor: torch.Tensor) -> None:
        self.handle, self.key, self.number = handle, key, number
        self.spots: list[Spot] = []
        self.tensor = weakref.ref(tensor)

    @property
    def may_change(self) -> bool:
        """Whether nothing was made from it, and nobody has changed it."""
        handle = self.handle
        return not handle.builds and (not isinstance(handle, Late) or (handle.is_kept and handle.is_intact))


class WaitingRoom:
    """Values that wait for others to be saved.

    Attributes:
        awaited: By what they wait for.
    """

    def __init__(self) -> None:
        self.awaited: dict[Key, list[Waiting]] = {}
        self._by_source: dict[int, list[Waiting]] = {}
        self._by_handle: dict[int, Waiting] = {}

    def clear(self) -> None:
        """The forward is over: they stay what they are."""
        self.awaited.clear()
        self._by_source.clear()
        self._by_handle.clear()

    def wait(self, tensor: torch.Tensor, key: Key, number: int, awaited: Iterable[Key]) -> Late:
        """Keep a tensor until one of several values is saved."""
        late = Late(tensor)
        self._by_handle[id(late)] = Waiting(late, key, number, tensor)
        self.wait_on(late, awaited)
        return late

    def wait_on(self, late: Late, awaited: Iterable[Key]) -> None:
        """It waits for other values than it did."""
        for each in awaited:
            self.awaited.setdefault(each, []).append(self._by_handle[id(late)])

    def packed(self, handle: Recipe, spot: Spot | None) -> None:
        """One that waits was packed, once more or for the first time."""
        if spot is not None:
            self._by_handle[id(handle)].spots.append(spot)

    def wait_for_less(self, recipe: Recipe, key: Key, number: int, tensor: torch.Tensor) -> None:
        """A recipe that needs a higher grade than its own as long as nobody saves what it is made from."""
        waiting = Waiting(recipe, key, number, tensor)
        for source in _unsaved(recipe):
            self._by_source.setdefault(id(source), []).append(waiting)

    def lower(self, source: Handle) -> list[Recipe]:
        """What a survey's recipes are made from is saved for the first time: that is there in any grade.

        Returns:
            Those whose tensors the forward has let go of before: lower grades than theirs spare them from now on.
        """
        late = []
        for each in self._by_source.pop(id(source), ()) if self._by_source else ():
            if each.may_change:
                grade = least_grade(each.handle)
                if grade < each.handle.grade and each.tensor() is None:
                    late.append(each.handle)
                each.handle.grade = grade
        return late


def _unsaved(recipe: Recipe) -> Iterable[Recipe]:
    """What is made on the way to a value, and is saved by nobody."""
    for each in recipe.inputs:
        base = each.base if isinstance(each, View) else each
        if isinstance(base, Recipe) and not base.is_saved:
            yield base
            yield from _unsaved(base)


def least_grade(recipe: Recipe) -> int:
    """The least grade that has a recipe by now, as well as what is made on the way to it."""
    grade = recipe.own_grade
    for each in recipe.inputs:
        base = each.base if isinstance(each, View) else each
        if isinstance(base, Recipe) and not base.is_saved:
            base.grade = least_grade(base)
        grade = max(grade, base.needed_grade)
    return grade
