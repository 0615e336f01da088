"""What the comparison at a place sees, and a recipe that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.lean import masks
from lightning_mimose.actions.lean.handles import Handle, Kept, View
from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.recipes.table import TABLE, Entry, Made, Node
from lightning_mimose.actions.lean.sites import Sites
from tests.helpers.lean import EVERYTHING, Pass, Watch, same_bits


def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
    """One place that has a recipe."""
    return watch(x.sin()) * w


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.sin().nextafter(torch.ones(())),
        lambda x: x.sin().double(),
        lambda x: x.sin().t().contiguous().t(),
        lambda x: x.sin()[:5],
        lambda x: torch.where(x == 0, torch.tensor(-0.0), x.sin()),
        lambda x: x.sin().to("meta"),
    ],
)
def test_a_recipe_that_gives_anything_else_is_not_used(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit, a zero's sign, the precision, the layout, the shape and the device count."""

    def entry(node: Node) -> Made:
        return Made(wrong, (node.saved("self"),), 1.0)  # type: ignore[arg-type]

    monkeypatch.setitem(TABLE, "SinBackward0", Entry(1, entry))
    x, w = torch.randn(33, 47), torch.randn(33, 47)
    x[0] = 0.0
    given = [x.requires_grad_(), w.requires_grad_()]
    plain, sites = Pass(function, given, None), Sites()
    for _ in range(2):
        lean = Pass(function, given, EVERYTHING, sites=sites)
        assert same_bits(lean.bits, plain.bits)
        assert lean.alive == [True]
        assert [place.made_by for place in sites.different] == ["SinBackward0"]
        assert not sites.checked


def test_a_recipe_that_cannot_be_made_keeps_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the midst of an operation would be the operation's own."""

    def entry(node: Node) -> Made:
        raise TypeError("of a kind that nobody has thought of")

    given = [torch.randn(33, 47, requires_grad=True) for _ in range(2)]
    plain = Pass(function, given, None)
    monkeypatch.setitem(TABLE, "SinBackward0", Entry(1, entry))
    lean = Pass(function, given, EVERYTHING)
    assert same_bits(lean.bits, plain.bits)
    assert lean.alive == [True]


def test_what_is_not_a_number_is_compared_by_its_bits() -> None:
    """It is no difference where both are."""
    x, w = torch.full((33, 47), torch.nan, requires_grad=True), torch.randn(33, 47, requires_grad=True)
    plain, lean = Pass(function, [x, w], None), Pass(function, [x, w], EVERYTHING)
    assert same_bits(lean.bits, plain.bits)
    assert lean.alive == [False]


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), ()])
def test_tensors_of_any_size(shape: tuple[int, ...]) -> None:
    """What a unit spares goes by its sizes alone, in small batches as in large ones."""
    given = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    plain, lean = Pass(function, given, None), Pass(function, given, EVERYTHING)
    assert same_bits(lean.bits, plain.bits)
    assert lean.alive == [False]


def test_in_double_precision() -> None:
    """And a complex one."""
    for dtype in (torch.float64, torch.complex64, torch.complex128):
        given = [torch.randn(33, 47, dtype=dtype, requires_grad=True) for _ in range(2)]
        plain, lean = Pass(function, given, None), Pass(function, given, EVERYTHING)
        assert same_bits(lean.bits, plain.bits)
        assert lean.alive == [False]


@pytest.mark.parametrize("piece", [64, masks.PIECE])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1003])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bits_of_a_mask(dtype: torch.dtype, count: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of elements, in order, at once and in pieces."""
    monkeypatch.setattr(masks, "PIECE", piece)
    flags = torch.rand(count) < 0.5
    number = 1.0 if dtype == torch.bool else torch.ones((), dtype=dtype).div_(0.7).item()
    tensor = flags if dtype == torch.bool else flags.to(dtype) * number
    mask = Mask(tensor, number, 2)
    assert mask.value().dtype == dtype
    assert torch.equal(mask.value(), tensor)
    assert mask.held_bytes == (count + 7) // 8
    mask.value().zero_()
    assert torch.equal(mask.value(), tensor), "what was handed out is nobody else's"


def test_a_mask_keeps_its_layout() -> None:
    """And so do views of it."""
    tensor = (torch.rand(5, 6, 7) < 0.5).permute(2, 0, 1)
    mask = Mask(tensor, 1.0, 2)
    assert mask.value().stride() == tensor.stride()
    assert torch.equal(mask.value(), tensor)
    part = tensor.transpose(0, 1)[1:3]
    view = View(mask, part)
    assert torch.equal(view.value(), part)
    assert view.nbytes == mask.nbytes


def test_what_is_kept_is_of_no_grade() -> None:
    """Whoever is rebuilt from it needs nothing for its sake; nor from what an operation saved."""
    kept = Kept(torch.zeros(4))
    assert (kept.grade, kept.needed_grade, kept.nbytes, kept.shape) == (0, 0, 16, (4,))
    mask = Mask(torch.ones(4, dtype=torch.bool), 1.0, 2)
    assert mask.needed_grade == 2
    mask.is_saved = True
    assert mask.needed_grade == 0
    with pytest.raises(NotImplementedError):
        Handle(0, (), 0).value()


def test_the_first_version_of_what_is_kept_counts() -> None:
    """A tensor may have been changed before."""
    tensor = functional.relu_(torch.ones(4))
    kept = Kept(tensor)
    assert torch.equal(kept.value(), tensor)
    tensor.add_(1)
    assert not kept.is_intact
    with pytest.raises(RuntimeError, match=r"is at version 2; expected version 1"):
        kept.value()


def test_a_comparison_makes_what_was_saved_once() -> None:
    """In a loop each state is made from the last, here three times: each round took three times as many operations."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.sin.default
            return func(*args, **(kwargs or {}))

    def loop(rounds: int) -> Callable[..., Tensor]:
        def run(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
            state = (x * w).sin()
            for _ in range(rounds):
                state = (state * w).sin() + state * state
            return state * w

        return run

    given = [torch.randn(33, 47, requires_grad=True) for _ in range(2)]
    counts = []
    for rounds in (2, 3, 4):
        plain, sites = Pass(loop(rounds), given, None), Sites()
        with Counted() as counted:
            lean = Pass(loop(rounds), given, EVERYTHING, sites=sites)
        assert same_bits(lean.bits, plain.bits)
        assert sites.checked
        counts.append(counted.count)
    assert counts[2] - counts[1] <= counts[1] - counts[0] + 4, counts
