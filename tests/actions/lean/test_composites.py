"""Recipes of recipes: what models are made of, with and without dropout, and the masks of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.saves import LeanSaves, Saved
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.menu import ATTENTION, ELEMENTWISE, MASKS, PRODUCTS
from tests.helpers.lean import Pass, Watch, assert_lean, same_bits


def leaf(*shape: int) -> Tensor:
    """Needs a gradient."""
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gelu_of_gpt2(autocast: bool) -> None:
    """Seven operations and two numbers, all from the linear layer's output."""
    gelu = NewGELUActivation()

    def function(watch: Watch, x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        out: Tensor = watch(gelu(functional.linear(x, w, b))) @ v
        return out

    given = [leaf(3, 16, 24), leaf(48, 24), leaf(48), leaf(48, 24)]
    plain = assert_lean(function, given, ELEMENTWISE, autocast=autocast)
    assert {"TanhBackward0", "PowBackward0"} <= plain.names


@pytest.mark.parametrize("autocast", [False, True])
def test_the_norm_of_llama(autocast: bool) -> None:
    """Pow, mean, rsqrt and two products."""
    norm = LlamaRMSNorm(48)

    def function(watch: Watch, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        out: Tensor = watch(norm(x + w)) * v
        return out

    given = [leaf(40, 48), leaf(40, 48), leaf(40, 48), norm.weight]
    assert_lean(lambda watch, x, w, v, _: function(watch, x, w, v), given, ELEMENTWISE, autocast=autocast)


def test_statistics_of_a_composite_norm_are_kept() -> None:
    """A number for each row would take work on all of the row, twice, and spare next to nothing."""

    def function(watch: Watch, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        scale = watch(torch.rsqrt((x * w).pow(2).mean(-1, keepdim=True) + 1e-6))
        return watch(x * scale) * v

    given = [leaf(1024, 48) for _ in range(3)]
    lean = Pass(function, given, PRODUCTS)
    assert lean.alive == [True, False]
    assert same_bits(lean.bits, Pass(function, given, None).bits)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grade", [ELEMENTWISE, PRODUCTS])
def test_swiglu(grade: int, autocast: bool) -> None:
    """The activation and the product; and the second factor, where products are rebuilt."""

    def function(watch: Watch, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        raised = x @ up
        if grade == PRODUCTS:
            watch(raised)
        return watch(watch(functional.silu(x @ gate)) * raised) @ down

    assert_lean(function, [leaf(40, 24), leaf(24, 48), leaf(24, 48), leaf(48, 24)], grade, autocast=autocast)


@pytest.mark.parametrize("shape", [(5, 7, 31), (8, 8, 32)])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_and_dropout(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    """The mask is bits, whether they fill bytes or not; what it made of softmax is rebuilt."""

    def function(watch: Watch, scores: Tensor, values: Tensor) -> Tensor:
        return watch(functional.dropout(watch(scores.softmax(-1)), p)) @ values

    given = [torch.randn(shape, dtype=dtype), torch.randn(*shape[:1], shape[-1], 16, dtype=dtype)]
    assert_lean(function, [each.requires_grad_() for each in given], ATTENTION)


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_of_nothing_and_of_everything(p: float, training: bool) -> None:
    """There is no mask, or one that is all zeros."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        return functional.dropout(functional.gelu(x), p, training) * w

    given = [leaf(33, 47), leaf(33, 47)]
    plain, lean = Pass(function, given, None), Pass(function, given, PRODUCTS)
    assert same_bits(lean.bits, plain.bits)
    assert not lean.sites.different


def held(function: Callable[..., Tensor], given: list[Tensor], grade: int) -> list[int]:
    """Bytes that bit masks hold."""
    told: list[Saved] = []
    with LeanSaves(Sites(), grade, told.append).active():
        function(Watch(), *given)
    return [each.handle.held_bytes for each in told if isinstance(each.handle, Mask)]


def test_a_mask_takes_a_bit_for_each_element() -> None:
    """Rounded up to whole bytes."""

    def function(watch: Watch, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.1) + x.masked_fill(x.detach() > 0, 0.0)

    assert held(function, [leaf(67, 47)], MASKS) == [394, 394]
    assert held(function, [leaf(67, 47)], ELEMENTWISE) == []


def _masks(kind: str) -> list[Tensor]:
    allowed = torch.ones(31, 31, dtype=torch.bool).tril()
    allowed[3] = False  # a row without anything to look at
    return {
        "bools": [allowed],
        "bools of a batch": [torch.stack([allowed, allowed.t(), allowed])[:, None].expand(3, 1, 31, 31)],
        "numbers": [torch.randn(31, 31)],
    }.get(kind, [])


@pytest.mark.parametrize("masked", ["no", "causal", "bools", "bools of a batch", "numbers"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_by_its_definition(p: float, masked: str, autocast: bool) -> None:
    """Its softmax and its mask are within."""

    def function(watch: Watch, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(functional.silu(q), k * 2, v, mask, p, masked == "causal")
        return out.transpose(1, 2).reshape(3, 31, -1)

    given = [*(leaf(3, 2, 31, 8) for _ in range(3)), *_masks(masked)]
    plain = Pass(function, given, None, autocast=autocast)
    lean = Pass(function, given, ATTENTION, autocast=autocast)
    again = Pass(function, given, ATTENTION, autocast=autocast, sites=lean.sites)
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(again.bits, plain.bits)
    assert not lean.sites.different
    made_by = {place.made_by for place in lean.sites.checked}
    assert ("" in made_by) == (p > 0)  # the mask of dropout
    assert made_by & {"SafeSoftmaxBackward0", "SoftmaxBackward0"}


def test_a_mask_inside_attention_that_is_no_argument() -> None:
    """Nobody else would keep it alive, or from being changed: the softmax is kept."""
    mask = torch.ones(31, 31, dtype=torch.bool).tril()

    def function(watch: Watch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(q, k, v, mask)
        mask.fill_(True)
        return out

    given = [leaf(3, 2, 31, 8) for _ in range(3)]
    mask.tril_()
    plain = Pass(function, given, None)
    mask.tril_()
    lean = Pass(function, given, ATTENTION)
    assert same_bits(lean.bits, plain.bits)
    assert not {place.made_by for place in lean.sites.checked} & {"SafeSoftmaxBackward0", "SoftmaxBackward0"}


@pytest.mark.parametrize("training", [True, False])
def test_convolution_norm_and_relu(training: bool) -> None:
    """Two blocks; the running statistics move once."""

    def blocks() -> nn.Sequential:
        torch.manual_seed(3)
        made: list[nn.Module] = []
        for _ in range(2):
            made += [nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()]
        return nn.Sequential(*made).train(training)

    x = leaf(4, 5, 9, 11)
    found = []
    for grade in (None, ELEMENTWISE):
        model = blocks()
        found.append((Pass(lambda _, *args, model=model: model(args[0]), [x, *model.parameters()], grade), model))
    (plain, one), (lean, other) = found
    assert same_bits(lean.bits, plain.bits)
    assert same_bits(list(other.buffers()), list(one.buffers()))
    assert not lean.sites.different
    made_by = {place.made_by for place in lean.sites.checked}
    assert made_by == ({"ReluBackward0"} if training else set())


@pytest.mark.parametrize("choose", [lambda x, m: x.masked_fill(m, 1.0), lambda x, m: torch.where(m, x, 2 * x)])
@pytest.mark.parametrize("rows", [33, 64])
def test_masks_of_bools(choose: Callable[[Tensor, Tensor], Tensor], rows: int) -> None:
    """As bits; what is left of a model's own mask is the model's."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        return choose(x * w, watch(x.detach() > 0))

    assert_lean(function, [leaf(rows, 67), leaf(rows, 67)], MASKS)


def test_a_mask_of_another_layout_is_right() -> None:
    """Whether it is kept or not."""

    def function(watch: Watch, x: Tensor, w: Tensor) -> Tensor:
        turned = (x.detach() > 0).t()
        wide = (x.detach()[:1] > 0).expand(64, 64)
        return (x * w).t().masked_fill(turned, 0.0) + functional.dropout(x.t(), 0.2).masked_fill(wide, 0.0)

    given = [leaf(64, 64), leaf(64, 64)]
    plain, lean = Pass(function, given, None), Pass(function, given, MASKS)
    assert same_bits(lean.bits, plain.bits)


def test_an_encoder_layer_of_torch() -> None:
    """With dropout everywhere, in attention's own function as well; one mask is transposed in memory."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    given = [leaf(2, 24, 32), *layer.parameters()]
    plain, lean = (Pass(lambda _, *args: layer(args[0]), given, grade) for grade in (None, PRODUCTS))
    assert same_bits(lean.bits, plain.bits)
    assert [place.made_by for place in lean.sites.checked].count("") == 4
    assert not lean.sites.different


@pytest.mark.parametrize("order", [lambda scores, mask: scores + mask, lambda scores, mask: mask + scores, torch.add])
def test_eager_attention_with_an_additive_mask(order: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The node of the sum knows nothing of the mask; whoever gave it to the unit keeps it."""
    mask = torch.zeros(1, 1, 40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), -1e9)

    def attention(watch: Watch, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / 4.0
        return watch(functional.softmax(order(scores, mask[:, :, :, :40]), -1)) @ v

    heads = [torch.randn(2, 4, 40, 16, requires_grad=True) for _ in range(3)]
    assert_lean(attention, [*heads, mask])


def test_a_mask_that_is_no_argument_is_not_borrowed() -> None:
    """A unit may write its own buffer after it has used it: autograd would not look at it again."""
    mask = torch.zeros(1, 1, 40, 40)

    def attention(watch: Watch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / 4.0
        out = watch(functional.softmax(scores + mask, -1)) @ v
        mask.sub_(0.5)
        return out

    heads = [torch.randn(2, 4, 40, 16, requires_grad=True) for _ in range(3)]
    plain = Pass(attention, heads, None)
    mask.zero_()
    lean = Pass(attention, heads, PRODUCTS)
    assert lean.alive == [True]
    assert same_bits(lean.bits, plain.bits)
