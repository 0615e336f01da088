"""The table of recipes: which operation's result is rebuilt how, and from what.

An entry is named after autograd's node. It is given a `Node`, through which it asks for what the node saved, for
what its inputs are rebuilt from, and for constants; if anything is missing the tensor is kept. To add a recipe, add
a function here and a row to `tests/actions/lean/test_recipes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mimose.actions.lean.handles import Handle, Number, Rebuild, is_ordered

GRADES = ("lean", "lean+masks", "lean+attention", "lean+expansions", "lean+products")
"""Actions, each of which rebuilds what the one before does and more.

Element-wise operations and norms; masks as bits, and products with them; softmax from its scores; products whose result
is wider than what it is made from, so that a byte of it costs little; all matrix products and convolutions.
"""
ELEMENTWISE, MASKS, ATTENTION, EXPANSIONS, PRODUCTS = range(1, 6)

# What an element costs, in operations of a matrix product that take as long. Bandwidth decides for most. Measured in
# steps of BERT (two CPU cores), where what they read is long out of the caches; `bench grades` in `examples` compares.
VIEW, LIGHT, HEAVY, SOFTMAX, NORM, GELU = 0.0, 80.0, 100.0, 120.0, 150.0, 110.0
MASK = 220.0
"""To pack an element of a mask and unpack it."""
ALLOCATED = 30.0
"""How much of that goes for memory to write to: spared where a result is written over a value."""
PRODUCT = 1.0
"""The same for an operation of a matrix product."""


class Node(Protocol):
    """One operation, as recipes see it."""

    raw: Any
    """Autograd's own node, for fields that are no tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its result."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its result."""

    @property
    def device(self) -> torch.device:
        """Of its result."""

    def saved(self, name: str) -> Handle | None:
        """What the node saved under a name, if it is ours."""

    def edge(self, index: int) -> Handle | None:
        """The value that input `index` had, if it can be had."""

    def scores(self) -> Handle | None:
        """As `edge(0)`; a batched product on the way to it is attention's, of a lower grade than others."""

    def operand(self, name: str, index: int) -> Handle | None:
        """`saved`, or `edge` where the node did not need to save it."""

    def given(self, tensor: Tensor) -> Handle | None:
        """A tensor without gradients, if it is there as long as the recipe may need it."""

    def mask(self) -> Handle | None:
        """What attention's own function added to its scores, if this is that sum."""

    def constant(self, name: str) -> Any:
        """A number that the operation was called with and its node does not have; None if it was not seen."""


class Made(NamedTuple):
    """How to rebuild.

    Attributes:
        rebuild: A function of the inputs' values.
        inputs: What it is given.
        work_per_element: Operations it takes.
        work: Those that do not go with the elements.
        takes_out: Whether it takes a keyword `out`, which may be one of the values: then nothing is allocated.
        gives_away: Whether nobody else has its result: it is never one of the values, or a part of one. Of a view:
            whether it is all of the value in the same order. What takes `out` says so with it.
        grade: Its own grade, if that is more than its entry's.
    """

    rebuild: Rebuild
    inputs: tuple[Handle | None, ...]
    work_per_element: float
    work: float = 0.0
    takes_out: bool = False
    gives_away: bool = False
    grade: int = 0


class Entry(NamedTuple):
    """A row of the table."""

    grade: int
    make: Callable[[Node], Made | None]


TABLE: dict[str, Entry] = {}


def recipe(*names: str, grade: int = ELEMENTWISE) -> Callable[[Callable[[Node], Made | None]], Any]:
    """Enter a recipe for nodes of some names."""

    def enter(make: Callable[[Node], Made | None]) -> Callable[[Node], Made | None]:
        for name in names:
            TABLE[name] = Entry(grade, make)
        return make

    return enter


def _signed(number: int) -> int:
    """Dimensions come back as unsigned 64-bit integers."""
    return number - 2**64 if number >= 2**63 else number


# --- activations --------------------------------------------------------------------------------------------------


@recipe("GeluBackward0")
def _gelu(node: Node) -> Made:
    approximate = node.raw._saved_approximate
    return Made(partial(functional.gelu, approximate=approximate), (node.saved("self"),), GELU, gives_away=True)


def _of_saved_self(name: str, function: Callable[..., Tensor], *fields: str) -> None:
    def make(node: Node) -> Made:
        arguments = [getattr(node.raw, f"_saved_{field}") for field in fields]
        return Made(lambda x: function(x, *arguments), (node.saved("self"),), HEAVY, gives_away=True)

    recipe(name)(make)


_of_saved_self("SiluBackward0", functional.silu)
_of_saved_self("MishBackward0", functional.mish)
_of_saved_self("HardswishBackward0", functional.hardswish)
_of_saved_self("LeakyReluBackward0", functional.leaky_relu, "negative_slope")
_of_saved_self("SoftplusBackward0", functional.softplus, "beta", "threshold")
_of_saved_self("HardtanhBackward0", functional.hardtanh, "min_val", "max_val")
_of_saved_self("PowBackward0", torch.pow, "exponent")
_of_saved_self("SinBackward0", torch.sin)
_of_saved_self("CosBackward0", torch.cos)
_of_saved_self("LogBackward0", torch.log)
_of_saved_self("AbsBackward0", torch.abs)


@recipe("EluBackward0")
def _elu(node: Node) -> Made | None:
    raw = node.raw
    if raw._saved_scale != 1 or raw._saved_input_scale != 1:
        return None
    return Made(partial(functional.elu, alpha=raw._saved_alpha), (node.saved("self"),), HEAVY, gives_away=True)


@recipe("GluBackward0")
def _glu(node: Node) -> Made:
    return Made(
        partial(functional.glu, dim=_signed(node.raw._saved_dim)), (node.saved("self"),), HEAVY, gives_away=True
    )


def _of_input(name: str, function: Callable[..., Tensor], work: float) -> None:
    """For operations that save their own result."""
    recipe(name)(lambda node: Made(function, (node.edge(0),), work, takes_out=True))


def _relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.relu(x) if out is None else torch.relu_(out)  # the only value there is


_of_input("ReluBackward0", _relu, LIGHT)
_of_input("TanhBackward0", torch.tanh, HEAVY)
_of_input("SigmoidBackward0", torch.sigmoid, HEAVY)
_of_input("ExpBackward0", torch.exp, HEAVY)
_of_input("SqrtBackward0", torch.sqrt, LIGHT)
_of_input("RsqrtBackward0", torch.rsqrt, LIGHT)
_of_input("NegBackward0", torch.neg, LIGHT)


# --- arithmetic ---------------------------------------------------------------------------------------------------


@recipe("MulBackward0")
def _mul(node: Node) -> Made:
    return Made(torch.mul, (node.operand("self", 0), node.operand("other", 1)), LIGHT, takes_out=True)


@recipe("DivBackward0")
def _div(node: Node) -> Made:
    return Made(torch.div, (node.operand("self", 0), node.operand("other", 1)), LIGHT, takes_out=True)


@recipe("AddBackward0")
def _add(node: Node) -> Made | None:
    alpha, number, swapped = node.raw._saved_alpha, node.constant("operand"), node.constant("swapped")
    if number is None:
        return _sum(torch.add, alpha, node.edge(0), node.mask() or node.edge(1))
    if isinstance(number, Tensor):  # added to what has gradients: an attention mask
        values = (node.given(number), node.edge(1)) if swapped else (node.edge(0), node.given(number))
        return _sum(torch.add, alpha, *values)
    if swapped:  # `1 + x` is x.__radd__(1), which torch computes as x + 1
        number, alpha = number, 1
    return _sum(torch.add, alpha, node.edge(0), Number(number))


@recipe("SubBackward0")
def _sub(node: Node) -> Made | None:
    number = node.constant("operand")
    return _sum(torch.sub, node.raw._saved_alpha, node.edge(0), node.edge(1) if number is None else Number(number))


def _sum(function: Callable[..., Tensor], alpha: Any, one: Handle | None, other: Handle | None) -> Made:
    return Made(partial(function, alpha=alpha), (one, other), LIGHT, takes_out=True)


@recipe("RsubBackward0")
def _rsub(node: Node) -> Made:
    return Made(partial(torch.rsub, alpha=node.raw._saved_alpha), (node.edge(0), node.edge(1)), LIGHT)


@recipe("RsubBackward1")
def _rsub_from_number(node: Node) -> Made | None:
    alpha, number = node.raw._saved_alpha, node.constant("operand")
    if number is None:
        return None
    return Made(lambda x: torch.rsub(x, number, alpha=alpha), (node.edge(0),), LIGHT)


@recipe("ToCopyBackward0")
def _to(node: Node) -> Made:
    return Made(lambda x, dtype=node.dtype: x.to(dtype, copy=True), (node.edge(0),), LIGHT, gives_away=True)


@recipe("MeanBackward1")
def _mean(node: Node) -> Made | None:
    dims = [_signed(dim) for dim in node.raw._saved_dim]
    x, keepdim = node.edge(0), node.raw._saved_keepdim
    if x is None:
        return None
    return Made(lambda x: x.mean(dims, keepdim=keepdim), (x,), 0.0, LIGHT * prod(x.shape), gives_away=True)


# --- norms --------------------------------------------------------------------------------------------------------


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Node) -> Made | None:
    eps = node.constant("eps")
    if eps is None:
        return None
    shape = tuple(node.raw._saved_normalized_shape)
    weight, bias = node.saved("weight"), node.saved("bias")
    if weight is None and bias is None:
        return Made(
            lambda x: torch.native_layer_norm(x, shape, None, None, eps)[0],
            (node.saved("input"),),
            NORM,
            gives_away=True,
        )
    if weight is None or bias is None:
        return Made(
            lambda x, w: torch.native_layer_norm(x, shape, w, None, eps)[0], (node.saved("input"), weight), NORM
        )
    return Made(
        lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0], (node.saved("input"), weight, bias), NORM
    )


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Node) -> Made | None:
    raw = node.raw
    sizes = (raw._saved_N, raw._saved_C, raw._saved_HxW, raw._saved_group, raw._saved_eps)
    weight = node.saved("weight")
    if weight is None:
        return Made(
            lambda x: torch.native_group_norm(x, None, None, *sizes)[0], (node.saved("input"),), NORM, gives_away=True
        )
    bias = node.edge(2)
    return Made(
        lambda x, w, b: torch.native_group_norm(x, w, b, *sizes)[0],
        (node.saved("input"), weight, bias),
        NORM,
        gives_away=True,
    )


@recipe("NativeBatchNormBackward0")
def _batch_norm(node: Node) -> Made | None:
    raw = node.raw
    eps, weight = raw._saved_eps, node.saved("weight")
    if not raw._saved_training or weight is None:
        return None
    statistics = node.saved("result1"), node.saved("result2")
    return Made(
        partial(_normalized, eps), (node.saved("input"), weight, node.edge(2), *statistics), HEAVY, gives_away=True
    )


def _normalized(eps: float, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    # Kernels of the CPU multiply by `invstd * weight`, however they came by it, if the elements are in some order of
    # theirs. With a variance of 1 they are spared the statistics, which take several times as long as the rest.
    if x.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64) and is_ordered(x):
        return torch.native_batch_norm(x, invstd * weight, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    # Batch statistics again, and no running ones: those have moved with the forward.
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


# --- softmax ------------------------------------------------------------------------------------------------------


@recipe("SoftmaxBackward0", grade=ATTENTION)
def _softmax(node: Node) -> Made:
    dim = _signed(node.raw._saved_dim)
    return Made(partial(_soft, dim), (node.scores(),), SOFTMAX, takes_out=_by_rows(node, dim), gives_away=True)


@recipe("SafeSoftmaxBackward0", grade=ATTENTION)
def _safe_softmax(node: Node) -> Made:
    dim = _signed(node.raw._saved_dim)
    return Made(partial(_safe, dim), (node.scores(),), SOFTMAX, takes_out=_by_rows(node, dim), gives_away=True)


def _by_rows(node: Node, dim: int) -> bool:
    """Whether softmax may be written over its scores: so the CPU makes it, row by row; of others nobody says it."""
    return node.device.type == "cpu" and dim in (-1, len(node.shape) - 1)


def _soft(dim: int, scores: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.softmax(scores, dim, out=out if scores.is_contiguous() else None)


def _safe(dim: int, scores: Tensor, out: Tensor | None = None) -> Tensor:
    """As torch does it, zeros for rows that are masked altogether, but without tensors as large as the scores."""
    if scores.device.type != "cpu" or scores.size(dim) == 0:  # elsewhere to look at a value would wait for it
        return torch._safe_softmax(scores, dim)
    hidden = None
    if (scores.select(dim, 0) == -torch.inf).any():  # where it is not so, no row is
        hidden = scores.amax(dim, keepdim=True) == -torch.inf
    made = _soft(dim, scores, out)
    return made if hidden is None else made.masked_fill_(hidden, 0.0)


# --- products -----------------------------------------------------------------------------------------------------


@recipe("BmmBackward0", grade=PRODUCTS)
def _bmm(node: Node) -> Made | None:
    return _product(torch.bmm, node, node.saved("self"), node.saved("mat2"))


@recipe("MmBackward0", grade=EXPANSIONS)
def _mm(node: Node) -> Made | None:
    return _product(torch.mm, node, node.saved("self"), node.saved("mat2"))


@recipe("AddmmBackward0", grade=EXPANSIONS)
def _addmm(node: Node) -> Made | None:
    bias, alpha, beta = node.edge(0), node.raw._saved_alpha, node.raw._saved_beta
    if bias is None:
        return None

    def addmm(one: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, one, other, beta=beta, alpha=alpha)

    return _product(addmm, node, node.saved("mat1"), node.saved("mat2"), bias)


def _product(rebuild: Rebuild, node: Node, one: Handle | None, other: Handle | None, *more: Handle) -> Made | None:
    if one is None or other is None:
        return None
    return _summed(rebuild, node, one.shape[-1], node.shape[-1], one, other, *more)


@recipe("ConvolutionBackward0", grade=EXPANSIONS)
def _convolution(node: Node) -> Made | None:
    raw = node.raw
    x, weight = node.saved("input"), node.saved("weight")
    if x is None or weight is None or not weight.shape or raw._saved_transposed:
        return None
    biases = [node.edge(2)] if any(raw._saved_bias_sym_sizes_opt or ()) else []
    if None in biases:
        return None
    stride, padding, dilation = (list(getattr(raw, f"_saved_{n}")) for n in ("stride", "padding", "dilation"))
    rest = (stride, padding, dilation, False, list(raw._saved_output_padding), raw._saved_groups)

    def convolution(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return torch.convolution(x, weight, bias[0] if bias else None, *rest)

    inner, width = prod(weight.shape[1:]), weight.shape[0]
    return _summed(convolution, node, inner, width, x, weight, *biases)


def _summed(rebuild: Rebuild, node: Node, inner: int, width: int, *inputs: Handle | None) -> Made:
    """Of a result each of whose elements is a sum over `inner` products, and of which `width` are made from those."""
    work = PRODUCT * 2.0 * prod(node.shape) * inner
    return Made(rebuild, inputs, 0.0, work, gives_away=True, grade=EXPANSIONS if width > inner else PRODUCTS)


# --- views --------------------------------------------------------------------------------------------------------


@recipe("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
def _view(node: Node) -> Made:
    return Made(lambda x, shape=node.shape: x.view(shape), (node.edge(0),), VIEW, gives_away=True)


@recipe("ExpandBackward0")
def _expand(node: Node) -> Made:
    return Made(lambda x, shape=node.shape: x.expand(shape), (node.edge(0),), VIEW)


@recipe("TransposeBackward0")
def _transpose(node: Node) -> Made:
    dims = _signed(node.raw._saved_dim0), _signed(node.raw._saved_dim1)
    return Made(lambda x: x.transpose(*dims), (node.edge(0),), VIEW)


@recipe("TBackward0")
def _t(node: Node) -> Made:
    return Made(torch.t, (node.edge(0),), VIEW)


@recipe("PermuteBackward0")
def _permute(node: Node) -> Made:
    dims = [_signed(dim) for dim in node.raw._saved_dims]
    return Made(lambda x: x.permute(dims), (node.edge(0),), VIEW)


@recipe("UnsqueezeBackward0")
def _unsqueeze(node: Node) -> Made:
    dim = _signed(node.raw._saved_dim)
    return Made(lambda x: x.unsqueeze(dim), (node.edge(0),), VIEW, gives_away=True)


@recipe("SliceBackward0")
def _slice(node: Node) -> Made:
    raw = node.raw
    window = slice(_signed(raw._saved_start), _signed(raw._saved_end), raw._saved_step)
    dim = _signed(raw._saved_dim)

    def cut(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.slice.Tensor(x, dim, window.start, window.stop, window.step)
        return out

    return Made(cut, (node.edge(0),), VIEW)


@recipe("CloneBackward0")
def _clone(node: Node) -> Made:
    # `contiguous()`, for all there is to see; a clone that kept other strides is found out by the first comparison.
    return Made(lambda x: x.clone(memory_format=torch.contiguous_format), (node.edge(0),), LIGHT, gives_away=True)
