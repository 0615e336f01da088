"""Every recipe gives the bits of the operation it stands for, and the memory of its result is free meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.lean.recipes.table import TABLE, Entry
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.menu import ELEMENTWISE, EXPANSIONS, PRODUCTS
from tests.helpers.lean import Pass, Watch, assert_lean, same_bits

aten = torch.ops.aten

# For each entry of the table an expression of two matrices and two rows (all need gradients) that ends in its node.
# Elements are 33 x 47: no multiple of what kernels take at once.
CASES: dict[str, Callable[..., Tensor]] = {
    "GeluBackward0": lambda x, w, p, q: functional.gelu(x),
    "SiluBackward0": lambda x, w, p, q: functional.silu(x),
    "MishBackward0": lambda x, w, p, q: functional.mish(x),
    "HardswishBackward0": lambda x, w, p, q: functional.hardswish(x),
    "LeakyReluBackward0": lambda x, w, p, q: functional.leaky_relu(x, 0.3),
    "SoftplusBackward0": lambda x, w, p, q: functional.softplus(x, 2.0, 1.5),
    "HardtanhBackward0": lambda x, w, p, q: functional.relu6(x),
    "HardsigmoidBackward0": lambda x, w, p, q: functional.hardsigmoid(3 * x),
    "LogSigmoidBackward0": lambda x, w, p, q: functional.logsigmoid(x),
    "SoftshrinkBackward0": lambda x, w, p, q: functional.softshrink(x, 0.3),
    "HardshrinkBackward0": lambda x, w, p, q: functional.hardshrink(x, 0.3),
    "ThresholdBackward0": lambda x, w, p, q: functional.threshold(x, 0.3, -0.7),
    "ClampBackward1": lambda x, w, p, q: x.clamp(-0.5, 0.25),
    "ClampMinBackward0": lambda x, w, p, q: x.clamp_min(-0.5),
    "ClampMaxBackward0": lambda x, w, p, q: x.clamp_max(0.5),
    "PreluKernelBackward0": lambda x, w, p, q: functional.prelu(x, q),
    "CeluBackward0": lambda x, w, p, q: functional.celu(x, 1.3),
    "EluBackward0": lambda x, w, p, q: functional.elu(x, 0.7),
    "GluBackward0": lambda x, w, p, q: functional.glu(torch.stack([x, w]), 0),
    "PowBackward0": lambda x, w, p, q: x.pow(3),
    "SinBackward0": lambda x, w, p, q: x.sin(),
    "CosBackward0": lambda x, w, p, q: x.cos(),
    "LogBackward0": lambda x, w, p, q: x.log(),  # not a number in places
    "ErfBackward0": lambda x, w, p, q: x.erf(),
    "AbsBackward0": lambda x, w, p, q: x.abs(),
    "ReluBackward0": lambda x, w, p, q: x.relu(),
    "TanhBackward0": lambda x, w, p, q: x.tanh(),
    "SigmoidBackward0": lambda x, w, p, q: x.sigmoid(),
    "ExpBackward0": lambda x, w, p, q: x.exp(),
    "SqrtBackward0": lambda x, w, p, q: x.sqrt(),
    "RsqrtBackward0": lambda x, w, p, q: x.rsqrt(),
    "NegBackward0": lambda x, w, p, q: -x,
    "MulBackward0": lambda x, w, p, q: x * p,
    "DivBackward0": lambda x, w, p, q: x / p,
    "MaximumBackward0": lambda x, w, p, q: torch.maximum(x, w),
    "MinimumBackward0": lambda x, w, p, q: torch.minimum(x, p),
    "WhereBackward0": lambda x, w, p, q: torch.where(x > w, x, w),
    "AddBackward0": lambda x, w, p, q: torch.add(x, p, alpha=2),
    "SubBackward0": lambda x, w, p, q: torch.sub(x, p, alpha=3),
    "RsubBackward0": lambda x, w, p, q: torch.rsub(x, p, alpha=3),
    "RsubBackward1": lambda x, w, p, q: 3 - x,
    "ToCopyBackward0": lambda x, w, p, q: x.double(),
    "MeanBackward1": lambda x, w, p, q: x.expand(47, 33, 47).mean(1, keepdim=True).expand(47, 33, 47).mean(0),
    "NativeLayerNormBackward0": lambda x, w, p, q: functional.layer_norm(x, (47,), p, q, 1e-3),
    "NativeGroupNormBackward0": lambda x, w, p, q: functional.group_norm(x, 1, p, q, 1e-3),
    "NativeBatchNormBackward0": lambda x, w, p, q: functional.batch_norm(x, None, None, p, q, True, 0.1, 1e-3),
    "SoftmaxBackward0": lambda x, w, p, q: x.softmax(-1),
    "SafeSoftmaxBackward0": lambda x, w, p, q: torch._safe_softmax(x, -1),
    "BmmBackward0": lambda x, w, p, q: torch.bmm(x[None], w.t()[None]),
    "MmBackward0": lambda x, w, p, q: x.t() @ w,
    "AddmmBackward0": lambda x, w, p, q: torch.addmm(p, x.t(), w, beta=2, alpha=3),
    "ConvolutionBackward0": lambda x, w, p, q: functional.conv2d(x[None, None], w[:, :9].reshape(33, 1, 3, 3), p[:33]),
    # What follows gives no tensor that is saved as it is; one that is rebuilt from it is.
    "ViewBackward0": lambda x, w, p, q: -x.view(47, 33),
    "UnsafeViewBackward0": lambda x, w, p, q: x.view(3, 11, 47) @ w.t(),
    "ReshapeAliasBackward0": lambda x, w, p, q: -aten._reshape_alias(x, (47, 33), (33, 1)),
    "ExpandBackward0": lambda x, w, p, q: -p.expand(33, 47),
    "TransposeBackward0": lambda x, w, p, q: -x.transpose(0, -1),
    "TBackward0": lambda x, w, p, q: -x.t(),
    "PermuteBackward0": lambda x, w, p, q: -x.permute(-1, 0),
    "UnsqueezeBackward0": lambda x, w, p, q: -x.unsqueeze(-1),
    "SelectBackward0": lambda x, w, p, q: -x.expand(2, 33, 47)[-2],
    "UnbindBackward0": lambda x, w, p, q: -x.expand(2, 33, 47).unbind(-3)[1],
    "SplitBackward0": lambda x, w, p, q: -x.expand(3, 33, 47).split(2, -3)[1],
    "SplitWithSizesBackward0": lambda x, w, p, q: -x.split([3, 4, 40], 1)[2],
    "RepeatBackward0": lambda x, w, p, q: -p.repeat(33, 2),
    "SliceBackward0": lambda x, w, p, q: -x[1:-1, :-2],
    "CloneBackward0": lambda x, w, p, q: x.t().contiguous(),
}
GRADE_OF = {"UnsafeViewBackward0": PRODUCTS}
"""Where the least grade is not the entry's own: it takes a product to get there."""


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What `CASES` are given; the first row is nowhere near zero."""
    shapes = (33, 47), (33, 47), (47,), (47,)
    x, w, p, q = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [each.requires_grad_() for each in (x, w, p.abs() + 0.5, q)]


def saved_once(expression: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose last operation saves what the expression gives."""

    def function(watch: Watch, *args: Tensor) -> Tensor:
        y = watch(expression(*args))
        return y * torch.ones_like(y, requires_grad=True)

    return function


@pytest.mark.parametrize(("inner", "width", "grade"), [(16, 17, EXPANSIONS), (16, 16, PRODUCTS), (17, 16, PRODUCTS)])
@pytest.mark.parametrize("kind", ["linear", "without bias", "convolution"])
def test_a_product_is_an_expansion_where_its_result_is_wider(kind: str, inner: int, width: int, grade: int) -> None:
    """Than what one element of it is made from: a byte of it costs less than one of a narrow result."""

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if kind == "convolution":
            y = watch(functional.conv2d(x, w, b, stride=2, padding=1))
        else:
            y = watch(functional.linear(x, w, b if kind == "linear" else None))
        return y * torch.ones_like(y, requires_grad=True)

    b = torch.randn(width, requires_grad=True)
    x = torch.randn((8, inner, 12, 10) if kind == "convolution" else (64, inner), requires_grad=True)
    w = torch.randn((width, inner) + ((1, 1) if kind == "convolution" else ()), requires_grad=True)
    assert_lean(function, [x, w, b], grade)
    assert Pass(function, [x, w, b], grade - 1).alive == [True]


def test_a_convolution_channel_by_channel_is_cheap() -> None:
    """Nine products for each element."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        y = watch(functional.conv2d(x, w, None, stride=2, padding=1, groups=16))
        return y * torch.ones_like(y, requires_grad=True)

    x, w = torch.randn(8, 16, 12, 10, requires_grad=True), torch.randn(16, 1, 3, 3, requires_grad=True)
    assert_lean(function, [x, w], EXPANSIONS)


def test_a_convolution_whose_bias_is_frozen_is_kept() -> None:
    """Its node does not know the bias."""

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = watch(functional.conv2d(x, w, b))
        return y * torch.ones_like(y, requires_grad=True)

    given = [torch.randn(4, 4, 9, 9, requires_grad=True), torch.randn(16, 4, 1, 1, requires_grad=True), torch.randn(16)]
    plain, lean = Pass(function, given, None), Pass(function, given, PRODUCTS)
    assert lean.alive == [True]
    assert same_bits(lean.bits, plain.bits)


def test_every_recipe_has_a_case() -> None:
    """And every case a recipe."""
    assert CASES.keys() == TABLE.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_what_was_dropped_is_rebuilt_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    """In the least grade that has the recipe; in the one below, the tensor stays."""
    function, given = saved_once(CASES[name]), inputs(dtype)
    grade = GRADE_OF.get(name, TABLE[name].grade)
    plain = assert_lean(function, given, grade)
    assert name in plain.names
    below = Pass(function, given, grade - 1)
    assert below.alive == [True]
    assert same_bits(below.bits, plain.bits)


def test_another_torch_may_not_save_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.14 has no more eps for group norm: whoever asks for one that is not there keeps the tensor."""
    monkeypatch.setitem(TABLE, "GeluBackward0", Entry(ELEMENTWISE, lambda node: node.field("of another version")))
    function, given = saved_once(CASES["GeluBackward0"]), inputs()
    plain, lean = Pass(function, given, None), Pass(function, given, PRODUCTS)
    assert lean.alive == [True]
    assert same_bits(lean.bits, plain.bits)


GROUP_NORMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: functional.group_norm(x, 1, eps=0.7),
    lambda x: torch.group_norm(x, 1, None, None, 0.7),
    torch.nn.GroupNorm(47, 47, eps=0.7),
]


@pytest.mark.parametrize("number", range(len(GROUP_NORMS)))
def test_the_eps_of_a_group_norm(number: int) -> None:
    """Whichever way it is called, and by name or place."""
    assert_lean(saved_once(lambda x, w, p, q: GROUP_NORMS[number](x)), inputs(), ELEMENTWISE)


WITH_AUTOCAST = ["Gelu", "Silu", "Mul", "Add", "NativeLayerNorm", "Softmax", "Relu", "Mm", "Addmm", "Bmm", "UnsafeView"]


@pytest.mark.parametrize("name", WITH_AUTOCAST)
def test_what_was_dropped_is_rebuilt_in_its_precision(name: str) -> None:
    """Under autocast, of a product in half precision."""
    case = CASES[f"{name}Backward0"]

    def function(watch: Watch, x: Tensor, w: Tensor, p: Tensor, q: Tensor) -> Tensor:
        half = x @ (w.t() @ w)
        y = watch(case(half, w, p, q))
        return (y * torch.ones_like(y, requires_grad=True)).float()

    assert f"{name}Backward0" in assert_lean(function, inputs(), autocast=True).names


NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 1.5,
    lambda x: 1.5 + x,
    lambda x: x - 1.5,
    lambda x: 1.5 - x,
    lambda x: torch.add(x, 1.5, alpha=2),
    lambda x: torch.sub(x, 1.5, alpha=2),
    lambda x: torch.rsub(x, 1.5, alpha=2),
    lambda x: x.add(2).sub(3),
    lambda x: x * 0.1,
    lambda x: 0.1 * x,
    lambda x: x / 3,
    lambda x: x**2,
    lambda x: x.pow(-1.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(len(NUMBERS)))
def test_numbers_are_remembered(number: int, dtype: torch.dtype) -> None:
    """On either side."""
    assert_lean(saved_once(lambda x, w, p, q: NUMBERS[number](x)), inputs(dtype), ELEMENTWISE)


ONE_SIDED: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mul, lambda x, c: c * x, lambda x, c: x / c]


@pytest.mark.parametrize("number", range(len(ONE_SIDED)))
def test_operands_that_need_no_gradient(number: int) -> None:
    """Autograd saves one side only, or that which it needs."""
    constant = torch.rand(33, 47) + 0.5
    assert_lean(saved_once(lambda x, w, p, q: ONE_SIDED[number](x, constant)), inputs(), ELEMENTWISE)


MIXED: list[Callable[..., Tensor]] = [
    lambda x, w, p, q: x.bfloat16() * w,
    lambda x, w, p, q: (x.bfloat16() * p.bfloat16()).float() * q,
    lambda x, w, p, q: functional.layer_norm(x, (47,)),
    lambda x, w, p, q: functional.group_norm(x, 1),
    lambda x, w, p, q: functional.softmax(x.bfloat16(), -1, dtype=torch.float32),
    lambda x, w, p, q: functional.softmax(x, 0),
    lambda x, w, p, q: functional.gelu(x, approximate="tanh"),
    lambda x, w, p, q: functional.glu(torch.cat([x, w], -1)[:, :46], -1),
    lambda x, w, p, q: torch._safe_softmax(x.masked_fill(torch.arange(33)[:, None] == 3, -torch.inf).clone(), -1),
    lambda x, w, p, q: functional.gelu(x.t()),
    lambda x, w, p, q: functional.silu(x[::2, 1:]),
    lambda x, w, p, q: functional.gelu(x.view(3, 11, 47).transpose(0, 1)).transpose(1, 2).contiguous(),
]


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_other_precisions_layouts_and_arguments(number: int) -> None:
    """The kernel that is run again is given what the first one was."""
    function, given = saved_once(MIXED[number]), inputs()
    plain = Pass(function, given, None)
    lean = Pass(function, given, PRODUCTS)
    again = Pass(function, given, PRODUCTS, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)


ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    functional.selu,
    torch.nn.SELU(),
    torch.nn.CELU(0.7),
    torch.nn.PReLU(),
    torch.nn.PReLU(47, 0.1),
    torch.nn.Threshold(0.1, 20.0),
    lambda x: torch.threshold(x, threshold=0.1, value=20),
    lambda x: functional.elu(x, 0.7),
    lambda x: x.clamp(min=-0.5),
    lambda x: x.clamp(max=0.5),
    lambda x: torch.clip(x, -1, 2),
    lambda x: torch.where(x > 0, x * x, x),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "a part": lambda x: x[:, 3:-2],
    "a piece of a split": lambda x: x.split([20, 27], -1)[1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_activations_however_they_are_called(number: int, dtype: torch.dtype) -> None:
    """With the numbers that they were given."""
    function = copy.deepcopy(ACTIVATIONS[number])
    given = inputs(dtype)
    if isinstance(function, torch.nn.Module):
        given += function.to(dtype).parameters()
    assert_lean(saved_once(lambda x, *_: function(x)), given, ELEMENTWISE)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_activations_of_other_layouts(number: int, layout: str) -> None:
    """Whether or not something comes of it, no bit differs."""
    operation = ACTIVATIONS[number]
    if isinstance(operation, torch.nn.PReLU) and operation.num_parameters > 1:
        operation = torch.nn.PReLU()
    function, given = saved_once(lambda x, *_: operation(LAYOUTS[layout](x * 2))), inputs()
    plain = Pass(function, given, None)
    lean = Pass(function, given, PRODUCTS)
    again = Pass(function, given, PRODUCTS, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)


IN_PLACE: list[Callable[[Tensor], Tensor]] = [
    lambda x: functional.selu_(x),
    lambda x: functional.celu_(x, 1.3),
    lambda x: functional.threshold(x, 0.1, 0.3, inplace=True),
    lambda x: functional.hardsigmoid(x, inplace=True),
    lambda x: x.clamp_(-0.5, 0.5),
    lambda x: x.clamp_min_(0.1),
    lambda x: x.erf_(),
    lambda x: x.clamp_max(0.5).add_(1),
    lambda x: torch.maximum(x, x.t().t() + 1).mul_(2),
]


@pytest.mark.parametrize("number", range(len(IN_PLACE)))
def test_activations_in_place(number: int) -> None:
    """On what another operation has made, and then saved as it is now."""
    function = saved_once(lambda x, w, p, q: IN_PLACE[number](x + w))
    given = inputs()
    plain = Pass(function, given, None)
    lean = Pass(function, given, PRODUCTS)
    again = Pass(function, given, PRODUCTS, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.t(),
    lambda y: y.view(3, 11, 47),
    lambda y: y[3:7],
    lambda y: y[:, 5],
    lambda y: y[0, :3],
    lambda y: y.unsqueeze(0).expand(4, 33, 47),
    lambda y: y.view(11, 3, 47).permute(2, 0, 1)[1:],
    lambda y: y.chunk(2)[1],
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
@pytest.mark.parametrize("both", [False, True])
def test_views_of_what_is_rebuilt(number: int, both: bool) -> None:
    """However small, a view that is saved does not hold the memory."""
    view = VIEWS[number]

    def function(watch: Watch, x: Tensor, w: Tensor, p: Tensor, q: Tensor) -> Tensor:
        y = watch(functional.silu(x))
        seen = view(y)
        out = (seen * torch.ones_like(seen, requires_grad=True)).sum()
        return out + (y * w).sum() if both else out

    assert_lean(function, inputs(), ELEMENTWISE)


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "rows", "rows of steps", "volumes", "bfloat16", "double"]
)
def test_batch_norm_in_every_layout(layout: str) -> None:
    """Those that the kernel has a way of its own for, and those that it has not."""
    shapes = {"rows": (33, 17), "rows of steps": (5, 17, 11), "volumes": (2, 17, 3, 5, 7)}
    x = torch.randn(shapes.get(layout, (4, 17, 6, 9))) * 3 + 1
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3)
    w, b = torch.randn(17), torch.randn(17)
    if layout in ("bfloat16", "double"):
        x, w, b = (each.to(getattr(torch, layout)) for each in (x, w, b))

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = watch(functional.batch_norm(x, None, None, w, b, True, 0.1, 1e-3))
        return y * torch.ones_like(y, requires_grad=True)

    assert_lean(function, [x.requires_grad_(), w.requires_grad_(), b.requires_grad_()], ELEMENTWISE)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", [functional.silu, functional.hardswish, functional.mish])
def test_what_is_activated_in_place_is_saved_as_a_clone(
    activation: Callable[..., Tensor], layout: torch.memory_format
) -> None:
    """Of its own layout, by which it is rebuilt as well."""
    x = (torch.randn(4, 17, 6, 9) * 3 + 1).contiguous(memory_format=layout)

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = activation(functional.batch_norm(x, None, None, w, b, True, 0.1, 1e-3), inplace=True)
        return y * torch.ones_like(y, requires_grad=True)

    given = [each.requires_grad_() for each in (x, torch.randn(17), torch.randn(17))]
    plain = Pass(function, given, None)
    lean = Pass(function, given, ELEMENTWISE)
    again = Pass(function, given, ELEMENTWISE, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)
    assert "CloneBackward0" in {place.made_by for place in lean.sites.checked}
    assert not lean.sites.different


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "rows", "bfloat16", "double"])
@pytest.mark.parametrize("kind", ["batch", "instance", "instance, affine"])
def test_norms_without_parameters_and_of_instances(kind: str, layout: str) -> None:
    """Of instances it is a batch norm of each channel of each: their parameters are repeated."""
    x = torch.randn((4, 17, 60) if layout == "rows" else (4, 17, 6, 9)) * 3 + 1
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3)
    dtype = getattr(torch, layout) if layout in ("bfloat16", "double") else torch.float32
    w, b = (torch.randn(17, dtype=dtype, requires_grad=True) for _ in range(2))

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if kind == "batch":
            y = functional.batch_norm(x, None, None, training=True, eps=1e-3)
        else:
            affine = (w, b) if "affine" in kind else (None, None)
            y = functional.instance_norm(x, None, None, *affine, eps=1e-3)
        y = watch(y)
        return y * torch.ones_like(y, requires_grad=True)

    assert_lean(function, [x.to(dtype).requires_grad_(), w, b], ELEMENTWISE)


@pytest.mark.parametrize("weight", [False, True])
def test_a_norm_whose_bias_is_frozen_is_kept(weight: bool) -> None:
    """Its node does not know it; it may be zero now, and another number later."""
    bias, sites = torch.zeros(17), Sites()

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        y = watch(functional.batch_norm(x, None, None, w if weight else None, bias, True, 0.1, 1e-3))
        return y * torch.ones_like(y, requires_grad=True)

    given = [torch.randn(4, 17, 6, 9, requires_grad=True), torch.randn(17, requires_grad=True)]
    for _ in range(3):
        plain, lean = Pass(function, given, None), Pass(function, given, PRODUCTS, sites=sites)
        assert lean.alive == [True]
        assert same_bits(lean.bits, plain.bits)
        bias += 1


class Norms(TorchDispatchMode):
    """Whether each batch norm that ran computed statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.training: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.native_batch_norm.default:
            self.training.append(args[5])
        return func(*args, **(kwargs or {}))


def test_batch_norm_does_not_compute_its_statistics_again() -> None:
    """They are saved anyway; and the running ones stay what they are."""
    norm, sites = torch.nn.BatchNorm2d(17), Sites()
    x = torch.randn(4, 17, 6, 9, requires_grad=True)
    for _ in range(3):
        with LeanSaves(sites, ELEMENTWISE).active():
            out = norm(x).relu()
        running = norm.running_mean.clone()
        with Norms() as norms:
            out.sum().backward()
        assert norms.training == [False]
        assert torch.equal(norm.running_mean, running)
