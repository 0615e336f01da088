"""Splitting one unit: what can be split is found out by trying, and its gradients are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mimose.actions.split import RANDOM, ROWS_MIX, WRITES, Divisible, run_split
from lightning_mimose.actions.state import WrittenState


class Block(nn.Module):
    """An MLP over rows; subclasses do something with them besides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        return x + self.down(functional.gelu(self.up(x)))


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        out = super().forward(x) * scale
        return out if mask is None else out.masked_fill(mask, 0.0)


class Tuple(Block):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"out": out, "rest": (None, out.mean(-1)), "name": "a"}


class Shared(Block):
    """Returns something that is the same for all rows, as T5 its position bias."""

    def forward(self, x: Tensor) -> Any:
        bias = self.up.weight[:16].softmax(-1)
        return super().forward(x) @ bias, bias


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Any:
        return self.norm(super().forward(x))


class Dropping(Block):
    def forward(self, x: Tensor) -> Any:
        return functional.dropout(super().forward(x), 0.1)


class Centred(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) - x.mean(0)


class Mean(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).mean()


class Sized(Block):
    def forward(self, x: Tensor) -> Any:
        assert len(x) == 12
        return super().forward(x)


def learn(block: nn.Module, *args: Any, **kwargs: Any) -> Divisible:
    known = Divisible()
    known.learn(type(block).forward.__get__(block), args, kwargs, WrittenState(block))
    return known


def gradients(out: Any, block: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    loss = sum(leaf.square().sum() for leaf in leaves)
    return [*leaves, *torch.autograd.grad(loss, [x, *block.parameters()], allow_unused=True)]


@pytest.mark.parametrize("chunks", [2, 3, 4, 12, 50])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (Block, ()),
        (Masked, (torch.arange(16) > 11,)),
        (Masked, (torch.rand(12, 16) > 0.5, 2.0)),
        (Tuple, ()),
        (Shared, ()),
    ],
)
def test_the_same_results_and_gradients(make: type[nn.Module], more: tuple[Any, ...], chunks: int) -> None:
    block, x = make(), torch.randn(12, 16, requires_grad=True)
    forward, state = type(block).forward.__get__(block), WrittenState(block)
    seam = learn(block, x, *more).seam((x, *more), {}, state)
    assert seam is not None
    whole = gradients(forward(x, *more), block, x)
    parts = gradients(run_split(forward, (x, *more), {}, seam, chunks, state), block, x)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Normed, WRITES), (Dropping, RANDOM), (Centred, ROWS_MIX), (Mean, ROWS_MIX), (Sized, "cannot run on a part")],
)
def test_what_cannot_be_split(make: type[nn.Module], reason: str) -> None:
    """It is found out without a trace: no number drawn, no statistic moved."""
    block, x = make(), torch.randn(12, 16, requires_grad=True)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    drawn = torch.get_rng_state()
    known = learn(block, x)
    assert known.reason is not None
    assert reason in known.reason
    assert known.seam((x,), {}, WrittenState(block)) is None
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


def test_arguments_of_another_form_are_tried_anew() -> None:
    """A mask for all rows, and one with a row for each, are not cut alike."""
    block, x, state = Masked(), torch.randn(12, 16, requires_grad=True), WrittenState(Masked())
    known = learn(block, x, torch.rand(16) > 0.5)
    assert known.known((x, torch.rand(16) > 0.5), {})
    assert not known.known((x, torch.rand(12, 16) > 0.5), {})
    assert known.seam((x, torch.rand(12, 16) > 0.5), {}, state) is None
    assert known.seam((x[:1], torch.rand(16) > 0.5), {}, state) is None  # one row


def test_somebody_listening_inside() -> None:
    """Hugging Face collects router logits by hooks on submodules: they would come in parts."""
    block, x = Block(), torch.randn(12, 16, requires_grad=True)
    known, state = learn(block, x), WrittenState(block)
    assert known.seam((x,), {}, state) is not None
    handle = block.up.register_forward_hook(lambda *_: None)
    assert known.seam((x,), {}, state) is None
    handle.remove()
    assert known.seam((x,), {}, state) is not None
