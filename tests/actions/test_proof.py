"""A trial leaves nothing behind, and tells apart what can be repeated from what cannot."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mimose.actions.proof import CARRIES, DIFFERS, WRITES_PARAMETERS, find_carried, prove
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.actions.trial import CHANGES_INPUT, COLLECTIVE, Candidate, Trial
from lightning_mimose.measure.meters.profiler import ProfilerMeter
from tests.helpers import blocks
from tests.helpers.blocks import WIDTH, Base, everything, generators


def tried(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, str]:
    """What a trial says of a module."""
    state = WrittenState(module)
    entered: list[Trial | None] = []
    reasons = prove(Candidate("unit", module.forward, args, kwargs, state, entered.append))
    assert [trial is None for trial in entered[1::2]] == [True] * len(entered[1::2])
    assert state.known() or reasons
    return reasons


@pytest.mark.parametrize(
    "kind",
    [
        blocks.BatchNormed,
        blocks.Codebook,
        blocks.Counting,
        blocks.Metered,
        blocks.PythonRandom,
        blocks.NumpyRandom,
        blocks.OwnRandom,
        blocks.Dropping,
    ],
    ids=lambda kind: kind.__name__,
)
def test_nothing_is_left_of_it(kind: type[Base]) -> None:
    """State, generators, gradients, input."""
    module, x = kind(), torch.randn(8, WIDTH, requires_grad=True)
    before, random_states, given = everything(module), generators(), x.detach().clone()
    assert tried(module, x) == {}
    assert everything(module) == before
    assert generators() == random_states
    assert torch.equal(x, given)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_cast_of_it_stays_in_autocasts_cache() -> None:
    """It would be there before the unit itself runs, in steps with a trial and in no others; the cache works on."""
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH, requires_grad=True)
    casts: list[weakref.ref[torch.UntypedStorage]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                casts.append(weakref.ref(out.untyped_storage()))
            return out

    with torch.autocast("cpu", torch.bfloat16), Watch():
        assert tried(module, x) == {}
        assert casts
        assert all(ref() is None for ref in casts)
        assert torch.is_autocast_cache_enabled()
        casts.clear()
        assert module(x).dtype == torch.bfloat16
        assert any(ref() is not None for ref in casts)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_compiled_code_is_not_compiled_again_for_a_trial_under_autocast() -> None:
    """Whether autocast caches casts is among what it was compiled for."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sin()

    inner = Inner(WIDTH, WIDTH)
    inner.compile(backend=backend)
    module, x = nn.Sequential(inner), torch.randn(8, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        known = len(compiled)
        assert known
        trial = Candidate("unit", module.forward, (x,), {}, WrittenState(module), lambda trial: None)
        assert trial.run(Trial()) == ""
        module(x)
    assert len(compiled) == known


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (blocks.RandomLeaky, DIFFERS),
        (blocks.OtherPath, DIFFERS),
        (blocks.OtherValues, DIFFERS),
        (blocks.InPlace, CHANGES_INPUT),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_repeated_is_told(kind: type[Base], reason: str) -> None:
    assert tried(kind(), torch.randn(8, WIDTH, requires_grad=True)) == {"unit": reason}


def test_an_error_of_the_forward_is_no_error_of_the_trial() -> None:
    """The unit is left alone, and its own forward says what is wrong."""

    class Broken(Base):
        def after(self, x: torch.Tensor) -> torch.Tensor:
            self.count = getattr(self, "count", 0) + 1
            raise ValueError("no good")

    module = Broken()
    assert "ValueError: no good" in tried(module, torch.randn(8, WIDTH))["unit"]
    assert not hasattr(module, "count")


def test_an_error_in_the_second_trial_takes_nothing_away() -> None:
    class Late(blocks.OtherPath):
        def after(self, x: torch.Tensor) -> torch.Tensor:
            self.outside.calls += 1
            if self.outside.calls == 2:
                raise ValueError("later")
            return x

    module = Late()
    before = set(vars(module))
    assert "later" in tried(module, torch.randn(8, WIDTH))["unit"]
    assert set(vars(module)) == before


def test_memory_is_that_of_a_forward_that_keeps_nothing() -> None:
    """Saved tensors are dropped as they come."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)))
    x = torch.randn(256, 64, requires_grad=True)
    meter = ProfilerMeter()
    meter.start()
    assert tried(module, x) == {}
    peak = max(interval.peak_bytes for interval in meter.stop())
    assert peak < 5 * x.nbytes


def test_hooks_that_collect_outputs_collect_none_of_its() -> None:
    module, x = Base(), torch.randn(8, WIDTH, requires_grad=True)
    seen: list[torch.Tensor] = []
    module.up.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert tried(module, x) == {}
    assert seen == []
    module(x)
    assert len(seen) == 1


def test_a_collective_is_found() -> None:
    class Talking(Base):
        def after(self, x: torch.Tensor) -> torch.Tensor:
            total = x.detach().sum()
            torch.distributed.all_reduce(total)
            return x + total

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert tried(Talking(), torch.randn(8, WIDTH, requires_grad=True)) == {"unit": COLLECTIVE}


def test_arguments_of_any_structure() -> None:
    """Copies are given, lists are given as they were."""

    class Structured(Base):
        def forward(self, pair: tuple[Any, ...], *, more: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            more["list"].append(1)
            return super().forward(pair[0] * more["scale"])

    more = {"scale": torch.ones(1), "list": [0]}
    assert tried(Structured(), (torch.randn(8, WIDTH, requires_grad=True), "x"), more=more) == {}
    assert more["list"] == [0]


@pytest.mark.parametrize("change", [lambda: random.random(), lambda: np.random.rand()])
def test_generators_are_put_back_even_if_unused_later(change: Callable[[], Any]) -> None:
    class Sometimes(Base):
        def after(self, x: torch.Tensor) -> torch.Tensor:
            change()
            return x

    module, x = Sometimes(), torch.randn(8, WIDTH, requires_grad=True)
    before = generators()
    assert tried(module, x) == {}
    assert generators() == before


def test_values_of_jagged_tensors_are_compared() -> None:
    """Of the same shapes, and no error of torch's."""

    class Jagged(nn.Module):
        def __init__(self, *, differs: bool) -> None:
            super().__init__()
            self.linear, self.outside = nn.Linear(WIDTH, WIDTH), blocks.Outside() if differs else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.outside is not None:
                self.outside.calls += 1
                x = x * self.outside.calls
            out: torch.Tensor = self.linear(x).tanh()
            return out

    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    assert tried(Jagged(differs=False), x) == {}
    assert tried(Jagged(differs=True), x) == {"unit": DIFFERS}


@pytest.fixture(scope="module")
def attention() -> Callable[..., Any]:
    """An operation with the results of CUDA's memory-efficient attention: without dropout nobody fills the last two."""
    library = torch.library.Library("mimose_tests", "DEF")
    library.define("attention(Tensor x) -> (Tensor output, Tensor philox_seed, Tensor philox_offset)")
    garbage = iter(range(1000))

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seed, offset = (torch.tensor(next(garbage)) for _ in range(2))
        return x * 2, seed, offset

    library.impl("attention", run, "CPU")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out, seed, offset = torch.ops.mimose_tests.attention(x)
            ctx.save_for_backward(out, seed, offset)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * 2

    run.library = library  # type: ignore[attr-defined]
    return Attention.apply


def test_what_attention_leaves_unfilled_without_dropout_is_not_compared(attention: Callable[..., Any]) -> None:
    """The seed and offset of a generator that it has not used; it would never be recomputed on an accelerator."""

    class Block(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attention(super().forward(x))
            return out

    assert tried(Block(), torch.randn(8, WIDTH, requires_grad=True)) == {}


@pytest.mark.parametrize("watch", [True, False], ids=["watched", "compiled"])
def test_an_index_that_is_drawn_anew_is_found(watch: bool) -> None:
    """One number is all that is saved of it, and its gradient would go to another row."""
    draws = iter(range(8))

    class Block(Base):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.table[torch.tensor([next(draws)])]

    block, x = Block(), torch.randn(8, WIDTH, requires_grad=True)
    candidate = Candidate("unit", block.forward, (x,), {}, WrittenState(block), lambda trial: None)
    assert prove(candidate, watch=watch) == {"unit": DIFFERS}


def test_parts_of_a_unit_that_could_not_be_run_are_still_to_be_proven() -> None:
    """They take its place, and nobody has compared what they save."""
    part, trials = blocks.RandomLeaky(), list[Any]()
    inside = WrittenState(part)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = trials[-1].nested("part", inside, part.forward, (x,), {})
            with torch.no_grad():
                self.weight.mul_(2)
            return out * self.weight

    around, x = Around(), torch.randn(8, WIDTH, requires_grad=True)
    reasons = prove(Candidate("unit", around.forward, (x,), {}, WrittenState(around), trials.append))
    assert reasons == {"unit": WRITES_PARAMETERS}
    assert not inside.known()


class Keeping(Base):
    """Keeps an activation as an attribute, and goes on from it or not; later calls may change what they are given."""

    def __init__(self, *, goes_on: bool = False) -> None:
        super().__init__()
        self.goes_on, self.writes = goes_on, False
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        if self.writes:
            x.mul_(2)
        y = super().forward(x)
        if self.goes_on and self.kept is not None:
            y = y + self.kept
        self.kept = y * 1
        return y


@pytest.mark.parametrize(("goes_on", "writes"), [(False, False), (True, False), (False, True)])
def test_looking_for_what_is_carried_on_takes_no_more_than_the_call(goes_on: bool, writes: bool) -> None:
    """It is given its inputs themselves, and is ended before it writes one."""
    unit, x = Keeping(goes_on=goes_on), torch.randn(64, WIDTH, requires_grad=True) * 1
    unit(x)
    candidate = Candidate("unit", unit.forward, (x,), {}, WrittenState(unit), lambda trial: None)
    assert prove(candidate) == {}
    unit.writes, given, kept = writes, x.detach().clone(), unit.kept

    def allocated(run: Callable[[], Any]) -> int:
        meter = ProfilerMeter()
        meter.start()
        found.append(run())
        return max(piece.peak_bytes for piece in meter.stop())

    found: list[Any] = []
    taken = allocated(lambda: find_carried(candidate, {unit: ["kept"]}))
    reasons = {(True, False): CARRIES.format("'kept'"), (False, True): CHANGES_INPUT}
    expected = reasons.get((goes_on, writes))
    assert found[0] == ({} if expected is None else {"unit": expected})
    assert torch.equal(x, given)
    assert unit.kept is kept
    if not writes:
        with torch.random.fork_rng():
            assert taken < allocated(lambda: unit(x)) + x.nbytes // 2
