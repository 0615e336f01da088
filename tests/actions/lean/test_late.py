"""What is saved before its source: kept until that is saved, and rebuilt from it from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_mimose.actions.lean.returned import Returned
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.menu import ELEMENTWISE
from tests.helpers.lean import EVERYTHING, Pass, Watch, assert_lean, same_bits

Gate = Callable[[Watch, Tensor], Tensor]


def hidden(x: Tensor) -> Tensor:
    """An operation that saves nothing, and whose result no recipe gives."""
    return x.cumsum(0)


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Two matrices; no multiple of what kernels take at once."""
    return [torch.randn(33, 94, dtype=dtype, requires_grad=True) for _ in range(2)]


def erf_gelu(watch: Watch, h: Tensor) -> Tensor:
    """As it is written by hand, and the half last; what erf is given stays, for its sum is made from it at once."""
    return 0.5 * (h * watch(1 + torch.erf(h / 2**0.5)))


def of_a_sum(watch: Watch, h: Tensor) -> Tensor:
    """Its source is saved, too, and waits itself."""
    total = h + h.cumsum(1)
    return total * watch(total.sigmoid())


def of_two(watch: Watch, h: Tensor) -> Tensor:
    """Of which one is saved long before the other."""
    other = h.cumsum(1)
    gate = watch((h + other).sigmoid())
    return gate * h.sin() + other.cos()


def in_parts(watch: Watch, h: Tensor) -> Tensor:
    """Views of one tensor."""
    a, b = h.chunk(2, -1)
    return watch(a * watch(torch.sigmoid(a))) * b


def in_heads(watch: Watch, h: Tensor) -> Tensor:
    """Views of views."""
    a, b = h.view(33, 2, 47).unbind(1)
    return b * watch(torch.tanh(a).t()).t() * a


def much_later(watch: Watch, h: Tensor) -> Tensor:
    """Nobody but autograd has it any more by then."""
    gated = (watch(h.sigmoid()) * h.detach().cos()).cumsum(0)
    return gated + h.sin().cumsum(1)


GATES: dict[str, Gate] = {
    "x * sigmoid(x)": lambda watch, h: watch(h * watch(torch.sigmoid(h))),
    "sigmoid(x) * x": lambda watch, h: watch(watch(torch.sigmoid(h)) * h),
    "x * tanh(x)": lambda watch, h: watch(h * watch(torch.tanh(h))),
    "quick gelu": lambda watch, h: watch(h * watch(torch.sigmoid(1.702 * h))),
    "view": lambda watch, h: (h.view(3, 11, 94) * watch(h.view(3, 11, 94).exp())).view(33, 94),
    "erf gelu": erf_gelu,
    "of a sum": of_a_sum,
    "of two": of_two,
    "in parts": in_parts,
    "in heads": in_heads,
    "much later": much_later,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", sorted(GATES))
def test_a_gate_is_rebuilt_from_its_source(name: str, dtype: torch.dtype) -> None:
    """By whichever operation that is saved first."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        y = GATES[name](watch, hidden(x))
        return y * torch.ones_like(y, requires_grad=True) + w.sum()

    assert_lean(function, given(dtype), ELEMENTWISE)


def test_it_is_gone_as_soon_as_its_source_is_saved() -> None:
    """Not at the end of the forward."""
    x, _ = given()
    for sites in (Sites(), Sites()):
        for _ in range(3):
            with LeanSaves(sites, ELEMENTWISE).active():
                h, watch = hidden(x), Watch()
                y = watch(h.sigmoid()).cumsum(0)
                assert watch.alive() == [True]  # for autograd alone
                z = h.sin()
                assert watch.alive() == [False]
            (y.sum() + z.sum()).backward()


def test_an_argument_that_is_saved_later() -> None:
    """It was made before the call, by somebody else."""
    x, _ = given()
    outer = hidden(x)

    def function(watch: Watch, x: Tensor) -> Tensor:
        y = watch(x.sigmoid()) * 2 + x.sin() + watch((1.5 + x.t()).exp()).t()
        return y.cumsum(0)

    plain = Pass(function, [outer.detach().requires_grad_()], None)
    sites = Sites()
    for _ in range(4):
        watch = Watch()
        with LeanSaves(sites, ELEMENTWISE, given=[outer]).active():
            out = function(watch, outer)
        assert not any(watch.alive())
        assert torch.equal(out, plain.bits[0])


def written(h: Tensor) -> None:
    """Under `no_grad`."""
    with torch.no_grad():
        h.mul_(3)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "no_grad": written,
    "detach": lambda h: h.detach().mul_(3),
    "data": lambda h: h.data.mul_(3),
    "view": lambda h: written(h[:3]),
    "in place": lambda h: h.mul_(3),
    "a part": lambda h: h[2:5].mul_(3),
    "nothing": lambda h: None,
}


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("what", ["source", "gate"])
@pytest.mark.parametrize("how", sorted(WRITES))
def test_writing_on_either(how: str, what: str, when: str) -> None:
    """Before the source is saved, or after: it is as without lean saves, or better, but never another number."""
    write = WRITES[how]
    results = {}
    for lean in (False, True):
        sites, x = Sites(), torch.randn(33, 94, generator=torch.Generator().manual_seed(3), requires_grad=True)
        for number in range(3):
            calls = LeanSaves(sites, ELEMENTWISE) if lean else None
            try:
                out = _writing(x, write, what, when, calls)
                results[lean, number] = [out.detach(), *torch.autograd.grad(out.sum(), [x])]
            except RuntimeError:
                results[lean, number] = []
    for number in range(3):
        plain, lean_bits = results[False, number], results[True, number]
        # `data` after a tensor was saved is seen by nobody, and then changes what a plain pass gives.
        if plain and not (how == "data" and when == "after"):
            assert same_bits(lean_bits, plain)


def _writing(x: Tensor, write: Callable[[Tensor], object], what: str, when: str, lean: LeanSaves | None) -> Tensor:
    def run() -> Tensor:
        h = hidden(x)
        if when == "before" and what == "source":
            write(h)
        gate = h.sigmoid()
        if when == "before" and what == "gate":
            write(gate)
        y = gate.cumsum(0)
        if when == "between":
            write(h if what == "source" else gate)
        z = h.sin() + gate.cumsum(1) * 2
        if when == "after":
            write(h if what == "source" else gate)
        return y + z + h.cumsum(1) + gate.cumsum(0)

    if lean is None:
        return run()
    with lean.active():
        return run()


VIEWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "unbind": lambda h: h.view(33, 2, 47).unbind(1),
    "chunk": lambda h: h.t().chunk(2, 0),
    "slices": lambda h: ((view := h.view(33, 2, 47))[:, :1], view[:, 1:]),
    "rows": lambda h: ((view := h.view(33, 2, 47))[:, 0], view[:, 1]),
}


@pytest.mark.parametrize("how", ["data", "other data", "nothing"])
@pytest.mark.parametrize("pieces", sorted(VIEWS))
def test_writing_on_a_piece_whose_neighbour_was_looked_at(pieces: str, how: str) -> None:
    """In later calls only, when nothing is compared any more: what leads to the neighbour by the same view is known."""

    def write(piece: Tensor) -> None:
        if how == "data":
            piece.data.mul_(3)
        elif how == "other data":
            piece.data = piece.data * 3

    def run(x: Tensor, w: Tensor, *, writes: bool) -> Tensor:
        one, other = VIEWS[pieces](functional.linear(x, w))
        gate = torch.sigmoid(one)
        if writes:
            write(other)
        return ((gate * torch.tanh(1.5 * other)).exp() * 0.01).cumsum(0)

    sites = Sites()
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x, w = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((33, 24), (94, 24)))
        plain = run(x, w, writes=number > 1)
        with LeanSaves(sites, EVERYTHING, given=[x]).active():
            lean = run(x, w, writes=number > 1)
        bits = [[out.detach(), *torch.autograd.grad(out.square().sum(), [x, w])] for out in (plain, lean)]
        assert same_bits(*bits)


def test_something_was_made_from_it_before() -> None:
    """Then it stays: what leads to that was counted without it."""

    def function(watch: Watch, x: Tensor) -> Tensor:
        h = hidden(x)
        gate = watch(h.sigmoid())
        rest = 1 - gate
        y = rest * torch.ones_like(rest, requires_grad=True)
        return y + h.sin() + gate.cumsum(0)

    x, _ = given()
    plain, lean = Pass(function, [x], None), Pass(function, [x], ELEMENTWISE)
    again = Pass(function, [x], ELEMENTWISE, sites=lean.sites)
    assert lean.alive == again.alive == [True]
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)


def test_a_long_loop_of_gates() -> None:
    """States that are each made from the last: no chain of recipes is longer than any may be."""

    def function(watch: Watch, x: Tensor) -> Tensor:
        state = hidden(x)
        for _ in range(400):
            gate = (state + 1).sigmoid()
            state = gate * state + (1 - gate) * state.tanh()
        return state

    x, _ = given()
    plain, lean = Pass(function, [x], None), Pass(function, [x], ELEMENTWISE)
    again = Pass(function, [x], ELEMENTWISE, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)


@pytest.mark.parametrize("retain", [False, True])
def test_nothing_is_left_of_a_graph_that_is_dropped(retain: bool) -> None:
    """With or without a backward pass, nor while it waits: no cycle holds it."""
    x, watch, sites = given()[0], Watch(), Sites()
    gc.disable()
    try:
        for _ in range(3):
            with LeanSaves(sites, ELEMENTWISE).active():
                h = watch(hidden(x))
                out = (h * watch(h.sigmoid())).sum() + watch((h.cumsum(1) + 1).tanh()).sum()
            if retain:
                out.backward(retain_graph=True)
            del h, out
            assert not any(watch.alive())
    finally:
        gc.enable()


def test_backward_twice_and_of_the_second_order() -> None:
    """A kept graph gives the same again."""

    def function(x: Tensor) -> Tensor:
        h = hidden(x)
        return functional.silu(h * torch.sigmoid(1.702 * h))

    x, _ = given()
    grads = []
    for lean in (None, LeanSaves(Sites(), ELEMENTWISE)):
        if lean is None:
            out = function(x)
        else:
            with lean.active():
                out = function(x)
        (first,) = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        (again,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
        (second,) = torch.autograd.grad(again.pow(2).sum(), [x])
        grads.append([first, again.detach(), second])
    assert same_bits(grads[0], grads[1])


def test_a_part_of_the_graph_goes_backward_first() -> None:
    """What it has made again is there for the rest, though its source is let go of once it is made."""
    found = []
    for lean in (False, True):
        torch.manual_seed(0)
        x, w, v = (torch.randn(rows, 32, requires_grad=True) for rows in (40, 32, 32))
        watch = Watch()
        with LeanSaves(Sites(), EVERYTHING, given=[x, w, v]).active() if lean else nullcontext():
            h = x @ w
            mixed = watch(torch.sigmoid(h)) + h * watch(torch.tanh(h))
            out = mixed @ v
        assert watch.alive() == [not lean] * 2
        edge, first = torch.autograd.grad(out.square().sum(), [mixed, v])  # by way of the product alone
        found.append([edge, first, *torch.autograd.grad(mixed, [x, w], edge)])
    assert same_bits(*found)


@pytest.mark.parametrize("retain", [True, False])
def test_sources_are_let_go_of_as_soon_as_their_own_operation_is_done(retain: bool) -> None:
    """Not by the value that is rebuilt from them and used after that, if nobody goes backward once more."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(rows, 32, requires_grad=True) for rows in (40, 32, 32))
    source, alive = Watch(), []
    with LeanSaves(Sites(), 1, given=[x, w, v]).active():
        h = source(x @ w)
        gate = torch.sigmoid(h)
        gate.register_hook(lambda _: alive.append(source.alive()[0]))
        product = h * torch.tanh(h)
        out = (gate + product) @ v
    del h, gate, product
    out.square().sum().backward(retain_graph=retain)
    assert alive == [retain]


def test_a_result_that_is_taken_after_a_pass_over_its_graph() -> None:
    """Its value is not there any more, and is made from its source, which is."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(rows, 64, requires_grad=True) for rows in (40, 64, 64))
    returned, sites = Returned(), Sites()
    first = LeanSaves(sites, ELEMENTWISE, given=[x, w], returned=returned)
    with first.closing(), first.watching():
        h = x @ w
        y, other = torch.sigmoid(h), h.square()
        for base, recipe in first.results((y, other)):
            recipe.is_handed_on = True
            returned.add(base, recipe, "block", read=True)
    del h, base, recipe
    (y.sum() + other.sum()).backward()
    (plain,) = torch.autograd.grad((y.detach() @ v).sum(), v)
    with LeanSaves(Sites(), 0, returned=returned).active():
        out = y.detach() @ v
    del y
    assert torch.equal(torch.autograd.grad(out.sum(), v)[0], plain)
