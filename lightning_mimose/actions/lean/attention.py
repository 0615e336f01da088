"""What torch's own attention adds to its scores: a mask, which autograd's nodes know nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lightning_mimose.actions.lean.handles import Handle
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.recipes.table import LIGHT
from lightning_mimose.menu import ATTENTION


class Masked(NamedTuple):
    """What a call of attention adds to its scores.

    Attributes:
        mask: The mask that it was given; None where it makes a causal one.
        start: The number of autograd's next node when it was called: earlier ones are somebody else's.
        cast: What autocast makes of a mask of numbers, if anything.
    """

    mask: torch.Tensor | None
    start: int
    cast: torch.dtype | None

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Masked | None:
        """Of a call that is about to be made; None if it is none of attention, or without a mask."""
        if func is not functional.scaled_dot_product_attention:
            return None
        mask, causal = argument(args, kwargs, 3, "attn_mask", None), argument(args, kwargs, 5, "is_causal", False)
        if mask is None and not causal:
            return None
        cast = None
        if mask is not None and mask.dtype in _CAST and torch.is_autocast_enabled(mask.device.type):
            cast = torch.get_autocast_dtype(mask.device.type)
        return cls(mask, torch._C._autograd._get_sequence_nr(), cast)


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    """An argument that may be given by its place or by its name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def added_mask(masked: Masked, like: Any, given: Handle | None) -> Recipe:
    """A mask as it is added to the scores.

    Args:
        masked: The call.
        like: Shape, dtype and device of the scores.
        given: Its mask, bools or numbers; None for the causal one.
    """
    dtype, device, cast = like.dtype, like.device, masked.cast or like.dtype
    shape = tuple(like.shape[-2:]) if given is None else given.shape

    def rebuild(*mask: torch.Tensor) -> torch.Tensor:
        allowed = mask[0] if mask else torch.ones(shape, dtype=torch.bool, device=device).tril_()
        if allowed.dtype != torch.bool:
            return allowed.to(cast).to(dtype)
        nothing, all_of_it = (torch.full((), number, dtype=dtype, device=device) for number in (0.0, -torch.inf))
        return torch.where(allowed, nothing, all_of_it)

    inputs = [] if given is None else [given]
    recipe = Recipe(rebuild, inputs, prod(shape) * dtype.itemsize, shape, ATTENTION, LIGHT * prod(shape))
    recipe.identity = hash(("mask", len(inputs)))
    return recipe
