"""A survey says what lean saves of each grade would free, and when, without doing it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_mimose.actions.lean.masks import Mask
from lightning_mimose.actions.lean.recipes.table import PRODUCT
from lightning_mimose.actions.lean.saves import LeanSaves, Saved
from lightning_mimose.actions.lean.sites import Sites
from lightning_mimose.actions.lean.survey import LeanSurvey, Surveyed
from lightning_mimose.measure.call import LeanItem
from lightning_mimose.measure.trace import DIES, GOES, IS_USED
from lightning_mimose.menu import ELEMENTWISE, EXPANSIONS, GRADES, MASKS
from tests.helpers.lean import same_bits

Unit = Callable[[Tensor], Tensor]


class Surveying:
    """One forward under a survey, in hooks that keep everything, and its backward.

    Attributes:
        items: What was found.
        events: What happened, in order.
        bits: The output and the gradients.
    """

    def __init__(self, unit: Unit, x: Tensor) -> None:
        survey = LeanSurvey(Sites())
        numbers: dict[int, int] = {}
        self.events: list[tuple[str, int]] = []

        def identify(storage: torch.UntypedStorage) -> int:
            return numbers.setdefault(storage.data_ptr(), len(numbers))

        def pack(tensor: Tensor) -> object:
            return survey.pack(tensor, lambda given: given.detach())

        def unpack(packed: Surveyed) -> Tensor:
            assert isinstance(packed.packed, Tensor)
            return packed.packed

        survey.begin(identify, lambda what, index: self.events.append((what, index)))
        torch.manual_seed(2)
        with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor), survey.forward_run():
            first = unit(x)
        torch.manual_seed(2)
        with saved_tensors_hooks(pack, unpack), survey.recompute_run():
            out = unit(x)
        self.items: tuple[LeanItem, ...] = survey.items()
        gradients = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        assert IS_USED not in dict(self.events)
        first.sum().backward()
        x.grad = None
        self.bits = [out.detach(), *gradients]


def mlp(dropout: float = 0.0) -> nn.Module:
    """Two layers, a norm before and dropout after."""
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(dropout))


def attention(x: Tensor) -> Tensor:
    """Products, softmax and a mask."""
    y = functional.silu(x)
    scores = torch.bmm(y, (y * 2).transpose(1, 2)).softmax(-1)
    return torch.bmm(functional.dropout(scores, 0.1), y.exp()).relu() @ x[0].t()


def gate(x: Tensor) -> Tensor:
    """A source that is saved after what is made from it, and one that never is, nor what is made from that."""
    h = x @ torch.eye(64)
    y = torch.tanh(x.cumsum(1) * torch.sigmoid(1.7 * h) * h) @ x[0].t()
    return y * torch.sigmoid(y + 1)


def cast(x: Tensor) -> Tensor:
    """A value whose source is made from what is saved later still, in a precision of its own."""
    with torch.autocast("cpu", torch.bfloat16):
        h = (x @ torch.ones(64, 192)).float()
        return torch.sigmoid(h.bfloat16()) * h.pow(2)


def test_sources_that_wait_themselves_are_named() -> None:
    """What they keep goes before what is made from them is used."""
    found = Surveying(cast, torch.randn(64, 64, requires_grad=True))
    (gate,) = (item for item in found.items if item.sources)
    assert gate.gain_bytes == 64 * 192 * 2
    assert [size for _, size in gate.sources] == [64 * 192 * 4]
    assert [what for what, _ in found.events].count(GOES) == 1


def test_the_items_of_a_small_network() -> None:
    """The norm's result and the activation's are for nothing much, the linear layer's for a product."""
    found = Surveying(mlp(), torch.randn(32, 64, requires_grad=True))
    offered = [item for item in found.items if item.grade]
    assert sorted((item.grade, item.gain_bytes) for item in offered) == [
        (ELEMENTWISE, 32 * 64 * 4),
        (ELEMENTWISE, 32 * 128 * 4),
        (EXPANSIONS, 32 * 128 * 4),
    ]
    hidden = next(i for i, item in enumerate(found.items) if item.grade == EXPANSIONS)
    activation = next(item for item in offered if item.gain_bytes == 32 * 128 * 4 and item.grade == ELEMENTWISE)
    assert activation.also == (hidden,)
    assert found.items[hidden].work >= PRODUCT * 2 * 32 * 64 * 128
    assert all(item.work > 0 for item in offered)
    assert len({item.storage for item in found.items}) == len(found.items)


def test_a_mask_is_offered_as_bits() -> None:
    """What stays of it is no gain."""
    found = Surveying(mlp(0.1), torch.randn(32, 64, requires_grad=True))
    assert [item.gain_bytes for item in found.items if item.grade == MASKS] == [32 * 64 * 4 - 32 * 64 // 8]


@pytest.mark.parametrize("unit", [mlp(), attention, gate])
def test_when_the_forward_lets_go_and_when_backward_asks(unit: Unit) -> None:
    """Each item that is offered dies once, and is used once after that, in the opposite order."""
    found = Surveying(unit, torch.randn(2, 32, 64, requires_grad=True))
    offered = {index for index, item in enumerate(found.items) if item.grade}
    died = [index for what, index in found.events if what == DIES]
    used = [index for what, index in found.events if what == IS_USED]
    assert offered <= set(died) == set(used)
    assert len(died) == len(set(died))
    assert len(used) == len(set(used))
    gone = [index for what, index in found.events if what == GOES]
    told = [event for event in found.events if event[0] != GOES]
    assert told == [(DIES, index) for index in died] + [(IS_USED, index) for index in used]
    assert set(gone) == {source for item in found.items for source, _ in item.sources}
    assert all(source > i for i, item in enumerate(found.items) for source, _ in item.sources)
    assert used[0] > used[-1]


@pytest.mark.parametrize("grade", range(1, len(GRADES) + 1))
@pytest.mark.parametrize("unit", [mlp(), mlp(0.1), attention, gate])
def test_what_is_offered_is_what_is_freed(unit: Unit, grade: int) -> None:
    """Of each storage, in every grade."""
    x = torch.randn(2, 32, 64, requires_grad=True)
    offered = [item.gain_bytes if 0 < item.grade <= grade else 0 for item in Surveying(unit, x).items]
    told: list[Saved] = []
    torch.manual_seed(2)
    with LeanSaves(Sites(), grade, told.append).active():
        unit(x)
    freed: dict[int, int] = {}
    for saved in told:
        held = saved.handle.held_bytes if isinstance(saved.handle, Mask) else 0
        gain = 0 if saved.handle.is_kept else saved.storage.nbytes() - held
        freed[saved.storage.data_ptr()] = min(gain, freed.get(saved.storage.data_ptr(), gain))
    assert list(freed.values()) == offered
    assert any(offered)


@pytest.mark.parametrize("unit", [mlp(0.1), attention, gate])
def test_a_survey_changes_nothing(unit: Unit) -> None:
    """Not a bit."""
    x = torch.randn(2, 32, 64, requires_grad=True)
    torch.manual_seed(2)
    out = unit(x)
    assert same_bits(Surveying(unit, x).bits, [out.detach(), *torch.autograd.grad(out.sum(), [x])])
