"""One operation of autograd's graph as recipes see it: what it saved, and what its inputs are rebuilt from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mimose.actions.lean.attention import added_mask
from lightning_mimose.actions.lean.handles import Handle, Number
from lightning_mimose.actions.lean.recipes.table import MissingError

if TYPE_CHECKING:
    from lightning_mimose.actions.lean.values import Values


class Node:
    """See `table.Node`.

    Args:
        values: What the unit has made so far.
        raw: Autograd's own node.
        depth: Operations between it and the one whose result is wanted.
        output: See `table.Node`.
        is_contiguous: See `table.Node`.
    """

    __slots__ = ("_depth", "_values", "dtype", "is_contiguous", "output", "raw", "shape")

    def __init__(self, values: Values, raw: Any, depth: int, output: int = 0, is_contiguous: bool = True) -> None:
        self._values, self.raw, self._depth, self.output = values, raw, depth, output
        self.is_contiguous = is_contiguous
        result = raw._input_metadata[output]
        if result.is_nested_tensor:  # which may have no shape
            raise MissingError
        self.shape: tuple[int, ...] = tuple(result.shape)
        self.dtype: torch.dtype = result.dtype

    @property
    def device(self) -> torch.device:
        """Of its result."""
        device: torch.device = self.raw._input_metadata[0].device
        return device

    def saved(self, name: str) -> Handle | None:
        """See `table.Node`."""
        data = getattr(getattr(self.raw, f"_raw_saved_{name}", None), "data", None)
        data = getattr(data, "handle", data)  # of a use, or of a survey's stand-in
        return data if isinstance(data, Handle) and data.owner is self._values.owner else None

    def field(self, name: str) -> Any:
        """See `table.Node`."""
        try:
            return getattr(self.raw, f"_saved_{name}")
        except AttributeError:
            raise MissingError from None

    def edge(self, index: int) -> Handle:
        """See `table.Node`."""
        following = self.raw.next_functions
        node, output = following[index] if index < len(following) else (None, 0)
        found = None if node is None else self._values.rebuilt(node, output, self._depth + 1)
        if found is None:
            raise MissingError
        return found

    def scores(self) -> Handle:
        """See `table.Node`."""
        self._values.in_scores = True
        try:
            return self.edge(0)
        finally:
            self._values.in_scores = False

    def operand(self, name: str, index: int) -> Handle:
        """See `table.Node`."""
        saved = self.saved(name)
        if saved is not None:
            return saved
        following = self.raw.next_functions[index][0]
        if following is not None:
            return self.edge(index)
        # A number is saved as a tensor without dimensions, and past every hook. Never `_saved_`: that would unpack.
        number = getattr(getattr(self.raw, f"_raw_saved_{name}", None), "data", None)
        if not isinstance(number, torch.Tensor) or number.dim():
            raise MissingError
        # A mode would be given a float where it expects a tensor; to look for one takes less than to disable none.
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            return Number(number.item())

    def given(self, tensor: torch.Tensor) -> Handle | None:
        """See `table.Node`."""
        return self._values.given(tensor)

    def mask(self) -> Handle | None:
        """See `table.Node`."""
        masked = self._values.notes.masked
        edges = self.raw.next_functions
        if masked is None or self.raw._sequence_nr() < masked.start or len(edges) < 2 or edges[1][0] is not None:
            return None
        given = None if masked.mask is None else self._values.given(masked.mask)
        if given is None and masked.mask is not None:
            return None
        return added_mask(masked, self, given)

    def constant(self, name: str) -> Any:
        """See `table.Node`."""
        return self._values.notes.seen.get(self.raw, {}).get(name)
