"""Every kind of backward pass, and what is in memory before, meanwhile and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.lean.handles import Kept, View
from lightning_mimose.actions.lean.late import Late
from lightning_mimose.actions.lean.recipe import Recipe
from lightning_mimose.actions.lean.recipes.table import TABLE, Entry, Made, Node
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from tests.helpers.lean import EVERYTHING, Function, Watch, same_bits


def matrix(rows: int = 33, columns: int = 47) -> Tensor:
    """A leaf of an awkward size."""
    return torch.randn(rows, columns, requires_grad=True)


class Cube(torch.autograd.Function):
    """Saves by itself: its input and a result."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """The third power."""
        out = x**3
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        """From both."""
        x, out = ctx.saved_tensors  # type: ignore[attr-defined]
        result: Tensor = gradients[0] * (2 * x**2 + out / x)
        return result


FORWARDS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: functional.gelu(x) * w,
    lambda x, w: functional.silu(x * w).sigmoid() * w,
    lambda x, w: (x * 2) * (w * x),
    lambda x, w: (x @ w.t()).softmax(-1) @ x,
    lambda x, w: functional.layer_norm((x * w).tanh() + 1.5, (47,)) * w,
    lambda x, w: Cube.apply(functional.silu(x)) * w,  # type: ignore[no-untyped-call]
]


def plain_backward(out: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """Twice over the same graph."""
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    return []


def second_order(out: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """Gradients of gradients."""
    first = torch.autograd.grad(out.sum(), [x, w], create_graph=True)
    torch.stack([each.square().sum() for each in first]).sum().backward()
    return [each.detach() for each in first]


def subset(out: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """One after the other."""
    return [
        *torch.autograd.grad(out.sum(), [w], retain_graph=True),
        *torch.autograd.grad(out.sum(), [x], retain_graph=True),
    ]


def into_some(out: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """`inputs=`."""
    out.sum().backward(inputs=[w], retain_graph=True)
    out.sum().backward(inputs=[x])
    return []


def within_a_hook(out: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """Another backward pass, over the same graph, while the first is under way."""
    seen: list[Tensor] = []
    loss = out.sum()

    def again(_: Tensor) -> None:
        if not seen:
            seen.append(torch.zeros(0))
            seen.extend(torch.autograd.grad(loss, [x, w], retain_graph=True))

    w.register_hook(again)
    loss.backward(retain_graph=True)
    return seen


KINDS = [plain_backward, second_order, subset, into_some, within_a_hook]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(FORWARDS)))
def test_every_kind_of_backward(number: int, kind: Callable[[Tensor, Tensor, Tensor], list[Tensor]]) -> None:
    """Accumulates the same bits, into gradients that were there before."""
    values = [matrix().detach(), matrix().detach()]

    def run(lean: bool) -> list[Tensor]:
        x, w = (value.clone().requires_grad_() for value in values)
        sites = Sites()
        for _ in range(2):
            if lean:
                with LeanSaves(sites, EVERYTHING).active():
                    out = FORWARDS[number](x, w)
            else:
                out = FORWARDS[number](x, w)
            found = kind(out, x, w)
        assert sites.checked or not lean
        return [*found, *(each.grad for each in (x, w) if each.grad is not None)]

    assert same_bits(run(True), run(False))


def test_a_graph_that_was_used_up_says_so() -> None:
    """In torch's words."""
    x, w = matrix(), matrix()
    with LeanSaves(Sites(), EVERYTHING).active():
        out = functional.gelu(x) * w
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Nothing is freed but by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(watch: Function, x: Tensor, w: Tensor) -> Tensor:
    """Results that operations save themselves, kept ones among them, and recipes."""
    h = watch(x.cumsum(0))
    e = watch(h.cumprod(1).exp())
    y = watch(watch(h.tanh()).sigmoid() + watch(functional.gelu(h)))
    return (y * w).softmax(-1) * functional.dropout(e.clamp(max=3), 0.2) @ watch(w.exp().t())


ENDS: list[Callable[[Tensor, Tensor], object]] = [
    lambda out, w: None,
    lambda out, w: out.sum().backward(),
    lambda out, w: out.sum().backward(retain_graph=True),
    lambda out, w: torch.autograd.grad(out.sum(), [w], retain_graph=True),
    lambda out, w: torch.autograd.grad(out.sum(), [w], create_graph=True),
]


@pytest.mark.parametrize("end", range(len(ENDS)))
@pytest.mark.parametrize("grade", [1, EVERYTHING])
@pytest.mark.usefixtures("_no_collector")
def test_nothing_is_left_when_the_loss_is_dropped(grade: int, end: int) -> None:
    """Without a cycle that a collection would have to find, however far backward went."""
    x, w, sites = matrix(), matrix(), Sites()
    for _ in range(2):
        watch = Watch()
        with LeanSaves(sites, grade).active():
            out = forward(watch, x, w)
        assert any(watch.alive())
        ENDS[end](out, w)
        x.grad = w.grad = None
        del out
        assert not any(watch.alive())


@pytest.mark.usefixtures("_no_collector")
def test_nothing_is_left_when_the_forward_fails() -> None:
    """What was noted for it is forgotten."""
    watch, saves = Watch(), LeanSaves(Sites(), EVERYTHING)

    def fails() -> None:
        with saves.active():
            forward(watch, matrix(), matrix())
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fails()
    gc.collect()  # the traceback
    assert not any(watch.alive())


class Counted:
    """A recipe for sines that counts, and watches what it makes."""

    def __init__(self) -> None:
        self.made: list[Watch] = []

    def __call__(self, node: Node) -> Made:
        """See `table.TABLE`."""

        def rebuild(x: Tensor) -> Tensor:
            self.made.append(Watch())
            return self.made[-1](x.sin())

        return Made(rebuild, (node.saved("self"),), 1.0)


@pytest.fixture
def sines(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """In the table."""
    counted = Counted()
    monkeypatch.setitem(TABLE, "SinBackward0", Entry(1, counted))
    return counted


@pytest.mark.usefixtures("_no_collector")
def test_four_uses_share_one_value_per_pass(sines: Counted) -> None:
    """It is gone after the last of them, and a part of a pass leaves nothing either."""
    x, w, sites = matrix(), [matrix() for _ in range(4)], Sites()
    for step in range(2):
        with LeanSaves(sites, EVERYTHING).active():
            y = x.sin()
            parts = [(y * w[0]).sum(), (y.t() * w[1].t()).sum(), (functional.gelu(y) * w[2]).sum(), (y[1:] * 2).sum()]
            parts.append((y[3:] * w[3][3:]).sum())
            del y
        assert len(sines.made) == (0 if step else 4 + 1)  # each place is compared once; gelu's result needs it too
        for asked, of in ([x, *w], parts), ([w[1]], parts[1:2]), ([x, *w], parts), ([w[0], w[2]], parts):
            sines.made.clear()
            torch.autograd.grad(torch.stack(of).sum(), asked, retain_graph=True)
            assert len(sines.made) == 1
            assert not any(sines.made[0].alive())
        sines.made.clear()


class Asking(torch.autograd.Function):
    """A product whose backward asks for what was saved once for each of its factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


def test_who_asks_several_times_is_not_given_several(sines: Counted) -> None:
    """One that the first look took with it, and one that is remembered for all others."""
    x, w = matrix(), matrix()
    with LeanSaves(Sites(), EVERYTHING).active():
        out = Asking.apply(x.sin(), w).sum() + Asking.apply(x.sin(), w).sum()
    sines.made.clear()
    out.backward()
    assert 2 <= len(sines.made) <= 2 * 2
    assert not any(alive for watch in sines.made for alive in watch.alive())
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * w.detach() * x.detach().cos())


def test_one_operations_value_goes_with_its_formula(sines: Counted) -> None:
    """Not with the node: a gradient of what was expanded is summed after that. What others are made from stays."""
    alive: list[list[bool]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sum.dim_IntList:
                alive.append(sines.made[-1].alive())
            return func(*args, **(kwargs or {}))

    for again in False, True:
        x, w = matrix(), torch.rand(len(matrix()), 1, requires_grad=True)
        with LeanSaves(Sites(), EVERYTHING).active():
            y = x.sin()
            out = (y * w).sum() if not again else (functional.gelu(y) * w).sum()
            del y
        sines.made.clear()
        with Watching():
            out.backward()
        assert len(sines.made) == 1
    assert alive == [[False], [True]]


def test_what_recipes_count() -> None:
    """Each of those that are made from a value, by way of a view or not, as long as there is one."""
    source = Recipe(torch.sin, [Kept(torch.ones(3))], 12, (3,), 1, 3.0)
    one, other = (Recipe(torch.cos, [each], 12, (3,), 1, 3.0) for each in (source, View(source, torch.ones(3))))
    assert source.builds == 2
    late = Late(torch.ones(3))
    late.become(one)
    assert source.builds == 3
    del one, other
    assert source.builds == 1
    del late
    assert source.builds == 0


@pytest.mark.usefixtures("_no_collector")
def test_looking_at_what_was_saved_remembers_nothing(sines: Counted) -> None:
    """Outside of backward there is nobody who would forget it."""
    x, w = matrix(), matrix()
    with LeanSaves(Sites(), EVERYTHING).active():
        out = x.sin() * w + x.sin()
    node = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    for _ in range(3):
        sines.made.clear()
        assert torch.equal(node._saved_self, x.sin())  # type: ignore[union-attr]
        assert len(sines.made) == 1
        assert not any(sines.made[0].alive())
    out.sum().backward()
    assert x.grad is not None


def test_a_view_without_a_graph_outlives_what_made_it() -> None:
    """The node that made the values is used up by another loss before."""

    def gradients(lean: bool) -> list[Tensor]:
        torch.manual_seed(0)
        x, w, v = matrix(), matrix(), matrix(47, 33)

        def both() -> tuple[Tensor, Tensor]:
            y = functional.gelu(x)
            with torch.no_grad():
                turned = y.t()
            return (y * w).sum(), (turned * v).sum()

        if lean:
            with LeanSaves(Sites(), EVERYTHING).active():
                first, second = both()
        else:
            first, second = both()
        first.backward()
        second.backward()
        return [each.grad for each in (x, w, v) if each.grad is not None]

    assert same_bits(gradients(True), gradients(False))
