"""Places where no recipe is looked for: no bit and no byte differs from calls that look at each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mimose.actions.lean.recipes.table import TABLE
from lightning_mimose.actions.lean.saves import LeanSaves
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.actions.lean.steady import Steady
from lightning_mimose.menu import ELEMENTWISE, EXPANSIONS, GRADES, MASKS
from tests.helpers.lean import EVERYTHING, Watch, same_bits

Forward = Callable[[Watch, Tensor], Tensor]


class Layer(nn.Module):
    """An encoder's layer, whose values are shown to a watch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, watch: Watch, x: Tensor) -> Tensor:
        """Attention and an MLP."""
        q, k, v = (watch(each) for each in self.qkv(x).chunk(3, dim=-1))
        scores = watch(torch.softmax(watch(q @ k.transpose(1, 2)), dim=-1))
        x = watch(self.norm(watch(x + self.out(watch(functional.dropout(scores, 0.1)) @ v))))
        return self.last(watch(x + self.down(watch(functional.gelu(watch(self.up(x)))))))


class Calls:
    """Calls of one unit, each beside one that knows nothing of those before it, and a plain one."""

    def __init__(self, grade: int) -> None:
        self.grade, self.sites = grade, Sites()

    def agree(self, forward: Forward, x: Tensor) -> None:
        """One more call: the same bits as a plain one, and the same tensors in memory as beside nothing known."""
        plain, known, fresh = (self.run(forward, x, how) for how in ("plain", "known", "fresh"))
        assert same_bits(known[0], plain[0])
        assert known[1] == fresh[1]

    def run(self, forward: Forward, x: Tensor, how: str) -> tuple[list[Tensor], list[bool]]:
        """Output and gradient of one call, and which of the watched values outlived its forward."""
        x, watch = x.detach().requires_grad_(), Watch()
        torch.manual_seed(3)
        if how == "plain":
            out = forward(watch, x * 1)
        else:
            given = [x * 1]
            steady = self.sites.steady[self.grade] if how == "known" else None
            with LeanSaves(self.sites, self.grade, given=given, steady=steady).active():
                out = forward(watch, *given)
        alive = watch.alive()
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x])], alive

    @property
    def places(self) -> int:
        """How many are not looked at."""
        return len(self.sites.steady[self.grade].kept)


@pytest.mark.parametrize("grade", range(1, len(GRADES) + 1))
def test_the_same_at_every_call(grade: int) -> None:
    """Also at other sizes, a batch of one among them."""
    layer, calls = Layer(), Calls(grade)
    for batch, tokens in ((4, 24), (4, 24), (6, 40), (1, 32), (1, 24), (4, 24), (2, 16)):
        calls.agree(layer, torch.randn(batch, tokens, 32))
    assert calls.places or grade == EVERYTHING


def test_what_was_looked_for_in_vain_is_looked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums before the norms, of which a part is a matrix product."""
    looked: list[str] = []

    def make(node: object, own: Callable[..., object] = TABLE["AddBackward0"].make) -> object:
        looked.append("sum")
        return own(node)

    layer, calls, x = Layer(), Calls(ELEMENTWISE), torch.randn(4, 24, 32)
    monkeypatch.setitem(TABLE, "AddBackward0", TABLE["AddBackward0"]._replace(make=make))
    calls.run(layer, x, "known")
    assert looked == ["sum", "sum"]
    calls.run(layer, x, "known")
    assert looked == ["sum", "sum"]


def test_a_unit_that_takes_another_path() -> None:
    """From then on every place is looked at."""
    layer, calls, x = Layer(), Calls(ELEMENTWISE), torch.randn(4, 24, 32)

    def longer(watch: Watch, x: Tensor) -> Tensor:
        return layer(watch, watch(torch.tanh(watch(x * 2))))

    for _ in range(3):
        calls.agree(layer, x)
    assert calls.places
    calls.run(longer, x, "known")  # this one may keep more than it has to
    for forward in (longer, layer, longer, layer):
        calls.agree(forward, x)
    assert not calls.places


def test_a_unit_that_does_something_else_and_saves_as_much() -> None:
    """A place where another operation has made the tensor is looked at, and from then on every place."""
    layer, calls, x = Layer(), Calls(ELEMENTWISE), torch.randn(4, 24, 32)

    def forward(watch: Watch, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return layer.out(watch(make(layer.out(x))))

    for make in (partial(torch.softmax, dim=-1), torch.relu, partial(torch.softmax, dim=-1)):
        calls.agree(partial(forward, make=make), x)
        assert bool(calls.places) == (not calls.sites.steady[ELEMENTWISE].is_over)
    assert not calls.places


@pytest.mark.parametrize("writes_at", [0, 2])
def test_a_value_that_is_written_in_some_calls(writes_at: int) -> None:
    """What was written cannot be rebuilt in that call; in the others it is, as before."""
    layer, calls, number = Layer(), Calls(ELEMENTWISE), 0

    def forward(watch: Watch, x: Tensor) -> Tensor:
        a = functional.gelu(layer.up(x))
        if number == writes_at:
            a.data.mul_(2)
        return layer.down(watch(a))

    for number in range(5):  # noqa: B007 - read in `forward`
        calls.agree(forward, torch.randn(4, 24, 32))


@pytest.mark.parametrize("evaluates_at", [0, 2])
def test_statistics_of_batches_in_some_calls(evaluates_at: int) -> None:
    """What a norm makes without them is not rebuilt, nor what follows."""
    first, norm, last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
    calls = Calls(ELEMENTWISE)
    for number in range(6):
        norm.train(number != evaluates_at)
        calls.agree(lambda watch, x: last(watch(torch.relu(norm(first(x))))), torch.randn(4, 3, 12, 12))


@pytest.mark.parametrize("frozen_until", [2, 4])
def test_parameters_that_are_frozen_at_first(frozen_until: int) -> None:
    """A norm's bias that nobody trains is not among its node's inputs, and what is made with it is kept."""
    norm, down, calls = nn.GroupNorm(4, 24), nn.Linear(32, 32), Calls(EVERYTHING)
    for number in range(6):
        norm.bias.requires_grad_(number >= frozen_until)
        calls.agree(lambda watch, x: down(watch(torch.relu(norm(x * 2)))), torch.randn(4, 24, 32))


def test_values_that_are_small_at_first() -> None:
    """Others are rebuilt by way of them once they are worth keeping by a handle."""
    up, down = nn.Linear(32, 32), nn.Linear(32, 32)

    def through_a_sum(watch: Watch, x: Tensor) -> Tensor:
        v = x.cumsum(1).sum(1)
        g = v.sin()
        return down(watch(torch.tanh(watch(functional.gelu(up(x)) + v.unsqueeze(1))))) + g.unsqueeze(1)

    def through_a_mean(watch: Watch, x: Tensor) -> Tensor:
        v = x.cumsum(1)
        return watch(v.sin()) + watch(torch.tanh(watch(v.mean(1)))).unsqueeze(1)

    for forward in (through_a_sum, through_a_mean):
        for grade in (ELEMENTWISE, EVERYTHING):
            calls = Calls(grade)
            for batch in (4, 4, 32, 32, 4):
                calls.agree(forward, torch.randn(batch, 24, 32))


@pytest.mark.parametrize("tokens", [(24, 24, 64, 64), (64, 64, 24)])
def test_products_that_are_wide_in_some_calls(tokens: tuple[int, ...]) -> None:
    """Their grade depends on their sizes."""
    calls = Calls(EXPANSIONS)
    for number in tokens:
        calls.agree(lambda watch, x: watch(torch.sin(watch(x @ x.t()))), torch.randn(number, 32))


def test_casts_that_are_remembered_in_the_first_call() -> None:
    """Autocast makes them once in a region: in a later step they are the unit's own."""
    unit, sites = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), Sites()

    def rebuilt(steady: Steady | None) -> int:
        given, seen = torch.randn(8, 24, 32, requires_grad=True), list[bool]()
        saves = LeanSaves(sites, MASKS, lambda each: seen.append(each.handle.grade > 0), given=[given], steady=steady)
        with saves.active():
            unit(given)
        return sum(seen)

    with torch.autocast("cpu", torch.bfloat16):
        rebuilt(None)
        rebuilt(sites.steady[MASKS])
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            known = rebuilt(sites.steady[MASKS])
        with torch.autocast("cpu", torch.bfloat16):
            assert known == rebuilt(None) > 1


def test_nothing_is_learnt_of_a_call_that_fails() -> None:
    """It saved a part of what others do."""
    layer, fails, calls = Layer(), True, Calls(ELEMENTWISE)

    def forward(watch: Watch, x: Tensor) -> Tensor:
        x = layer.norm(x + layer.up(x)[..., :32])
        if fails:
            raise ValueError("not today")
        return layer(watch, x)

    with pytest.raises(ValueError, match="not today"):
        calls.run(forward, torch.randn(4, 24, 32), "known")
    assert not calls.places
    fails = False
    for _ in range(3):
        calls.agree(forward, torch.randn(4, 24, 32))
    assert calls.places
