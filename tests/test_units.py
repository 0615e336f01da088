"""Which submodules are found, which of them shelter, and what patterns name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose.errors import UnitsError
from lightning_mimose.units import Unit, find_units, runs_compiled
from tests.helpers.hub import HUB, bert
from tests.helpers.models import Block, TinyNested, TinyText, TinyVision

BLOCKS = {
    "bert": [f"bert.encoder.layer.{i}" for i in range(3)],
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "t5": [
        f"{stack}.block.{i}.layer.{j}"
        for stack, n in (("encoder", 2), ("decoder", 3))
        for i in (0, 1)
        for j in range(n)
    ],
    "resnet": [f"resnet.encoder.stages.{i}.layers.{j}" for i in (0, 1) for j in (0, 1)],
    "swin": [f"swin.encoder.layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)],
}


def above(units: tuple[Unit, ...], index: int) -> list[int]:
    """Indices of the units that enclose one."""
    found = []
    while (index := units[index].parent) >= 0:
        found.append(index)
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_hugging_face_models_are_found_and_shelter(name: str) -> None:
    """The repeated blocks, by their names, are what runs recomputed while nothing is known."""
    units = {unit.name: unit for unit in find_units(HUB[name][0]())}
    assert all(units[block].shelter for block in BLOCKS[name])


@pytest.mark.parametrize("name", BLOCKS)
def test_every_candidate_is_in_the_shelter_or_inside_a_unit_of_it(name: str) -> None:
    """Nothing is above the shelter, and no two of its units are nested."""
    units = find_units(HUB[name][0]())
    for index, unit in enumerate(units):
        sheltering = [i for i in (index, *above(units, index)) if units[i].shelter]
        assert len(sheltering) == 1, unit.name


@pytest.mark.parametrize("name", BLOCKS)
def test_names_modules_and_parents_belong_together(name: str) -> None:
    """A name leads to its module; a parent comes first and its name is a prefix; no name comes twice."""
    model = HUB[name][0]()
    units = find_units(model)
    assert len({unit.name for unit in units}) == len({id(unit.module) for unit in units}) == len(units)
    for index, unit in enumerate(units):
        assert model.get_submodule(unit.name) is unit.module
        assert unit.parent < index
        if unit.parent >= 0:
            assert unit.name.startswith(units[unit.parent].name + ".")


def test_stages_of_a_sequential_are_found() -> None:
    """Three stages of a bare `nn.Sequential`; the last layer is no block."""
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
    units = find_units(nn.Sequential(*stages, nn.Linear(4, 1)))
    assert [unit.name for unit in units if unit.shelter] == ["0", "1", "2"]


def test_residual_blocks_in_a_sequential_are_found() -> None:
    """A custom net's own blocks, not the stage that holds them all."""
    shelter = [unit.name for unit in find_units(TinyVision()) if unit.shelter]
    assert shelter == ["stages.0", "stages.1", "stages.2"]


def test_containers_and_elementary_layers_are_no_units() -> None:
    """`nn.ModuleList` has no forward; a single `nn.Linear` would hold what it is given."""
    kinds = {type(unit.module) for unit in find_units(TinyText())}
    assert not kinds & {nn.ModuleList, nn.Linear, nn.LayerNorm, nn.Dropout, nn.Embedding}


def test_recurrent_layers_and_handwritten_leaves_are_units() -> None:
    """What computes with more than one operation inside is worth planning though it has no children."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sigmoid()

    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "gate": Gate(), "linear": nn.Linear(4, 4)})
    assert {unit.name for unit in find_units(model)} == {"rnn", "gate"}


def test_a_module_used_twice_is_one_unit() -> None:
    """A shared block is planned once, whichever names lead to it."""
    model = TinyNested()
    assert [unit.module for unit in find_units(model)].count(model.shared) == 1


def test_patterns_name_exactly_the_units() -> None:
    """fnmatch patterns on qualified names."""
    assert [unit.name for unit in find_units(bert(), ["bert.encoder.layer.[02]"])] == [
        "bert.encoder.layer.0",
        "bert.encoder.layer.2",
    ]


def test_class_names_name_units() -> None:
    """The name of a class selects all its instances."""
    model = TinyText(layers=4)
    assert [unit.module for unit in find_units(model, ["Block"])] == list(model.layers)


def test_patterns_that_name_nested_units_keep_both() -> None:
    """A block and its part may both be named; the part knows its parent, and the shelter has only one of them."""
    units = find_units(TinyText(layers=1), ["layers.*", "*.mlp"])
    by_name = {unit.name: unit for unit in units}
    assert units[by_name["layers.0.mlp"].parent].name == "layers.0"
    assert by_name["layers.0"].shelter != by_name["layers.0.mlp"].shelter


def test_a_pattern_may_name_an_elementary_layer() -> None:
    """Who names a layer gets it."""
    assert [unit.name for unit in find_units(TinyText(layers=1), ["*.qkv"])] == ["layers.0.qkv"]


@pytest.mark.parametrize("pattern", ["encoder.*", "Blok", "layers"])
def test_a_pattern_that_matches_nothing_is_named(pattern: str) -> None:
    """The error names the pattern and shows names and classes that exist; a bare container counts as nothing."""
    with pytest.raises(UnitsError, match=r"layers\.0") as error:
        find_units(TinyText(), ["Block", pattern])
    assert repr(pattern) in str(error.value)
    assert "Block" in str(error.value)


@pytest.mark.parametrize("patterns", [[], ()])
def test_an_empty_list_of_patterns_is_named(patterns: Sequence[str]) -> None:
    """It is the list that names nothing, whatever the model has."""
    with pytest.raises(UnitsError, match="names nothing to plan") as error:
        find_units(TinyText(), patterns)
    assert str(error.value).startswith(f"units={patterns!r} was asked for")
    assert "TinyText" not in str(error.value)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_a_model_with_nothing_to_plan_is_refused(model: nn.Module) -> None:
    """The error says what was looked at and how to name units."""
    with pytest.raises(UnitsError, match="nothing to plan") as error:
        find_units(model)
    assert type(model).__name__ in str(error.value)
    assert "units=[" in str(error.value)


def test_weights_count_layers() -> None:
    """A block weighs as much as its elementary layers, so equal blocks weigh the same."""
    weights = {unit.weight for unit in find_units(TinyText(layers=3)) if isinstance(unit.module, Block)}
    assert len(weights) == 1
    assert weights.pop() > 1


def test_a_block_that_a_loop_calls_is_the_region() -> None:
    """ALBERT's encoder calls its one block many times: as one region it would hold all those calls at once."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = nn.Linear(8, 32)
            self.blocks = nn.ModuleList([Block(32)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inward(x)
            for _ in range(6):
                x = self.blocks[0](x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(), nn.Linear(32, 2)

    assert [unit.name for unit in find_units(Model()) if unit.shelter] == ["encoder.blocks.0"]


class Sine(nn.Module):
    """A block with one elementary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(30 * self.linear(x))


class Siren(nn.Module):
    """Such blocks and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Sine() for _ in range(blocks)))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.net(x))
        return found


@pytest.mark.parametrize("blocks", [2, 8])
def test_blocks_of_one_layer_shelter_rather_than_all_of_them_together(blocks: int) -> None:
    """By layers the whole costs the same, but to recompute that spares nothing; the model may be a part of another."""
    for model, prefix in ((Siren(blocks), ""), (nn.ModuleDict({"model": Siren(blocks)}), "model.")):
        shelter = [unit.name for unit in find_units(model) if unit.shelter]
        assert shelter == [f"{prefix}net.{i}" for i in range(blocks)]


class Product(nn.Module):
    """A block without a layer: matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.inward).relu() @ self.outward


class Shift(nn.Module):
    """Something small that is no layer of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Around(nn.Module):
    """A chain of blocks, something before it and a head of several layers."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.before = Shift()
        self.net = nn.Sequential(*(block() for _ in range(12)))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.net(self.before(x)))
        return found


@pytest.mark.parametrize("block", [Sine, Product])
def test_blocks_of_one_layer_shelter_whatever_is_beside_them(block: type[nn.Module]) -> None:
    """They hold more than they are given, so the whole chain in one region spares less, with or without other units."""
    shelter = [unit.name for unit in find_units(Around(block)) if unit.shelter]
    assert shelter == ["before", *(f"net.{i}" for i in range(12)), "head"]


GENERATED: Any = torch.sin


class Named(nn.Module):
    """Its forward calls a function of its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its sine."""
        found: torch.Tensor = GENERATED(x)
        return found


class Attribute(nn.Module):
    """Holds a compiled function."""

    def __init__(self, backend: str = "inductor") -> None:
        super().__init__()
        self.function: Any = torch.compile(torch.cos, backend=backend)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated")  # inductor's own
def test_compiled_code_is_found_where_modules_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for backends that generate none, and call torch's operators."""

    class Method(nn.Module):
        """Its forward was compiled where its class was made."""

        @torch.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """The same."""
            return x

    block = nn.Linear(2, 2)
    assert not runs_compiled(nn.Sequential(block, Attribute("eager"), TinyText(), Named()))
    parts: list[Any] = [Method(), Attribute(), torch.compile(nn.Linear(2, 2))]
    for part in parts:
        assert runs_compiled(nn.Sequential(nn.Linear(2, 2), part))
    monkeypatch.setitem(globals(), "GENERATED", torch.compile(torch.sin))
    assert runs_compiled(nn.Sequential(Named()))
    block.compile()
    assert runs_compiled(nn.Sequential(block))


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.:FutureWarning")  # from torch 2.14 on
@pytest.mark.parametrize("close", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 8))])
def test_a_model_that_is_closed_as_a_whole_is_refused(close: Callable[[nn.Module], nn.Module]) -> None:
    """By name, rather than by an error of TorchScript's."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)))
    with pytest.raises(UnitsError, match="Sequential was scripted or traced as a whole"):
        find_units(close(model))
