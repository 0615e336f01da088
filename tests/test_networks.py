"""Which units belong to networks that stand beside one another, and which to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from lightning_mimose.networks import networks
from lightning_mimose.units import find_units
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.models import Block, ConvBlock, TinyText, TinyVision


def convolutional(blocks: int = 8, channels: int = 8) -> nn.Module:
    """Images to four figures."""
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4)]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *(ConvBlock(channels) for _ in range(blocks)), *tail)


def decoder() -> nn.Module:
    """Its norms are of a class of their own."""
    return ARCHITECTURES["llama"].build()


NETS: dict[str, Callable[[], nn.Module]] = {
    "eight blocks": convolutional,
    "two blocks": lambda: convolutional(2),
    "vision": TinyVision,
    "text": TinyText,
    "llama": decoder,
    "t5": ARCHITECTURES["t5"].build,
}


class Holding(nn.Module):
    """Parts, and a forward of its own."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self) -> None:
        """What it does with them cannot be seen."""


class Loss(nn.Module):
    """A hand-written leaf, which is a unit, without parameters."""

    def forward(self) -> None:
        """Nothing."""


def shelter(model: nn.Module) -> set[str]:
    """The names of what is recomputed while nothing is known."""
    return {unit.name for unit in find_units(model) if unit.shelter}


def of(part: str, model: nn.Module) -> set[str]:
    """Those in one part."""
    return {name for name in shelter(model) if name == part or name.startswith(f"{part}.")}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no_grad"])
@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_a_student_is_cut_as_if_it_had_no_teachers(name: str, teachers: int, frozen: bool) -> None:
    """However many there are, and whether or not it can be seen that they are not trained."""
    taught = Holding(student=NETS[name](), teachers=nn.ModuleList(NETS[name]() for _ in range(teachers)))
    taught.teachers.requires_grad_(not frozen)
    assert of("student", taught) == shelter(Holding(student=NETS[name]()))
    wrapped = Holding(model=taught, loss=Loss())
    assert of("model.student", wrapped) == {f"model.{name}" for name in of("student", taught)}
    assert "loss" in shelter(wrapped)


def test_networks_of_several_kinds() -> None:
    """A student in a dictionary with larger teachers of other kinds, and what a loss compares features by."""
    parts = {"student": convolutional(2), "residual": convolutional(2, 16), "plain": TinyVision(2)}
    model = Holding(parts=nn.ModuleDict(parts), compared=nn.Sequential(nn.Linear(16, 8), nn.Sequential(nn.ReLU())))
    assert of("parts.student", model) == {"parts.student.1", "parts.student.2"}
    assert of("compared", model) == {"compared"}


@pytest.mark.parametrize("trained", [0, 2])
def test_a_list_with_one_trained_network(trained: int) -> None:
    """Student and teachers in one list."""
    model = Holding(every=nn.ModuleList(convolutional() for _ in range(4)))
    for index, net in enumerate(model.every):  # type: ignore[arg-type]
        net.requires_grad_(index == trained)
    assert of(f"every.{trained}", model) == {f"every.{trained}.{block}" for block in range(1, 9)}


def test_an_ensemble_stays_together() -> None:
    """Networks in one list, all of them trained: every one's regions keep their inputs until backward."""
    units = [f"every.{net}.{block}" for net in range(4) for block in range(1, 9)]
    assert networks(Holding(every=nn.ModuleList(convolutional() for _ in range(4))), units) == [set(units)]


def test_what_is_frozen_as_a_whole_stands_apart() -> None:
    """It is given something else than what is trained: an image's decoder, a text's encoder."""
    model = Holding(text=TinyText(12).requires_grad_(False), latent=nn.Sequential(*(Block(8) for _ in range(3))))
    texts, latents = [f"text.layers.{i}" for i in range(12)], [f"latent.{i}" for i in range(3)]
    assert networks(model, texts + latents) == [set(texts), set(latents)]
    assert networks(model.requires_grad_(False), texts + latents) == [set(texts + latents)]


@pytest.mark.parametrize(
    "model",
    [
        TinyText(4),
        nn.Sequential(*(Block(8) for _ in range(3))),
        Holding(first=Block(8), second=Block(8), third=Block(8)),
        Holding(inward=nn.Linear(4, 8), blocks=nn.ModuleList(Block(8) for _ in range(3)), last=Block(8)),
        nn.Sequential(convolutional(2), convolutional(2)),
    ],
    ids=["text", "sequence", "attributes", "list", "sequence of networks"],
)
def test_blocks_in_a_chain_stay_together(model: nn.Module) -> None:
    """Each is given what the one before it makes."""
    units = [name for name, module in model.named_modules() if isinstance(module, (Block, ConvBlock))]
    assert networks(model, units) == [set(units)]


def test_layers_that_are_frozen_in_a_list_stay_with_the_others() -> None:
    """The lower half of an encoder."""
    model = TinyText(4)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    units = [f"layers.{i}" for i in range(4)]
    assert networks(model, units) == [set(units)]


def test_a_unit_that_holds_several_networks_belongs_to_none() -> None:
    """It is no region: the largest part of the step would be in it."""
    model = Holding(both=Holding(student=convolutional(), teacher=convolutional()))
    found = networks(model, ["both", "both.student", "both.student.1", "both.teacher"])
    assert found == [{"both.student", "both.student.1"}, {"both.teacher"}]


def test_nothing_to_tell_apart() -> None:
    """Parts without parameters, and none at all."""
    assert networks(Holding(one=Loss(), other=Loss()), ["one", "other"]) == [{"one", "other"}]
    assert networks(Loss(), []) == [set()]
