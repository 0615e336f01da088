"""Changes in place, other names of the same memory, other settings in backward: an error as without, or the bits."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.saves import LeanSaves, Saved
from lightning_mimose.actions.lean.sites import SURE, Sites
from lightning_mimose.menu import ELEMENTWISE, MASKS
from tests.helpers.lean import EVERYTHING, Function, Pass, assert_lean, same_bits

Change = Callable[[Tensor], object]


def matrix(rows: int = 33, columns: int = 47) -> Tensor:
    """A leaf of an awkward size."""
    return torch.randn(rows, columns, requires_grad=True)


def quietly(change: Change) -> Change:
    """A change that autograd is not told of."""

    def changed(tensor: Tensor) -> None:
        with torch.no_grad():
            change(tensor)

    return changed


def assert_same(function: Function, *inputs: Tensor) -> list[Pass]:
    """Whatever is kept, no bit differs: at first, when all places are known, and when idle ones are passed over."""
    plain = Pass(function, inputs, None)
    first = Pass(function, inputs, EVERYTHING)
    passes = [first, *(Pass(function, inputs, EVERYTHING, sites=first.sites) for _ in range(SURE + 1))]
    for each in passes:
        assert same_bits(each.bits, plain.bits)
    return passes


CHANGES: list[Change] = [
    lambda h: h.add_(1),
    lambda h: h[:3].zero_(),
    lambda h: h.relu_(),
    quietly(lambda h: h.mul_(2)),
]


@pytest.mark.parametrize("grade", [None, EVERYTHING])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_a_recipe_starts_from_is_an_error(change: Change, grade: int | None) -> None:
    """As without lean saves, and in the same words."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        h = x.cumsum(0)  # for which there is no recipe
        out = functional.gelu(h) * w
        change(h)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Pass(function, [matrix(), matrix()], grade)


@pytest.mark.parametrize("grade", [None, EVERYTHING])
@pytest.mark.parametrize("which", [0, 1])
def test_a_change_of_a_weight_is_an_error(which: int, grade: int | None) -> None:
    """As an optimizer's step between forward and backward is."""
    rows = [torch.ones(47, requires_grad=True), torch.zeros(47, requires_grad=True)]

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        out = functional.layer_norm(x * w, (47,), rows[0], rows[1]) * w
        quietly(lambda row: row.add_(1))(rows[which])
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Pass(function, [matrix(), matrix()], grade)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_rebuilt_does_no_harm(change: Change) -> None:
    """Plain autograd refuses; the value of the time when it was saved is rebuilt."""

    def changing(change: Change, x: Tensor, w: Tensor) -> Tensor:
        y = functional.gelu(x)
        out = y * w
        change(y)
        return out

    x, w = matrix(), matrix()
    plain = Pass(lambda _, *given: changing(lambda y: y, *given), [x, w], None)
    lean = Pass(lambda _, *given: changing(change, *given), [x, w], EVERYTHING)
    assert same_bits(lean.bits, plain.bits)


@pytest.mark.parametrize(
    "change",
    [
        quietly(lambda y: y.mul_(3)),
        lambda y: y.detach().mul_(3),
        lambda y: y.data.mul_(3),
        lambda y: y[:4].mul_(3),
        lambda y: y.view(-1).mul_(3),
        lambda y: y.mul_(3),
        lambda y: functional.relu_(y),
        lambda y: functional.dropout(y, 0.0, inplace=True),
        lambda y: functional.dropout(y, 0.0, True, True),
        lambda y: functional.relu(y, True),
        lambda y: functional.silu(y, True),
        lambda y: functional.silu(y, inplace=True),
    ],
)
def test_a_change_before_it_is_saved_is_seen(change: Change) -> None:
    """The node that made it says nothing of the change."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        change(y)
        return y * w

    assert_same(function, matrix(), matrix())


def test_a_change_that_no_counter_shows_is_found_by_the_first_comparison() -> None:
    """The place keeps its tensor from then on."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        y.detach().numpy()[:] *= 3
        return watch(y) * w

    for lean in assert_same(function, matrix(), matrix()):
        assert len(lean.sites.different) == 1
        assert not lean.sites.checked
        assert lean.alive == [True]


HIDDEN: list[Change] = [
    quietly(lambda y: y.clamp_(max=0.1)),
    lambda y: y.detach().clamp_(max=0.1),
    lambda y: y.data.clamp_(max=0.1),
    lambda y: setattr(y, "data", y.data.clamp(max=0.1)),
    quietly(lambda y: y[:4].zero_()),
    quietly(lambda y: torch._foreach_clamp_max_([y], 0.1)),
    quietly(lambda y: torch.mul(y, 2, out=y)),
    quietly(lambda y: y.__setitem__(0, 7.0)),
]


@pytest.mark.parametrize("change", HIDDEN)
@pytest.mark.parametrize("then", [lambda y: y, lambda y: y.relu_()])
def test_a_change_in_the_middle_of_a_chain_after_the_places_were_compared(change: Change, then: Function) -> None:
    """The recipe is as it was compared, its input is not."""

    def function(changes: bool, watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.gelu(x)
        if changes:
            change(y)
        z = watch(then(y).neg())
        return z * w

    inputs = matrix(), matrix()
    first = Pass(partial(function, False), inputs, EVERYTHING)
    assert first.alive == [False]
    again = Pass(partial(function, True), inputs, EVERYTHING, sites=first.sites)
    assert same_bits(again.bits, Pass(partial(function, True), inputs, None).bits)


@pytest.mark.parametrize("change", HIDDEN)
def test_what_has_no_recipe_in_an_odd_step_has_one_in_the_next(change: Change) -> None:
    """A step in which somebody wrote says nothing of others."""

    def function(changes: bool, watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.gelu(x)
        if changes:
            change(y)
        return watch(y.neg()) * w

    inputs = matrix(), matrix()
    first = Pass(partial(function, True), inputs, EVERYTHING)
    assert first.alive == [True]
    then = Pass(partial(function, False), inputs, EVERYTHING, sites=first.sites)
    assert then.alive == [False]
    assert same_bits(then.bits, Pass(partial(function, False), inputs, None).bits)


def test_what_has_no_recipe_on_one_branch_has_one_on_another() -> None:
    """Although as many tensors were saved before it, and as many nodes made."""

    def function(activation: Function, watch: Function, x: Tensor, w: Tensor) -> Tensor:
        return watch(activation(x).neg()) * w

    inputs = matrix(), matrix()
    first = Pass(partial(function, lambda x: (x * 2).cumsum(0)), inputs, EVERYTHING)
    assert first.alive == [True]
    then = Pass(partial(function, lambda x: (x * 2) + 1), inputs, EVERYTHING, sites=first.sites)
    assert then.alive == [False]


def test_what_has_no_recipe_in_one_mode_has_one_in_another() -> None:
    """The same functions were called: what made a recipe impossible was not their name."""
    norm = torch.nn.BatchNorm1d(47)

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        return watch(norm(x)) * w

    inputs = matrix(), matrix()
    norm.eval()
    first = Pass(function, inputs, EVERYTHING)
    assert first.alive == [True]
    norm.train()
    assert Pass(function, inputs, EVERYTHING, sites=first.sites).alive == [False]


def test_recipes_are_the_same_in_a_short_batch_and_in_a_long_one() -> None:
    """Nothing makes again what it is made from, a small tensor."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        scores = functional.gelu(x)
        return watch(torch.exp(scores - scores.amax(-1, keepdim=True))) * w

    short, long = ((matrix(rows), matrix(rows)) for rows in (64, 1024))
    sites = Pass(function, short, ELEMENTWISE).sites
    assert Pass(function, long, ELEMENTWISE, sites=sites).alive == [False]


def test_another_branch_is_compared_anew() -> None:
    """A place is known by the whole recipe, not by the last operation."""

    def function(activation: Function, watch: Function, x: Tensor, w: Tensor) -> Tensor:
        return watch(activation(x).neg()) * w

    inputs = matrix(), matrix()
    sites = Pass(partial(function, functional.gelu), inputs, EVERYTHING).sites
    known = len(sites.checked)
    Pass(partial(function, functional.gelu), inputs, EVERYTHING, sites=sites)
    assert len(sites.checked) == known
    Pass(partial(function, functional.silu), inputs, EVERYTHING, sites=sites)
    assert len(sites.checked) == known + 1


def test_a_recipe_that_cannot_be_followed_keeps_the_tensor() -> None:
    """A view that autograd can take of the tensor, and not of what is rebuilt for it."""

    def function(watch: Function, x: Tensor) -> Tensor:
        h = functional.gelu(x).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(4, 42, 8)
        return h.tanh() * h

    assert_same(function, torch.randn(4, 8, 6, 7, requires_grad=True))


@pytest.mark.parametrize("dim", [None, [], [0], [0, 1]])
def test_means_over_any_dimensions(dim: list[int] | None) -> None:
    def function(watch: Function, x: Tensor) -> Tensor:
        h = functional.gelu(x).mean(dim=dim, keepdim=True).expand(33, 47)
        return h * h

    assert_same(function, matrix())


def test_what_somebody_else_holds_gets_no_other_form() -> None:
    """Bits beside a mask that stays would be more memory, not less."""
    mask = torch.rand(33, 470) > 0.5

    def function(x: Tensor) -> Tensor:
        return functional.gelu(x).masked_fill(mask, 0.0).sum()

    masks = []

    def told(saved: Saved) -> None:
        if saved.tensor.dtype == torch.bool:
            masks.append(type(saved.handle))

    for held in ([], [mask]):
        with LeanSaves(Sites(), EVERYTHING, told, held=held).active():
            function(matrix(33, 470)).backward()
    assert masks == [Mask]


def test_an_activation_in_place_is_rebuilt_from_what_it_replaced() -> None:
    """As in every ResNet: the norm's result is written over by the ReLU's."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.layer_norm(x, (47,), torch.ones(47, requires_grad=True), torch.zeros(47, requires_grad=True))
        return watch(functional.relu(y, inplace=True)) @ w

    assert_lean(function, [matrix(), matrix(47, 5)])


@pytest.mark.parametrize("change", [quietly(lambda y: y.mul_(3)), lambda y: y.detach().mul_(3), lambda y: y.mul_(3)])
def test_a_tensor_that_is_saved_changed_and_saved_again(change: Change) -> None:
    """The second one is not the first, though the memory is; only the second is asked for."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        y * w
        change(y)
        return y * w

    assert_same(function, matrix(), matrix())


def test_a_mask_that_is_saved_changed_and_saved_again() -> None:
    """A buffer that is filled anew for every use."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        mask = torch.zeros(64, 64, dtype=torch.bool)
        x.masked_fill(mask, 0.0)
        mask.fill_(True)
        return x.masked_fill(mask, 0.0) * w

    assert_same(function, matrix(64, 64), matrix(64, 64))


def test_what_a_function_wrote_on_its_own_result_is_no_change() -> None:
    """`linear` adds the bias in place where its input is not contiguous; whoever writes it afterwards is seen."""

    def function(change: Change, watch: Function, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        y = functional.linear(x.view(3, 11, 47).transpose(1, 2), w, bias)
        change(y)
        return watch(y).sin()

    inputs = matrix(), matrix(33, 11), torch.randn(33, requires_grad=True)
    first = Pass(partial(function, lambda y: y), inputs, EVERYTHING)
    assert {"AddBackward0", "MmBackward0"} <= first.names
    assert first.alive == [False]
    assert same_bits(first.bits, Pass(partial(function, lambda y: y), inputs, None).bits)
    for change in HIDDEN:
        again = Pass(partial(function, change), inputs, EVERYTHING, sites=first.sites)
        assert again.alive == [True]
        assert same_bits(again.bits, Pass(partial(function, change), inputs, None).bits)


class Clamping(TorchFunctionMode):
    """Somebody else's, entered before the block: writes behind autograd's back, where lean saves see nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.sin, functional.linear):
            out.detach().clamp_(max=0.9)
        return out


@pytest.mark.parametrize("function", [torch.sin, lambda x: functional.linear(x.t(), x.t() * 1, x[0])])
def test_what_a_function_wrote_behind_autograds_back_is_a_change(function: Function) -> None:
    """Also where it changes nothing the first time, when recipes are compared."""

    def block(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        return watch(function(x)).neg() * w.sum()

    small, large = [matrix().detach().mul_(0.01).requires_grad_(), matrix()], [matrix(), matrix()]
    with Clamping():
        first = Pass(block, small, EVERYTHING)
        again = Pass(block, large, EVERYTHING, sites=first.sites)
        assert same_bits(again.bits, Pass(block, large, None).bits)


def test_results_without_a_counter() -> None:
    """What is made in inference mode has no version."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        with torch.inference_mode():
            positions = torch.arange(47).float()
            apart = functional.linear(x, torch.ones(47, 47)).mean()
        return (functional.gelu(x) + positions.clone() + float(apart)) * w

    assert_same(function, matrix(), matrix())


class InPlace(torch.autograd.Function):
    """Writes over what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """ReLU."""
        ctx.mark_dirty(x.relu_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Where it is positive."""
        (out,) = ctx.saved_tensors
        return gradient * (out > 0)


def test_a_function_of_the_users_own_writes_a_view() -> None:
    """In the midst of it autograd holds a lock that asking for the view's node would wait for."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        return InPlace.apply(functional.linear(x, w).view(3, 11, 47)) * 2

    faulthandler.dump_traceback_later(60, exit=True)  # Python does not come to anything else meanwhile
    try:
        assert_same(function, matrix(), matrix(47))
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_another_tensor_in_the_same_memory_is_not_taken_for_the_first() -> None:
    """`.data` has a counter of its own, and `t_()` turns a tensor over that shares the memory."""

    def changed(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        y * w
        y.data.mul_(3)
        return y.data * w

    def turned(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        return y * w + (y.data.t_() * w.t()).t()

    def as_others(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = functional.silu(x)
        whole = y * w
        part = torch.empty(0).set_(y.detach().untyped_storage(), 47, (3, 47), (47, 1))
        return whole[:3] + part * w[:3]

    for function in (changed, turned, as_others):
        assert_same(function, matrix(), matrix())


def test_views_that_are_more_than_strides() -> None:
    """Conjugates, real parts, and the numbers of complex ones."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        y = torch.complex(x, w).sin()
        pairs = torch.view_as_real(y) * torch.stack([w, x], -1)
        return (y.conj() * torch.complex(w, x)).abs() + y.imag * w + pairs.sum(-1)

    assert_same(function, matrix(), matrix())


@pytest.mark.parametrize("known", [False, True])
def test_a_start_that_changed_before_the_result_was_saved(known: bool) -> None:
    """Nobody asks for the gradient that needs it, so plain autograd does not mind."""

    def changing(change: Change, x: Tensor, w: Tensor) -> Tensor:
        h = (x * 2).detach()
        h.requires_grad_()
        y = functional.gelu(h)
        change(h)
        return y * w

    x, w = matrix().detach(), matrix()
    change = quietly(lambda h: h.add_(1))
    sites = Pass(lambda _, *given: changing(lambda h: h, *given), [x, w], EVERYTHING).sites if known else Sites()

    def grad_of_w(grade: int | None) -> list[Tensor]:
        if grade is None:
            out = changing(change, x, w)
        else:
            with LeanSaves(sites, grade).active():
                out = changing(change, x, w)
        return list(torch.autograd.grad(out.sum(), [w]))

    assert same_bits(grad_of_w(EVERYTHING), grad_of_w(None))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_backward_inside_an_autocast_region(autocast: bool, inside: bool) -> None:
    """Rebuilt in the precision of the forward, not in that of where backward is called."""
    x, w, v = matrix(), matrix(), matrix(47, 33)

    def gradients(lean: bool) -> list[Tensor]:
        saves = LeanSaves(Sites(), EVERYTHING)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if lean:
                with saves.active():
                    out = functional.gelu((x * w) @ v).exp() @ x
            else:
                out = functional.gelu((x * w) @ v).exp() @ x
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return list(torch.autograd.grad(out.sum(), [x, w, v]))

    assert same_bits(gradients(True), gradients(False))


def test_a_product_out_of_autocast_inside_of_it() -> None:
    """What was computed in full precision is rebuilt so, and recognised when it is compared."""

    def function(watch: Function, x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ w.t()
        return watch(y) * w.sum()

    assert_lean(function, [matrix(), matrix()], autocast=True)


@pytest.mark.parametrize("threads", [(1, 3), (3, 1), (2, 3)])
def test_another_number_of_threads_in_backward(threads: tuple[int, int]) -> None:
    """Some kernels divide the elements otherwise and end in other last bits; the number is as before afterwards."""
    x, w = matrix(300, 301), matrix(300, 301)

    def gradients(lean: bool) -> list[Tensor]:
        torch.set_num_threads(threads[0])
        saves = LeanSaves(Sites(), EVERYTHING)
        if lean:
            with saves.active():
                out = functional.mish(functional.silu(x * w).sigmoid()) * w
        else:
            out = functional.mish(functional.silu(x * w).sigmoid()) * w
        torch.set_num_threads(threads[1])
        found = list(torch.autograd.grad(out.sum(), [x, w]))
        assert torch.get_num_threads() == threads[1]
        return found

    assert same_bits(gradients(True), gradients(False))


def test_a_parameter_that_is_changed_within_the_forward_is_not_rebuilt_from() -> None:
    """After its operation and before the result is saved, at a place that was tried without such a change."""
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    sites = Sites()

    def run(changes: bool, lean: bool) -> torch.Tensor:
        with torch.no_grad():
            parameter.fill_(0.5)
        saves = LeanSaves(sites, 1, leaves=[parameter])
        with saves.active() if lean else nullcontext():
            z = x.neg() + parameter
            if changes:
                with torch.no_grad():
                    parameter.mul_(3)
            out = z.sin().sum()
        return torch.autograd.grad(out, x)[0]

    assert torch.equal(run(False, True), run(False, False))
    assert torch.equal(run(True, True), run(True, False))


def test_a_dropout_whose_probability_is_a_tensor_may_change_it() -> None:
    """In place, between two forwards: the mask's number is another one."""
    p, x, sites = torch.tensor(0.5), torch.randn(64, 64, requires_grad=True), Sites()

    def gradient(lean: bool) -> torch.Tensor:
        torch.manual_seed(0)
        with LeanSaves(sites, MASKS).active() if lean else nullcontext():
            out = functional.dropout(x, p) * 2.0  # type: ignore[arg-type]
        return torch.autograd.grad(out.sum(), x)[0]

    for probability in (0.5, 0.75):
        p.fill_(probability)
        assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("operation", [torch.neg, lambda y: y.view(-1), torch.Tensor.t])
def test_long_chains_are_kept(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """However long: they are looked at no further than a recipe may go."""
    x = torch.ones(4096, requires_grad=True)
    with LeanSaves(Sites(), EVERYTHING).active():
        y = x * 2.0
        for _ in range(3000):
            y = operation(y)
        out = y.sin().sum()
    assert torch.equal(torch.autograd.grad(out, x)[0], 2 * torch.cos(2 * x))


def test_a_slice_that_was_written_under_no_grad() -> None:
    """Autograd refuses to tell anything of a view that was made there and written since; nobody has to ask."""

    def function(watch: Any, x: Tensor, w: Tensor) -> Tensor:
        h = x.sin()
        with torch.no_grad():
            h[:, :8] += 1
        return watch(torch.tanh(h.relu())) * w

    assert_same(function, matrix(), matrix())


def test_a_number_may_come_first_in_a_sum() -> None:
    """`torch.add` takes it, as other functions do."""

    def function(watch: Any, x: Tensor, w: Tensor) -> Tensor:
        return watch(torch.tanh(torch.add(1, x.sin()))) * torch.add(2.5, w.exp())

    assert_same(function, matrix(), matrix())


def test_another_layout_is_another_place() -> None:
    """Of one pixel, channels last is the layout that it has anyway, which says nothing of more."""
    sites, found = Sites(), []
    for side, lean in ((1, True), (5, False), (5, True)):
        torch.manual_seed(0)
        x, w = torch.randn(8, 64, side, side, requires_grad=True), torch.randn(64, requires_grad=True)
        with LeanSaves(sites, ELEMENTWISE, given=[x, w]).active() if lean else nullcontext():
            h = torch.relu(x)
            y = h.clone(memory_format=torch.channels_last)
            out = y.permute(0, 2, 3, 1) * w + (h * h).sum()
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, w])])
    assert same_bits(found[1], found[2])
