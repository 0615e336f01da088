"""What a step does with gradients: in steps that do something else the loss, or the model, is another one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

_ONCE = (False, False)


@dataclass
class _Pass:
    """One backward pass, and the forward before it.

    Attributes:
        nodes: Operations with gradients that its forward had.
        ways: Of each backward over its loss, whether it kept the graph, and whether it made one of its own.
    """

    nodes: int
    ways: set[tuple[bool, bool]] = field(default_factory=set)


class Passes:
    """Counts operations with gradients in this thread, and looks at how each loss goes back.

    Example:
        >>> passes, weight = Passes(), torch.ones(2, requires_grad=True)
        >>> def step(**options: bool) -> Hashable:
        ...     passes.begin()
        ...     loss = (weight * weight).sum()
        ...     passes.begin_backward(loss)
        ...     loss.backward(**options)
        ...     passes.end_backward()
        ...     return passes.end()
        >>> step(), step(), step(retain_graph=True) == step(), passes.end()
        (2, 2, False, None)
    """

    def __init__(self) -> None:
        self._began: int | None = None
        self._passes: list[_Pass] = []
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """The step's forward begins."""
        self.drop()
        self._began = torch._C._autograd._get_sequence_nr()

    def begin_backward(self, loss: torch.Tensor | None = None, own: int = 0) -> None:
        """A forward is over.

        Args:
            loss: What goes back.
            own: How many of the operations were ours.
        """
        if self._began is None:
            return
        self._passes.append(new := _Pass(self._counted(own)))
        self._began = None
        if loss is None or loss.grad_fn is None:
            new.ways.add(_ONCE)
        else:
            ways = new.ways  # alone: the graph must not hold us

            def look(_: object) -> None:
                # In backward gradients are enabled where it makes a graph of its own.
                ways.add((torch._C._autograd._get_current_graph_task_keep_graph(), torch.is_grad_enabled()))

            self._handles.append(loss.grad_fn.register_prehook(look))

    def end_backward(self) -> None:
        """A backward pass is over: another forward may follow."""
        if self._passes:
            self._began = torch._C._autograd._get_sequence_nr()

    def end(self, own: int = 0) -> Hashable | None:
        """All of them are over: what stands for what they did, or None if there were none since the last end.

        The number of the forward's operations, in most steps. How many passes alike follow the first does not matter:
        a batch may come in as many parts as it has room for.

        Args:
            own: How many of the operations since the last pass were ours.
        """
        passes = list(self._passes)
        if passes and self._began is not None and (nodes := self._counted(own)):
            passes.append(_Pass(nodes))  # one that nobody has announced
        self.drop()
        if not passes:
            return None
        first, *later = passes
        if not later and first.ways == {_ONCE}:  # none of them: parts of the loss went back, and it did not
            return first.nodes
        return first.nodes, frozenset(first.ways), frozenset((each.nodes, frozenset(each.ways)) for each in later)

    def _counted(self, own: int) -> int:
        """Operations since the last pass."""
        return torch._C._autograd._get_sequence_nr() - (self._began or 0) - own

    def drop(self) -> None:
        """Leave no hooks behind."""
        while self._handles:
            self._handles.pop().remove()
        self._passes.clear()
        self._began = None
