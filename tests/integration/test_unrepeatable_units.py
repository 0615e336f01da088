"""Units whose forward cannot be repeated are left alone and named; nothing ends in an error or in other weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose, is_recomputing
from tests.helpers import blocks
from tests.helpers.blocks import Base, Net, data, everything, train

AREA = "Recomputation that would differ"
KINDS = {
    "RReLU, which saves memory it did not write": (blocks.RandomLeaky, "saves other tensors"),
    "another path on the second run": (blocks.OtherPath, "saves other tensors"),
    "other values on the second run, of the same shapes": (blocks.OtherValues, "saves other tensors"),
    "a block that writes a parameter": (blocks.WritesParameter, "writes parameters"),
    "a block that changes its input in place": (blocks.InPlace, "changed in place"),
    "a block whose input is changed in place after it": (blocks.ChangedLater, "changed in place"),
}
NAMES = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [pytest.param(*case, marks=pytest.mark.conformance(AREA, what, "guarded")) for what, case in KINDS.items()],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_is_left_alone_and_named(kind: type[Base], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """From the first step on; one line says which units and why."""
    caplog.set_level(logging.INFO, "lightning_mimose")
    if kind in (blocks.OtherPath, blocks.OtherValues):
        # What the trials count cannot be put back, so there is no plain run to compare with; gradients are checked.
        losses: list[float] = []
    else:
        plain, losses, _ = train(lambda: Net(kind), data())
    model, ours, mimose = train(lambda: Net(kind), data(), NAMES)
    assert mimose is not None
    if losses:
        assert ours == losses
        assert everything(model) == everything(plain)
    assert not any(set(NAMES) & record.actions.keys() for record in mimose.records)
    told = [line for line in caplog.messages if "never recomputed" in line]
    assert len(told) == 1
    assert reason in told[0]
    assert all(name in told[0] for name in NAMES)


def alike(make: Callable[[], nn.Module], forced: Sequence[str] = NAMES, **options: Any) -> Mimose:
    """Trains plainly and with units recomputed, to the same losses and weights; what kept the budget."""
    plain, losses, _ = train(make, data())
    model, ours, mimose = train(make, data(), forced, **options)
    assert mimose is not None
    assert ours == losses
    assert everything(model) == everything(plain)
    return mimose


class Mixed(nn.Module):
    """A block with one part that cannot be repeated, and one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = blocks.RandomLeaky(), blocks.Dropping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.good(self.bad(x))


@pytest.mark.conformance(AREA, "the repeatable parts of such a block", "works")
def test_the_parts_of_a_block_stand_in_for_it() -> None:
    """The block is left alone; the part of it that can be repeated is recomputed, in the first steps already."""

    def make() -> nn.Module:
        net = Net(Base, 0)
        net.blocks = nn.ModuleList(Mixed() for _ in range(3))
        return net

    mimose = alike(make, ["blocks.0", "blocks.1.good"], units=["Mixed", "*.good", "*.bad"])
    assert all(record.actions.keys() == {f"blocks.{i}.good" for i in range(3)} for record in mimose.records[:2])
    assert {"blocks.1.good": "recompute"} in [record.actions for record in mimose.records]


class Cache:
    """An object that pytree cannot take apart."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Caching(Base):
    """Appends to what it is given."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if isinstance(cache, Cache):
            cache.kept.append(x)
            x = x + 0.1 * torch.stack([kept.mean() for kept in cache.kept]).sum()
        elif isinstance(cache, list):
            cache.append(x.mean())
            x = x + 0.1 * sum(cache)
        return super().forward(x)


class CachingNet(Net):
    """Hands one cache through all blocks."""

    kind: type = Cache

    def __init__(self) -> None:
        super().__init__(Caching)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x, cache = self.embed(x), self.kind()
        for block in self.blocks:
            x = block(x, cache)
        return SimpleNamespace(loss=self.head(x).pow(2).mean())


class ListNet(CachingNet):
    """The same with a list, which can be given again as it was."""

    kind = list


@pytest.mark.conformance(AREA, "a block that fills an object it is given (a cache)", "guarded")
def test_an_object_that_may_change_is_not_given_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_mimose")
    _, losses, _ = train(CachingNet, data())
    _, ours, mimose = train(CachingNet, data(), NAMES)
    assert mimose is not None
    assert ours == losses
    assert any("given a Cache" in line for line in caplog.messages)


class Cached(nn.Module):
    """A block that is given a tensor which was made in a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CachedBlock(), CachedBlock()])
        with torch.inference_mode():
            self.bias = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x.pow(2).mean()


class CachedBlock(nn.Module):
    """Adds what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + bias


@pytest.mark.conformance(AREA, "a tensor made in inference mode, given to a block", "guarded")
def test_a_tensor_of_inference_mode_is_not_given_to_a_checkpoint() -> None:
    """Plain training goes on with it; so does this, with the block left alone and its parts planned."""
    torch.manual_seed(0)
    model = Cached()
    with Mimose(model, budget="1GB", loss_fn=lambda module, x: module(x)) as mimose:
        for rows in (16, 8, 12):
            mimose.step(torch.randn(rows, 8))
        told = str(mimose.report())
    assert "inference mode" in told
    assert not any({"blocks.0", "blocks.1"} & record.actions.keys() for record in mimose.records)


@pytest.mark.conformance(AREA, "a block that fills a list it is given", "works")
def test_a_list_is_given_as_it_was() -> None:
    plain, losses, _ = train(ListNet, data())
    model, ours, mimose = train(ListNet, data(), NAMES)
    assert mimose is not None
    assert ours == losses
    assert everything(model) == everything(plain)
    assert any(len(record.actions) == 3 for record in mimose.records if not record.sheltered)


class Carrying(nn.Module):
    """A block that writes into one list and reads another, which the network gives it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, written: list[torch.Tensor], read: list[torch.Tensor]) -> torch.Tensor:
        written[0] = read[0] + self.layers(read[0])
        return read[0] * read[0].sigmoid()


class Carried(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carrying() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            both = [x]
            x = block(both, both)
        return x.pow(2).mean()


@pytest.mark.conformance(AREA, "a list that a block is given twice", "guarded")
def test_a_list_that_is_given_twice_is_one() -> None:
    """A recomputation would be given two: the block is left alone, its parts are planned."""
    weights, told = [], ""
    for budgeted in (False, True):
        torch.manual_seed(0)
        model = Carried()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(rows, 8) for rows in (16, 8, 12, 16)]
        if budgeted:
            with Mimose(model, budget="1GB", optimizer=optimizer, loss_fn=lambda module, x: module(x)) as mimose:
                for batch in batches:
                    mimose.step(batch)
                told = str(mimose.report())
        else:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
        weights.append([*model.state_dict().values()])
    assert all(map(torch.equal, *weights))
    assert "list twice" in told


class Telling(Base):
    """Counts outside of any module, but only when it counts."""

    told: ClassVar[list[int]] = []

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if not is_recomputing():
            self.told.append(len(x))
        return x


@pytest.mark.conformance(AREA, "effects outside of modules, guarded by `is_recomputing()`", "works")
def test_a_forward_can_ask_whether_it_runs_again() -> None:
    Telling.told.clear()
    train(lambda: Net(Telling), data())
    once = list(Telling.told)
    Telling.told.clear()
    train(lambda: Net(Telling), data(), NAMES)
    assert Telling.told == once


class Stop(Exception):
    """Ends a forward in its midst."""


class Features(Net):
    """Takes features out of the midst of its last block, and stops there: a hook raises what the model catches."""

    def __init__(self) -> None:
        super().__init__(Base)
        self.read = nn.Linear(4 * blocks.WIDTH, blocks.WIDTH)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        found: list[torch.Tensor] = []

        def stop(_: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            found.append(out)
            raise Stop

        handle = self.blocks[-1].up.register_forward_hook(stop)
        x = self.embed(x)
        try:
            for block in self.blocks:
                x = block(x)
        except Stop:
            x = self.read(found.pop())
        finally:
            handle.remove()
        return SimpleNamespace(loss=self.head(x).pow(2).mean())


@pytest.mark.conformance(AREA, "a block that a hook of the user's stops in its midst", "guarded")
def test_a_forward_that_is_stopped_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its recomputation would raise the same in backward, where nobody catches it."""
    caplog.set_level(logging.INFO, "lightning_mimose")
    mimose = alike(Features)
    assert mimose.records[-1].actions.keys() == {"blocks.0", "blocks.1"}
    assert any("never recomputed: blocks.2 (its forward ends in an error" in line for line in caplog.messages)


class Asking(Net):
    """Calls its blocks with an argument that they do not take, and without it after that."""

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x = self.embed(x)
        for block in self.blocks:
            try:
                x = block(x, lengths=None)
            except TypeError:
                x = block(x)
        return SimpleNamespace(loss=self.head(x).pow(2).mean())


@pytest.mark.conformance(AREA, "blocks whose errors the model catches", "guarded")
def test_calls_that_end_in_an_error_are_measured() -> None:
    """As calls that kept nothing."""
    mimose = alike(lambda: Asking(Base))
    planned = [record for record in mimose.records if not record.sheltered]
    assert len(planned) >= 6
    assert all(
        record.measured_peak_bytes in (None, pytest.approx(record.predicted_peak_bytes, rel=0.01)) for record in planned
    )
