"""Split: a unit runs on a part of the batch at a time, and each part is recomputed by itself in backward.

Only one part's working set is ever there. It is for units whose own working set breaks the budget (attention
probabilities, wide MLPs, logits); results are equal to rounding, for kernels add up in another order on fewer rows. A
unit can be split if each row of its result depends on the same row of its arguments alone: found out by running it
both ways. One that writes state (BatchNorm) or draws random numbers (dropout in training) would not do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mimose.actions.again import running_again
from lightning_mimose.actions.recompute import recompute
from lightning_mimose.actions.state import WrittenState, put_back
from lightning_mimose.errors import MimoseError, is_out_of_memory

CHUNKS = (2, 4, 8)
"""Into how many parts a batch may be split."""
SPLITS = tuple(f"split{chunks}" for chunks in CHUNKS)
"""Names of the actions."""

ROWS_MIX = "its results for a part of the batch are not those for the whole batch"
RANDOM = "it draws random numbers"
WRITES = "its forward writes state"
HOOKS = "hooks of modules inside it would see parts of the batch"

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Share of the largest result by which results may differ."""


class Seam(NamedTuple):
    """Where a unit is cut and put together.

    Attributes:
        cut: For every leaf of its arguments, whether each part is given its own rows of it.
        joined: For every leaf of its results, whether it is put together from the parts; otherwise all parts make the
            same (T5's position bias).
    """

    cut: tuple[bool, ...]
    joined: tuple[bool, ...]


class Divisible:
    """What is known of splitting one unit, for each form of its arguments.

    Attributes:
        reason: Why it cannot be split; None as long as nothing was found.
    """

    def __init__(self) -> None:
        self._seams: dict[tuple[TreeSpec, tuple[Any, ...]], Seam] = {}
        self.reason: str | None = None

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments of this form were tried, or need not be."""
        leaves, spec = tree_flatten((args, kwargs))
        return self.reason is not None or (spec, _form(leaves)) in self._seams

    def seam(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: WrittenState) -> Seam | None:
        """How to split a call with these arguments; None if it cannot be."""
        leaves, spec = tree_flatten((args, kwargs))
        if self.reason is not None or _rows(leaves) < 2 or _hooked(state):
            return None
        return self._seams.get((spec, _form(leaves)))

    def learn(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: WrittenState,
    ) -> None:
        """Run the unit as a whole and in two parts, without gradients, and compare.

        Args:
            original: Its own forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            state: What it is known to write.
        """
        leaves, spec = tree_flatten((args, kwargs))
        rows = _rows(leaves)
        if rows < 2:
            return
        if _hooked(state):
            self.reason = HOOKS
            return
        cut = tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves)
        devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda})
        generators = [torch.random.get_rng_state, *(lambda d=d: torch.cuda.get_rng_state(d) for d in devices)]
        with torch.random.fork_rng(devices=devices), torch.no_grad(), running_again():
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            drawn = [get() for get in generators]
            before = state.before_forward()
            try:
                whole = _run(original, copies, spec)
                parts = [_run(original, part, spec) for part in _parts(copies, cut, -(-rows // 2))]
            except MimoseError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.reason = f"it cannot run on a part of the batch ({type(error).__name__}: {error})"
                return
            finally:
                written = state.after_forward(before)
                put_back(written)
            if any(not torch.equal(old, get()) for old, get in zip(drawn, generators, strict=True)):
                self.reason = RANDOM
            elif written:
                self.reason = WRITES
            else:
                joined = [_joined(one, others, rows) for one, *others in zip(whole, *parts, strict=False)]
                if None in joined or any(len(part) != len(whole) for part in parts):
                    self.reason = ROWS_MIX
                else:
                    self._seams[spec, _form(leaves)] = Seam(cut, tuple(map(bool, joined)))


def run_split(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seam: Seam,
    chunks: int,
    state: WrittenState,
) -> Any:
    """Run a unit's forward in parts, each a checkpointed region, and put the results together.

    Args:
        original: The unit's own forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        seam: Where to cut.
        chunks: Into how many parts at most.
        state: The unit's written state; nothing is in it but what other modes write.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given = _parts(leaves, seam.cut, -(-_rows(leaves) // chunks))
    outs, shape = [], None
    for part in given:
        part_args, part_kwargs = tree_unflatten(part, spec)
        found, shape = tree_flatten(recompute(original, part_args, part_kwargs, state))
        outs.append(found)
    assert shape is not None
    columns = zip(zip(*outs, strict=True), seam.joined, strict=True)
    whole = [torch.cat(column) if is_joined else column[0] for column, is_joined in columns]
    return tree_unflatten(whole, shape)


def _rows(leaves: Sequence[Any]) -> int:
    """The size of the batch: of what gradients flow through, or else of the first tensor; 0 if there is none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    flowing = [leaf for leaf in tensors if leaf.requires_grad]
    return int((flowing or tensors)[0].shape[0]) if tensors else 0


def _form(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What tells forms of arguments apart: of tensors whether they have the batch's rows, and other values."""
    rows = _rows(leaves)
    return tuple(
        (leaf.dim(), leaf.dim() > 0 and leaf.shape[0] == rows)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, (bool, str, type(None)))
        else type(leaf)
        for leaf in leaves
    )


def _parts(leaves: Sequence[Any], cut: Sequence[bool], rows: int) -> list[list[Any]]:
    # `split` and not slices: its backward collects the parts' gradients once, each slice's would fill a whole tensor.
    columns = [leaf.split(rows) if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
    count = max(len(column) for column, is_cut in zip(columns, cut, strict=True) if is_cut)
    return [
        [column[i] if is_cut else column for column, is_cut in zip(columns, cut, strict=True)] for i in range(count)
    ]


def _run(original: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec) -> list[Any]:
    args, kwargs = tree_unflatten(list(leaves), spec)
    return tree_flatten(original(*args, **kwargs))[0]


def _joined(one: Any, others: Sequence[Any], rows: int) -> bool | None:
    """Whether a result is put together from those of the parts, or is the same in each; None if neither."""
    if not isinstance(one, torch.Tensor):
        return None if any(isinstance(other, torch.Tensor) or other != one for other in others) else False
    if not all(isinstance(other, torch.Tensor) and other.dtype == one.dtype for other in others):
        return None
    if all(other.shape == one.shape and torch.equal(other, one) for other in others):
        return False
    if not one.dim() or one.shape[0] != rows or any(other.shape[1:] != one.shape[1:] for other in others):
        return None
    together = torch.cat(list(others))
    return True if together.shape == one.shape and _close(one, together) else None


def _hooked(state: WrittenState) -> bool:
    """Whether something listens to modules inside the unit (Hugging Face collects router logits like that)."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in state.modules()[1:])


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype not in _TOLERANCE:
        return torch.equal(one, other)
    largest = one.nan_to_num(0, 0, 0).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE[one.dtype] * largest, equal_nan=True)
