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

from lightning_mimose.actions.again import running_again
from lightning_mimose.actions.copies import held_in, put_back
from lightning_mimose.actions.parametrized import cached_again, cached_in
from lightning_mimose.actions.recompute import recompute
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.stored import left_alone
from lightning_mimose.actions.structures import flatten, unflatten
from lightning_mimose.errors import MimoseError, is_out_of_memory

ROWS_MIX = "its results for a part of the batch are not those for the whole batch"
RANDOM = "it draws random numbers"
WRITES = "its forward writes state"
HOOKS = "hooks of modules inside it would see parts of the batch"
FILLS = "it fills a container that it is given"

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Share of the largest result by which results may differ."""
_COMPARABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class CannotSplitError(Exception):
    """A unit turned out not to be divisible; the message says why."""


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
    """What is known of splitting one unit, for each mode and form of its arguments.

    Args:
        state: What the unit is known to write.
    """

    def __init__(self, state: WrittenState) -> None:
        self._state = state
        self._known: dict[Any, Seam | str] = {}

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seam | str | None:
        """How to split a call with these arguments, or why it cannot be; None if that was not tried."""
        if _hooked(self._state):
            return HOOKS
        return self._known.get(self._key(args, kwargs))

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Never split a call with such arguments."""
        self._known[self._key(args, kwargs)] = reason

    def learn(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seam | str | None:
        """Run the unit as a whole and in two parts, without gradients, and compare.

        Args:
            original: Its own forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            As `known`; None if there is but one row.
        """
        if _rows(flatten((args, kwargs))[0]) < 2:
            return None
        try:
            found: Seam | str = HOOKS if _hooked(self._state) else self._tried(original, args, kwargs)
        except CannotSplitError as error:
            found = str(error)
        except MimoseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = f"it cannot run on a part of the batch ({type(error).__name__}: {error})"
        if found != HOOKS:  # which may go again
            self._known[self._key(args, kwargs)] = found
        return found

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells calls apart: modes, and of the arguments which are tensors with the batch's rows, and values."""
        leaves, spec = flatten((args, kwargs))
        rows = _rows(leaves)
        form = tuple(
            (leaf.dim(), leaf.dim() > 0 and leaf.shape[0] == rows)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if isinstance(leaf, _COMPARABLE)
            else type(leaf)
            for leaf in leaves
        )
        return spec, form, tuple([module.training for module in self._state.modules()])

    def _tried(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seam | str:
        leaves, spec = flatten((args, kwargs))
        rows = _rows(leaves)
        cut = tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves)
        devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda})
        generators = [torch.random.get_rng_state, *(lambda d=d: torch.cuda.get_rng_state(d) for d in devices)]
        modules, cached = self._state.modules(), cached_again(cached_in(self._state.modules))
        with torch.random.fork_rng(devices=devices), running_again(), left_alone(modules), cached:
            copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            drawn = [get() for get in generators]
            before, held = self._state.before_forward(), held_in(modules)
            try:
                with torch.no_grad():
                    whole = _run(original, copies, spec)
                    joined = _compared(
                        whole, (_run(original, part, spec) for part in _parts(copies, cut, -(-rows // 2)))
                    )
                if False in joined and _depends(original, copies, cut, spec, joined):
                    joined = [None]
            finally:
                written = self._state.after_forward(before)
                put_back(written)
                held.clear()
            if any(not torch.equal(old, get()) for old, get in zip(drawn, generators, strict=True)):
                return RANDOM
        if written:
            return WRITES
        return ROWS_MIX if None in joined else Seam(cut, tuple(map(bool, joined)))


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

    Raises:
        CannotSplitError: The parts do not fit together after all. Nothing has changed but what a part filled.
    """
    leaves, spec = flatten((args, kwargs))
    outs, shape = [], None
    for part in _parts(leaves, seam.cut, -(-_rows(leaves) // chunks)):
        part_args, part_kwargs = unflatten(part, spec)
        found, found_shape = flatten(recompute(original, part_args, part_kwargs, state))
        _refuse_filled(part, spec, part_args, part_kwargs)
        if len(found) != len(seam.joined) or (shape is not None and found_shape != shape):
            raise CannotSplitError(ROWS_MIX)
        shape = found_shape
        outs.append(found)
    columns = list(zip(zip(*outs, strict=True), seam.joined, strict=True))
    if any(is_joined and len({each.shape[1:] for each in column}) > 1 for column, is_joined in columns):
        raise CannotSplitError("the shape of its results depends on what is in the batch")
    whole = [torch.cat(column) if is_joined else column[0] for column, is_joined in columns]
    assert shape is not None
    return unflatten(whole, shape)


def _rows(leaves: Sequence[Any]) -> int:
    """The size of the batch: of what gradients flow through, or else of the first tensor; 0 if there is none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    flowing = [leaf for leaf in tensors if leaf.requires_grad]
    return int((flowing or tensors)[0].shape[0]) if tensors else 0


def _parts(leaves: Sequence[Any], cut: Sequence[bool], rows: int) -> list[list[Any]]:
    # `split` and not slices: its backward collects the parts' gradients once, each slice's would fill a whole tensor.
    columns = [leaf.split(rows) if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
    count = max(len(column) for column, is_cut in zip(columns, cut, strict=True) if is_cut)
    return [
        [column[i] if is_cut else column for column, is_cut in zip(columns, cut, strict=True)] for i in range(count)
    ]


def _run(original: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[Any]:
    args, kwargs = unflatten(list(leaves), spec)
    out = flatten(original(*args, **kwargs))[0]
    _refuse_filled(leaves, spec, args, kwargs)
    return out


def _refuse_filled(leaves: Sequence[Any], spec: Any, args: Any, kwargs: Any) -> None:
    """What a part puts into a list that it is given would be lost: it was given one of its own."""
    after, spec_after = flatten((args, kwargs))
    if spec_after != spec or any(one is not other for one, other in zip(leaves, after, strict=True)):
        raise CannotSplitError(FILLS)


def _compared(whole: Sequence[Any], parts: Any) -> list[bool | None]:
    """For every result whether it is put together from those of the parts, or is the same in each; None if neither.

    One part is there at a time, for results may be as large as all else.
    """
    same, joined, row = [True] * len(whole), [True] * len(whole), [0] * len(whole)
    for part in parts:
        if len(part) != len(whole):
            return [None]
        for i, (one, other) in enumerate(zip(whole, part, strict=True)):
            if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
                return [None]
            if not isinstance(one, torch.Tensor):
                same[i] = same[i] and isinstance(one, _COMPARABLE) and type(one) is type(other) and one == other
                joined[i] = False
                continue
            same[i] = same[i] and one.shape == other.shape and torch.equal(one, other)
            rows = other.shape[0] if other.dim() else 0
            joined[i] = (
                joined[i]
                and bool(one.dim())
                and bool(other.dim())
                and one.dtype == other.dtype
                and one[row[i] : row[i] + rows].shape == other.shape
                and _close(one[row[i] : row[i] + rows], other)
            )
            row[i] += rows
    found: list[bool | None] = []
    for i, one in enumerate(whole):
        ends = isinstance(one, torch.Tensor) and one.dim() > 0 and row[i] == one.shape[0]
        found.append(False if same[i] else True if joined[i] and ends else None)
    return found


def _depends(
    original: Callable[..., Any], leaves: Sequence[Any], cut: Sequence[bool], spec: Any, joined: Sequence[bool | None]
) -> bool:
    """Whether a result that came out the same for all parts depends on what is in them: tried with one row.

    What is multiplied by a weight that is still zero is the same for everybody.
    """
    row, flowing = [], []
    for leaf, is_cut in zip(leaves, cut, strict=True):
        one = leaf[:1].detach() if is_cut else leaf
        if is_cut and (one.is_floating_point() or one.is_complex()):
            flowing.append(one.requires_grad_())
            one = one.view_as(one)  # no leaf: a unit may write into what it is given
        row.append(one)
    with torch.enable_grad():
        out = _run(original, row, spec)
        shared = [result for result, is_joined in zip(out, joined, strict=True) if is_joined is False]
        made = [result for result in shared if isinstance(result, torch.Tensor) and result.requires_grad]
        if not flowing or not made:
            return False
        found = torch.autograd.grad([result.sum() for result in made], flowing, allow_unused=True)
    return any(gradient is not None for gradient in found)


def _hooked(state: WrittenState) -> bool:
    """Whether something listens to modules inside the unit (Hugging Face collects router logits like that)."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in state.modules()[1:])


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype not in _TOLERANCE:
        return torch.equal(one, other)
    largest = max(float(one.nan_to_num(0, 0, 0).abs().max()), 0.0) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE[one.dtype] * largest, equal_nan=True)
