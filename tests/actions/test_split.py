"""Splitting one unit: what can be split is found out by trying, and its gradients are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mimose.actions.split import (
    FILLS,
    HOOKS,
    RANDOM,
    ROWS_MIX,
    WRITES,
    CannotSplitError,
    Divisible,
    Seam,
    run_split,
)
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


def own(block: nn.Module) -> Any:
    return type(block).forward.__get__(block)


def learn(block: nn.Module, *args: Any, **kwargs: Any) -> Divisible:
    known = Divisible(WrittenState(block))
    known.learn(own(block), args, kwargs)
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
    seam = learn(block, x, *more).known((x, *more), {})
    assert isinstance(seam, Seam)
    whole = gradients(own(block)(x, *more), block, x)
    parts = gradients(run_split(own(block), (x, *more), {}, seam, chunks, WrittenState(block)), block, x)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Filling(Block):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Any:
        losses.append(x.mean())
        return super().forward(x)


class Gated(Block):
    """Its second result is 0 for everybody, until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.gate * x.square().mean()


class Record:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: Any) -> Any:
        return self.tensor == other.tensor


class Recording(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), Record(x)


@pytest.mark.parametrize(
    ("make", "more", "reason"),
    [
        (Normed, (), WRITES),
        (Dropping, (), RANDOM),
        (Centred, (), ROWS_MIX),
        (Mean, (), ROWS_MIX),
        (Gated, (), ROWS_MIX),
        (Recording, (), ROWS_MIX),
        (Filling, ([],), FILLS),
        (Sized, (), "cannot run on a part"),
    ],
)
def test_what_cannot_be_split(make: type[nn.Module], more: tuple[Any, ...], reason: str) -> None:
    """It is found out without a trace: no number drawn, no statistic moved, nothing collected."""
    block, x = make(), torch.randn(12, 16, requires_grad=True)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    drawn = torch.get_rng_state()
    found = learn(block, x, *more).known((x, *more), {})
    assert isinstance(found, str)
    assert reason in found
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert not any(more)


def test_arguments_of_another_form_are_tried_anew() -> None:
    """A mask for all rows, and one with a row for each, are not cut alike."""
    block, x = Masked(), torch.randn(12, 16, requires_grad=True)
    known = learn(block, x, torch.rand(16) > 0.5)
    assert isinstance(known.known((x, torch.rand(16) > 0.5), {}), Seam)
    assert known.known((x, torch.rand(12, 16) > 0.5), {}) is None
    assert known.known((x, torch.rand(16) > 0.5, 2.0), {}) is None


def test_another_mode_is_tried_anew() -> None:
    """A norm that is frozen in eval mode can be split, and one that is not cannot."""
    block, x = Normed().eval(), torch.randn(12, 16, requires_grad=True)
    known = learn(block, x)
    assert isinstance(known.known((x,), {}), Seam)
    block.train()
    assert known.known((x,), {}) is None
    assert known.learn(own(block), (x,), {}) == WRITES
    block.eval()
    assert isinstance(known.known((x,), {}), Seam)


def test_one_row() -> None:
    block, x = Block(), torch.randn(1, 16, requires_grad=True)
    assert learn(block, x).known((x,), {}) is None


class Trimming(Block):
    """Results are as long as the longest row."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[:, : int((x > 0).sum(1).max())]


def test_parts_that_do_not_fit_together_after_all() -> None:
    block = Trimming()
    even = torch.ones(12, 16, requires_grad=True)
    known = learn(block, even)
    seam = known.known((even,), {})
    assert isinstance(seam, Seam)
    uneven = torch.ones(12, 16).tril(2).requires_grad_()
    with pytest.raises(CannotSplitError, match="shape"):
        run_split(own(block), (uneven,), {}, seam, 2, WrittenState(block))
    known.refuse((uneven,), {}, "why not")
    assert known.known((uneven,), {}) == "why not"


def test_somebody_listening_inside() -> None:
    """Hugging Face collects router logits by hooks on submodules: they would come in parts."""
    block, x = Block(), torch.randn(12, 16, requires_grad=True)
    known = learn(block, x)
    assert isinstance(known.known((x,), {}), Seam)
    handle = block.up.register_forward_hook(lambda *_: None)
    assert known.known((x,), {}) == HOOKS
    handle.remove()
    assert isinstance(known.known((x,), {}), Seam)
