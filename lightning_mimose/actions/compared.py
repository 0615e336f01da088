"""A forward whose recomputation in backward is compared with it, in every step that is measured.

What it is given then may be stand-ins for what it was given. Those differ in what no value shows: in their `id()`, and
in what made them; a unit that goes by either (a cache that is keyed by `id(x)`) computes something else. And by the
time of backward other things may have changed that no module holds: a global, a configuration, a context that was
entered around the forward. Backward takes from a recomputation what was saved and nothing else, so that gradients are
right if that is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mimose.actions.checksum import sample
from lightning_mimose.errors import MimoseError, RecomputeError, is_out_of_memory
from lightning_mimose.parts import plain_parts

TELLS_APART = (
    "it computes something else in backward, where other tensors on the same memory stand for what it was given; "
    "it is given the very same ones from now on"
)
GOES_BY_OTHERS = (
    "it computes something else in backward than in forward, from the same tensors: it goes by something outside of it "
    "(a global, a configuration, a context around the call)"
)
MOST_READ = 3
"""Recomputations that are read in full, of units that are given no stand-ins."""


@dataclass
class Verdict:
    """What comparisons have shown of one kind of unit.

    Attributes:
        alike: Whether a recomputation on stand-ins was compared in full, and has saved the same; then samples do.
        tells_apart: Whether one has saved something else: such units are given no stand-ins.
        goes_by_others: Whether one has saved something else even so: no unit of the kind is recomputed.
        read: How often since then, or ever, one that was given none was compared in full: samples do after some.
    """

    alike: bool = False
    tells_apart: bool = False
    goes_by_others: bool = False
    read: int = field(default=0, compare=False)


class Compared:
    """A unit's forward; raises where its recomputation saves something else.

    Args:
        unit: The unit's name.
        original: Its own forward.
        originals: What stand-ins stand for; nothing, if it is given none.
        verdict: What is known of units of its kind, and learns what is found.
    """

    def __init__(
        self,
        unit: str,
        original: Callable[..., Any],
        originals: Collection[weakref.ref[torch.Tensor]],
        verdict: Verdict,
    ) -> None:
        self._unit, self._original, self._originals, self._verdict = unit, original, originals, verdict
        self._whole = (verdict.tells_apart or not verdict.alike) and verdict.read < MOST_READ
        self._saved: list[tuple[Any, ...]] | None = None
        """What the run in forward has saved."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            RecomputeError: It has saved something else than in forward, or failed.
        """
        if self._saved is None:
            with _noted(self._whole) as saved:
                out = self._original(*args, **kwargs)
            self._saved = saved
            return out
        stood_in = any(ref() is None for ref in self._originals)  # else it was given those, and holds them here
        try:
            with _noted(self._whole) as saved:
                out = self._original(*args, **kwargs)
        except Exception as error:
            # It may be its own mistake; then it fails again with what it was given in forward.
            if isinstance(error, MimoseError) or is_out_of_memory(error):
                raise
            raise self._error(stood_in, f" ({type(error).__name__}: {error})") from error
        if saved != self._saved:
            raise self._error(stood_in)
        if stood_in:
            self._verdict.alike |= self._whole
        else:
            self._verdict.read += self._whole
        return out

    def _error(self, stood_in: bool, failed: str = "") -> RecomputeError:
        if not stood_in:
            self._verdict.goes_by_others = True
            return RecomputeError({self._unit: GOES_BY_OTHERS + failed})
        self._verdict.tells_apart, self._verdict.read = True, 0
        return RecomputeError({self._unit: TELLS_APART})


@contextmanager
def _noted(whole: bool) -> Iterator[list[tuple[Any, ...]]]:
    """Note what is saved for backward, as those want it who have hooks around."""
    saved: list[tuple[Any, ...]] = []
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if outer is None:
        yield saved
        return
    pack_outer, unpack_outer = outer

    def pack(tensor: torch.Tensor) -> Any:
        saved.extend(_seen(tensor, whole))
        return pack_outer(tensor)

    with saved_tensors_hooks(pack, unpack_outer):
        yield saved


def _seen(tensor: torch.Tensor, whole: bool) -> Iterator[tuple[Any, ...]]:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):  # it stays as it is, and one that is sharded may be elsewhere
        yield tuple(tensor.shape), tensor.dtype, id(base), tensor.storage_offset(), tensor.stride()
        return
    for part in plain_parts(tensor):
        plain = type(part) in (torch.Tensor, nn.Parameter) and part.layout is torch.strided and not part.is_nested
        content = sample(part, whole=whole) if plain and not (_is_workspace(part) or _may_be_seed(part)) else 0
        yield tuple(part.shape), part.dtype, content


def _may_be_seed(tensor: torch.Tensor) -> bool:
    """Whether it may be a generator's state that attention saves: nobody fills that where there is no dropout."""
    return tensor.numel() <= 2 and tensor.dtype in (torch.int64, torch.uint64)


def _is_workspace(tensor: torch.Tensor) -> bool:
    """Whether it may be what an LSTM saves (oneDNN, cuDNN), of which a part is never written."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1
