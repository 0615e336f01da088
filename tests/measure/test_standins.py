"""Stand-ins for the inputs of regions, and when they are all that is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_mimose.measure.standins import StandIns, stand_in
from lightning_mimose.measure.storages import Storages


class Seen:
    """Stand-ins, and what they have told."""

    def __init__(self, *resident: torch.Tensor) -> None:
        self.told: list[tuple[int, bool]] = []
        self.storages = Storages(resident)
        self.inputs = StandIns(self.storages, lambda number, now: self.told.append((number, now)))

    def hold(self, *leaves: object) -> list[object]:
        """What a region holds."""
        return self.inputs.of(leaves)[0]


def made(*, grad: bool) -> torch.Tensor:
    """An activation."""
    return torch.ones(4, 6, requires_grad=grad) * 2


@pytest.mark.parametrize("grad", [True, False])
def test_a_stand_in_is_the_same_memory_and_no_leaf_or_view(grad: bool) -> None:
    """A change of one is seen in the other; a recomputation may write into it as into what it stands for."""
    tensor = made(grad=grad)
    other = stand_in(tensor)
    assert other.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert other.requires_grad == grad
    assert other._base is None
    assert (other.grad_fn is not None) == grad
    with torch.no_grad():
        tensor.add_(1)
    assert other._version == tensor._version


@pytest.mark.parametrize("grad", [True, False])
def test_the_end_of_the_last_other_is_told_at_once(grad: bool) -> None:
    """Whoever held it: a variable, a list, an operation's graph."""
    seen, tensor = Seen(), made(grad=grad)
    held = seen.hold(tensor, tensor, 3.0, "text")
    again = seen.hold(tensor)
    others = [tensor]
    del tensor
    assert not seen.told
    others.clear()
    assert seen.told == [(1, True)]
    assert held[2:] == [3.0, "text"]
    assert len(again) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_views_stand_for_views_of_one_base(grad: bool) -> None:
    """Whoever asks what a tensor is a view of gets the same answer, and each stands for one tensor."""
    seen, base = Seen(), made(grad=grad)
    part = base[1:]
    other_base, other, again, plain = seen.hold(base, part, part, 3)
    assert isinstance(other, torch.Tensor)
    assert again is other
    assert other._base is other_base
    assert torch.equal(other, part)
    assert (other.stride(), other.requires_grad) == (part.stride(), grad)
    assert plain == 3


@pytest.mark.parametrize(
    "view", [lambda t: t[1:], lambda t: t.transpose(0, 1), lambda t: t.view(-1), lambda t: t.view(-1)[3:]]
)
@pytest.mark.parametrize("first", ["view", "base"])
def test_a_view_counts_with_what_it_is_a_view_of(view: Callable[[torch.Tensor], torch.Tensor], first: str) -> None:
    """Only when both are gone it is told, and then at once."""
    seen, base = Seen(), made(grad=True)
    part = view(base)
    held = seen.hold(part)
    if first == "view":
        del part
        assert not seen.told
        del base
    else:
        del base
        assert not seen.told
        del part
    assert seen.told == [(1, True)]
    assert len(held) == 1


def test_what_others_hold_by_another_tensor_is_told_at_the_next_look() -> None:
    """Nothing tells of that one's end."""
    seen, tensor = Seen(), made(grad=True)
    held, other = seen.hold(tensor), tensor.detach()
    del tensor
    seen.inputs.look()
    assert not seen.told
    del other
    assert not seen.told
    seen.inputs.look()
    seen.inputs.look()
    assert seen.told == [(1, False)]
    assert len(held) == 1


def test_another_tensor_made_after_a_view_has_ended_counts() -> None:
    """It takes the view's place in the count."""
    seen, base = Seen(), made(grad=True)
    part = base[1:]
    held = seen.hold(part)
    del part
    seen.inputs.look()
    other = base.detach()
    del base
    assert not seen.told
    del other
    seen.inputs.look()
    assert seen.told == [(1, False)]
    assert len(held) == 1


def test_what_an_operation_saved_is_not_let_go_of_before_its_graph() -> None:
    """The graph is one of the others."""
    seen, tensor = Seen(), made(grad=True)
    held, result = seen.hold(tensor), tensor * tensor
    del tensor
    gc.collect()
    assert not seen.told
    del result
    assert seen.told == [(1, True)]
    assert len(held) == 1


def test_parameters_and_what_is_resident_stand_for_themselves() -> None:
    """So does everything that is more than a window on its storage."""
    batch, weight = torch.ones(3), nn.Parameter(torch.ones(2))
    seen, sparse = Seen(batch), torch.eye(3).to_sparse()
    attribute, leaf, watched = made(grad=True), torch.ones(2, requires_grad=True), made(grad=False)
    attribute.scale = 2.0  # type: ignore[attr-defined]
    hooked, noted = made(grad=True), weakref.ref(watched)
    hooked.register_hook(lambda gradient: None)
    leaves = (batch, batch[1:], weight, sparse, None, attribute, leaf, leaf[1:], watched, watched[1:], hooked)
    assert noted() is watched
    assert all(one is other for one, other in zip(seen.hold(*leaves), leaves, strict=True))
    assert not seen.inputs.followed


def test_once_the_regions_are_gone_nothing_is_told() -> None:
    """Then it is not they who hold it."""
    seen, tensor = Seen(), made(grad=True)
    held = seen.hold(tensor)
    held.clear()
    del tensor
    seen.inputs.look()
    assert not seen.told
    assert seen.inputs.followed == {1}
