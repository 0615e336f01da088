"""One operation of autograd's graph as recipes see it: what it saved, and what its inputs are rebuilt from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mimose.actions.lean.attention import added_mask
from lightning_mimose.actions.lean.handles import Handle, Number
from lightning_mimose.actions.lean.recipes.table import MissingError

if TYPE_CHECKING:
    from lightning_mimose.actions.lean.saves import LeanSaves


class Node:
    """See `table.Node`.

    Args:
        saves: Knows what the unit has saved so far.
        raw: Autograd's own node.
        depth: Operations between it and the one whose result is wanted.
    """

    __slots__ = ("_depth", "_saves", "raw")

    def __init__(self, saves: LeanSaves, raw: Any, depth: int) -> None:
        self._saves, self.raw, self._depth = saves, raw, depth

    @property
    def shape(self) -> tuple[int, ...]:
        """See `table.Node`."""
        return tuple(self.raw._input_metadata[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `table.Node`."""
        dtype: torch.dtype = self.raw._input_metadata[0].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """See `table.Node`."""
        device: torch.device = self.raw._input_metadata[0].device
        return device

    def saved(self, name: str) -> Handle | None:
        """See `table.Node`."""
        data = getattr(getattr(self.raw, f"_raw_saved_{name}", None), "data", None)
        data = getattr(data, "handle", data)  # of a use, or of a survey's stand-in
        return data if isinstance(data, Handle) and data.owner is self._saves.owner else None

    def edge(self, index: int) -> Handle:
        """See `table.Node`."""
        following = self.raw.next_functions
        node, output = following[index] if index < len(following) else (None, 0)
        found = None if node is None else self._saves.rebuilt(node, output, self._depth + 1)
        if found is None:
            raise MissingError
        return found

    def scores(self) -> Handle:
        """See `table.Node`."""
        self._saves.in_scores = True
        try:
            return self.edge(0)
        finally:
            self._saves.in_scores = False

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
        with _disable_current_modes():  # which would be given a float where they expect a tensor
            return Number(number.item())

    def given(self, tensor: torch.Tensor) -> Handle | None:
        """See `table.Node`."""
        return self._saves.given(tensor)

    def mask(self) -> Handle | None:
        """See `table.Node`."""
        masked = self._saves.notes.masked
        edges = self.raw.next_functions
        if masked is None or self.raw._sequence_nr() < masked.start or len(edges) < 2 or edges[1][0] is not None:
            return None
        given = None if masked.mask is None else self._saves.given(masked.mask)
        if given is None and masked.mask is not None:
            return None
        return added_mask(masked, self.raw._input_metadata[0], given)

    def constant(self, name: str) -> Any:
        """See `table.Node`."""
        return self._saves.notes.seen.get(self.raw, {}).get(name)
