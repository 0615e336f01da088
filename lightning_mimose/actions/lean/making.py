"""What it takes to make a value that is rebuilt: bytes on the way, and operations."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from lightning_mimose.actions.lean.handles import FEW_OPERATIONS, Handle, Rebuilt, View, with_sources
from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.recipes.table import ALLOCATED, MASK


class _Making(NamedTuple):
    """What it takes to make a value: bytes on the way and afterwards, the value's included, and operations."""

    peak_bytes: int = 0
    left_bytes: int = 0
    work: float = 0.0


def _making(handle: Handle, items: dict[int, int], also: set[int]) -> _Making:
    """What it takes in backward.

    Args:
        handle: The value.
        items: Handles that are saved themselves -> their index: rebuilt on the way they stay, and are paid for there.
        also: Filled with those.
    """
    if isinstance(handle, Mask):
        return _Making(handle.nbytes + handle.temporary_bytes, handle.nbytes, MASK * prod(handle.shape))
    if not isinstance(handle, Recipe) or handle.is_kept:
        return _Making()
    peak, left, work = 0, 0, handle.work
    for each in handle.inputs:
        base = each.base if isinstance(each, View) else each
        if id(base) in items:
            if isinstance(base, Rebuilt):
                also.add(items[id(base)])
            continue
        made = _making(base, items, also)
        peak, left, work = max(peak, left + made.peak_bytes), left + made.left_bytes, work + made.work
    if handle.is_view:
        return _Making(peak, left, work)
    if handle.overwritten is not None:
        return _Making(max(peak, left), handle.nbytes, work - ALLOCATED * prod(handle.shape))
    return _Making(max(peak, left + handle.nbytes), handle.nbytes, work)


def rebuilding(handle: Handle, items: dict[int, int], also: set[int]) -> tuple[int, float]:
    """Bytes that live besides a value while it is rebuilt, and the operations that takes.

    Args:
        handle: The value.
        items: Handles that are saved themselves -> their index: rebuilt on the way they stay, and are paid for there.
        also: Filled with those.
    """
    found = _making(handle, items, also)
    return max(found.peak_bytes - handle.nbytes, 0), found.work


def comparing_bytes(handle: Handle, *, on_host: bool) -> int:
    """Bytes that comparing a value with what is saved takes: what it is made from is there only if it is kept.

    Args:
        handle: The value.
        on_host: Whether it is a tensor of the CPU's.
    """
    rebuilt = handle.rebuilt
    if rebuilt is None:
        return 0
    behind = with_sources([rebuilt], past_kept=False)
    made = [each for each in behind if isinstance(each, Rebuilt) and not (isinstance(each, Recipe) and each.is_view)]
    peak = sum(each.nbytes for each in made)  # all of it is there to the end, see `rebuilt_now`
    if rebuilt.operations <= FEW_OPERATIONS:
        # Nothing stays but what is in use, and in a recomputation something that is saved itself.
        stays = max((each.nbytes for each in made if each.is_saved and each is not rebuilt), default=0)
        peak = min(peak, _in_any_order(rebuilt)[0] + stays)
    # Accelerators compare every element first: a byte for each, of two at least.
    return peak if on_host else peak + handle.nbytes // 2


def _in_any_order(handle: Handle) -> tuple[int, int]:
    """Bytes on the way to a value, whichever of its inputs is made first, and afterwards."""
    base = handle.base if isinstance(handle, View) else handle
    if not isinstance(base, Rebuilt) or base.is_kept:
        return 0, 0
    if not isinstance(base, Recipe):
        made = _making(base, {}, set())
        return made.peak_bytes, made.left_bytes
    inputs = [_in_any_order(each) for each in base.inputs]
    left = sum(left for _, left in inputs)
    peak = max((peak + left - own for peak, own in inputs), default=0)
    if base.is_view:
        return peak, left
    return max(peak, left + (0 if base.overwritten is not None else base.nbytes)), base.nbytes
