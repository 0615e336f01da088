"""Results that lean units hand on: whoever is given them keeps the recipe, and gradients are those of the plain run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mimose.actions.calls import patch_unit
from lightning_mimose.actions.lean.handles import Kept
from lightning_mimose.actions.lean.returned import Returned
from lightning_mimose.actions.patch import unpatch
from lightning_mimose.actions.session import Session
from lightning_mimose.menu import EXPANSIONS, PRODUCTS
from lightning_mimose.units import Unit
from tests.helpers.counting import OpCounter

WIDTH = 16


class Residual(nn.Module):
    """As in ResNets: the sum goes through a ReLU, which saves its own result; so does the next block."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(WIDTH, WIDTH // 4, 1, bias=False), nn.BatchNorm2d(WIDTH // 4)
        self.second, self.norm2 = nn.Conv2d(WIDTH // 4, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two convolutions and what they are added to."""
        y = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        if self.inplace:
            y += x
            return functional.relu(y, inplace=True)
        return functional.relu(y + x)


class Normed(nn.Module):
    """As in BERT: a norm comes last, which does not save its result, but the next block does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer and what it is added to."""
        return self.norm(x + self.narrow(functional.gelu(self.wide(x))))


class Conjugated(nn.Module):
    """Saves the conjugate of what it is given: a view that is no window on the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product, and what is left of it where it is large."""
        y = x.conj() @ self.weight
        return y / (1 + y.abs()) + y


class Chain(nn.Module):
    """Blocks one after another, and something that looks at each result in between."""

    def __init__(
        self, build: Callable[[], nn.Module], between: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([build() for _ in range(5)])
        self.between = between or (lambda x: x)
        self.ends: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        self.ends.clear()
        for block in self.blocks:
            x = self.between(block(x))
            self.ends.append(weakref.ref(x.untyped_storage()))
        return x.abs().square().mean()


def data(model: Chain) -> torch.Tensor:
    """What goes in: an activation, so that the first block's input has gradients as well."""
    shape = (4, WIDTH, 8, 8) if isinstance(model.blocks[0], Residual) else (4, 12, WIDTH)
    dtype = torch.complex64 if isinstance(model.blocks[0], Conjugated) else torch.float32
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradients(model: Chain, session: Session | None = None, alive: list[bool] | None = None) -> list[torch.Tensor]:
    """Of one step."""
    x = data(model)
    loss = model(x * 1)
    if alive is not None:
        alive.extend(end() is not None for end in model.ends)
    if session is not None:
        session.returned.clear()
    model.zero_grad()
    loss.backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def handed(
    model: Chain, actions: Sequence[str], hands_on: Mapping[int, int], counter: OpCounter | None = None
) -> tuple[list[torch.Tensor], list[bool], Session]:
    """Gradients with blocks that hand on their results; which of these were there after the forward; the session."""
    names = [f"blocks.{i}" for i in range(len(actions))]
    session = Session(proves=False, lean=True)
    units = [Unit(name, model.get_submodule(name), -1, 1, True) for name in names]
    for unit in units:
        patch_unit(unit, session)
    try:
        for step in range(2):  # recipes are compared in the first one
            alive: list[bool] = []
            session.arm({n: a for n, a in zip(names, actions, strict=True) if a != "keep"}, None)
            session.hand_on(
                {names[i]: limit for i, limit in hands_on.items()},
                {name: frozenset(names) for name in names},
                dict.fromkeys(names, 0),
            )
            with counter if counter is not None and step else nullcontext():
                found = gradients(model, session, alive)
            assert not len(session.returned)
            session.disarm()
    finally:
        for unit in units:
            unpatch(unit.module)
    return found, alive, session


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def built(build: Callable[[], nn.Module], between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Chain:
    """The same weights every time."""
    torch.manual_seed(0)
    return Chain(build, between)


@pytest.mark.parametrize("taker", ["keep", "lean", "lean+products", "recompute", "recompute+lean"])
@pytest.mark.parametrize("grade", ["lean", "lean+expansions", "lean+products"])
@pytest.mark.parametrize("build", [Residual, Normed, lambda: Residual(inplace=True)])
def test_whoever_is_given_a_result_rebuilds_it(build: Callable[[], nn.Module], grade: str, taker: str) -> None:
    """Every other block hands on; its result is gone when the forward is over, and no bit differs."""
    plain = gradients(built(build))
    found, alive, session = handed(
        built(build), [grade, taker, grade, taker, "keep"], {0: PRODUCTS, 1: 0, 2: PRODUCTS, 3: 0}
    )
    assert same(found, plain)
    assert alive[:4] == [False, True, False, True]
    assert not session.surprised


@pytest.mark.parametrize("taker", ["keep", "lean", "lean+products", "recompute"])
def test_a_conjugate_of_a_result_is_kept(taker: str) -> None:
    """Nothing that is rebuilt would be one."""
    plain = gradients(built(Conjugated))
    found, _, _ = handed(
        built(Conjugated), ["lean+products", taker, "lean+products", taker, "keep"], {0: PRODUCTS, 2: PRODUCTS}
    )
    assert same(found, plain)


def test_a_chain_of_them() -> None:
    """Results that are rebuilt from one another."""
    plain = gradients(built(Residual))
    found, alive, _ = handed(built(Residual), ["lean"] * 5, dict.fromkeys(range(4), PRODUCTS))
    assert same(found, plain)
    assert alive[:4] == [False] * 4


@pytest.mark.parametrize("build", [Residual, Normed])
def test_a_result_is_rebuilt_once(build: Callable[[], nn.Module]) -> None:
    """For all who saved it, its own unit included; what others keep is not rebuilt at all."""
    runs = []
    for hands_on in ({}, dict.fromkeys(range(4), 0), {0: PRODUCTS, 1: 0, 2: PRODUCTS, 3: 0}):
        counter = OpCounter()
        handed(built(build), ["lean"] * 5, hands_on, counter=counter)
        name = "batch_norm" if build is Residual else "native_layer_norm"
        runs.append(sum(count for key, count in counter.calls.items() if name in key and "backward" not in key))
    for_itself, kept, handing = runs
    assert for_itself == kept + (4 if build is Residual else 0)
    assert handing == kept + 2


def test_a_grade_beyond_the_limit_hands_nothing_on() -> None:
    """What is needed for it would have been handed on itself."""
    plain = gradients(built(Residual))
    found, alive, _ = handed(built(Residual), ["lean+products"] * 5, {0: EXPANSIONS, 1: 0, 2: PRODUCTS, 3: 0})
    assert same(found, plain)
    assert alive[:4] == [True, True, False, True]


def test_what_others_hold_is_theirs() -> None:
    """A list of hidden states keeps them alive, and the same bits come out."""
    held: list[torch.Tensor] = []

    def hold(x: torch.Tensor) -> torch.Tensor:
        held.append(x)
        return x

    plain = gradients(built(Residual))
    found, alive, _ = handed(built(Residual, hold), ["lean"] * 5, dict.fromkeys(range(4), PRODUCTS))
    assert same(found, plain)
    assert alive == [True] * 5


def _scaled(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.mul_(1.5)
    return x


def _behind(x: torch.Tensor) -> torch.Tensor:
    x.data.mul_(1.5)
    return x


def _replaced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize("between", [_scaled, _behind])
def test_a_result_that_is_changed_before_it_is_saved_is_kept(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In sight of autograd or not: the unit is named, so that it is not counted on again."""
    plain = gradients(built(Normed, between))
    found, alive, session = handed(built(Normed, between), ["lean"] * 5, dict.fromkeys(range(4), PRODUCTS))
    assert same(found, plain)
    assert alive == [True] * 5
    assert session.surprised
    assert session.spoiled == {f"blocks.{i}" for i in range(4)}


def test_another_tensor_in_its_place_is_kept() -> None:
    """It is none of a unit's results."""
    plain = gradients(built(Normed, _replaced))
    found, alive, session = handed(built(Normed, _replaced), ["lean"] * 5, dict.fromkeys(range(4), PRODUCTS))
    assert same(found, plain)
    assert alive == [True] * 5
    assert not session.surprised


def test_a_parameter_that_changes_in_between_is_an_error() -> None:
    """As it is without hooks: the result would be another one."""
    model = built(Normed)
    session = Session(proves=False, lean=True)
    unit = Unit("blocks.0", model.blocks[0], -1, 1, True)
    patch_unit(unit, session)
    patch_unit(Unit("blocks.1", model.blocks[1], -1, 1, True), session)
    session.arm({"blocks.0": "lean"}, None)
    session.hand_on({"blocks.0": PRODUCTS}, {"blocks.0": frozenset({"blocks.1"})}, {"blocks.0": 0})
    loss = model(data(model) * 1)
    with torch.no_grad():
        model.blocks[0].norm.weight.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    session.disarm()
    unpatch(model.blocks[0])
    unpatch(model.blocks[1])


def test_what_is_returned_is_not_held() -> None:
    """Neither the tensor, nor after its end what it is rebuilt from."""
    returned, source = Returned(), torch.ones(64)
    base = source * 2
    returned.add(base, Kept(source), "block", read=True)
    end = weakref.ref(source.untyped_storage())
    del source
    assert end() is not None
    result = returned.of(base.untyped_storage())
    assert result is not None
    assert result.has_bits_of(base)
    base.data.add_(1)
    assert result.is_unchanged(base)
    assert not result.has_bits_of(base)
    base.add_(1)
    assert not result.is_unchanged(base)
    del base, result
    assert end() is None
    assert len(returned) == 0
