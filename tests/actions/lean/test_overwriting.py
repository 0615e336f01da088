"""Results that are written over a value nobody else has: the same bits, in less memory, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.lean.handles import Handle, rebuilt_now
from lightning_mimose.actions.lean.recipes.table import TABLE
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.menu import ATTENTION, ELEMENTWISE
from tests.actions.lean.test_survey import Surveying
from tests.helpers.lean import Watch, assert_lean, same_bits


def softmax_of(scores: Tensor, *, safe: bool) -> tuple[Tensor, Tensor]:
    """As the recipe makes it in new memory, and over the scores; which are used up."""
    node = (torch._safe_softmax if safe else torch.softmax)(scores.clone().requires_grad_(), -1).grad_fn
    made = TABLE["SafeSoftmaxBackward0" if safe else "SoftmaxBackward0"].make(_Node(node))  # type: ignore[arg-type]
    assert made is not None
    over = scores.clone()
    out = made.rebuild(over, out=over)
    assert out.data_ptr() == over.data_ptr()
    return made.rebuild(scores), out


class _Node:
    device, shape = torch.device("cpu"), (5, 7, 9)

    def __init__(self, raw: object) -> None:
        self.raw = raw

    def scores(self) -> None:
        return None

    def field(self, name: str) -> object:
        return getattr(self.raw, f"_saved_{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 127, 255, 256, 511, 1000, 1025, 4099])
def test_softmax_over_its_scores(length: int, dtype: torch.dtype) -> None:
    """Whichever way the kernel takes for a length: vectors, tails, more than a buffer holds."""
    scores = torch.randn(5, 7, length, dtype=dtype)
    for safe in (False, True):
        expected = torch.softmax(scores, -1)
        assert same_bits(softmax_of(scores, safe=safe), (expected, expected))


def test_softmax_of_masked_rows() -> None:
    """Rows without anything, rows that begin with nothing, and rows that are no numbers."""
    scores = torch.randn(6, 33)
    scores[0] = -torch.inf
    scores[1, :7] = -torch.inf
    scores[2, 9:] = -torch.inf
    scores[3, 0] = torch.nan
    scores[4] = -torch.inf
    scores[4, 5] = torch.nan
    scores[5, 3] = torch.inf
    expected = torch._safe_softmax(scores, -1)
    assert same_bits(softmax_of(scores, safe=True), (expected, expected))
    none = torch.randn(4, 0)
    node = _Node(torch._safe_softmax(none.clone().requires_grad_(), -1).grad_fn)
    made = TABLE["SafeSoftmaxBackward0"].make(node)  # type: ignore[arg-type]
    assert made is not None
    assert made.rebuild(none).shape == (4, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_arguments_are_not_written_over(swapped: bool) -> None:
    """The mask is as large as the scores, and somebody else's."""

    def function(watch: Watch, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(q, k)
        probabilities = watch(functional.softmax(mask + scores if swapped else scores + mask, -1))
        return probabilities * torch.ones_like(probabilities, requires_grad=True)

    q, k, mask = torch.randn(4, 33, 16), torch.randn(4, 16, 47), torch.randn(4, 33, 47)
    before = [each.clone() for each in (q, k, mask)]
    assert_lean(function, [q.requires_grad_(), k.requires_grad_(), mask], ATTENTION)
    assert same_bits([q, k, mask], before)


def test_what_an_operation_saved_is_not_written_over() -> None:
    """The activation is rebuilt for its own sake and for the sum's, which is rebuilt before it and after it."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        y = watch(functional.gelu(x))
        z = watch(y + 1)  # saved by both products below, and y by the first
        return (y * w) * z + (z * w).relu()

    x, w = torch.randn(33, 47, requires_grad=True), torch.randn(33, 47, requires_grad=True)
    assert_lean(function, [x, w], ELEMENTWISE)


class Sizes(TorchDispatchMode):
    """Counts the tensors of a size that operations make."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.seen = nbytes, dict[int, UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() == self.nbytes:
            self.seen[out.untyped_storage()._cdata] = out.untyped_storage()
        return out


def test_a_chain_is_followed_in_the_memory_of_one_value() -> None:
    """Scores, sum and softmax are one tensor when they are rebuilt, and so says the survey."""

    def unit(x: Tensor) -> Tensor:
        return functional.softmax(torch.bmm(x, x.transpose(1, 2)) * 2 + 1, -1).exp()

    x = torch.randn(4, 128, 16, requires_grad=True)
    saves = LeanSaves(Sites(), ATTENTION, lambda saved: handles.append(saved.handle))
    handles: list[Handle] = []
    with saves.active():
        out = unit(x)
    probabilities = next(each for each in handles if each.grade == ATTENTION)
    with Sizes(4 * 128 * 128 * 4) as made:
        rebuilt_now(probabilities)
    assert len(made.seen) == 1
    del out

    item = next(item for item in Surveying(unit, x).items if item.grade == ATTENTION)
    assert item.temporary_bytes == 0
