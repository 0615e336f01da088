"""State outside of modules: found by the names in a forward's code, looked at, put back."""

from __future__ import annotations

import itertools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mimose.actions.outside import ABSENT, LARGEST, NO_STATE, iterator_in, keys_of, look, put
from lightning_mimose.actions.state import WrittenState

LOSSES: list[float] = []
GENERATOR, OTHERS = np.random.default_rng(0), [random.Random(0)]
COUNT = 0
SCALES = itertools.cycle([1.0, 0.5])
scale = 1.0


def helping(x: torch.Tensor) -> torch.Tensor:
    """Is called by a forward."""
    global COUNT
    COUNT += 1
    return x


class Writing(nn.Module):
    """Writes to what is outside of it, in several ways."""

    calls: ClassVar[int] = 0
    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        LOSSES.append(self.noise)
        return helping(x) * self.scale

    @property
    def noise(self) -> float:
        """From a generator that is global."""
        return float(GENERATOR.random())


class Drawing(nn.Module):
    """Draws from an iterator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.unused = iter([1.0]), iter([1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scales)


class DrawingElsewhere(nn.Module):
    """Draws from a global one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(SCALES)


class DrawingInside(nn.Module):
    """Draws from a generator in a list, by a function inside its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum([x * OTHERS[0].random() for _ in range(2)])  # type: ignore[return-value]


class Inheriting(Writing):
    """Has what it counts of its own from its first forward on, and calls what it inherits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def state() -> tuple[Any, ...]:
    """All that `Writing` writes."""
    return Writing.calls, list(LOSSES), COUNT, GENERATOR.bit_generator.state["state"]["state"]


def test_what_a_forward_names_is_found() -> None:
    """In its code, that of its properties and of functions beside it; what has the name of an attribute is not."""
    keys = keys_of(Writing)
    for name in ("LOSSES", "GENERATOR", "COUNT", "Writing.calls"):
        assert f"{__name__}.{name}" in keys
    assert f"{__name__}.scale" not in keys
    assert look(f"{__name__}.LOSSES") is LOSSES
    assert keys_of(nn.Linear) == ("random", "numpy")


def test_what_a_class_inherits_is_found_too() -> None:
    """What comes to the class in a forward is taken away again."""
    assert f"{__name__}.LOSSES" in keys_of(Inheriting)
    module, x = Inheriting(), torch.ones(2)
    written = WrittenState(module)
    before = written.before_forward()
    module(x)
    changed = written.after_forward(before)
    assert "calls" in vars(Inheriting)
    with written.restored(changed):
        assert "calls" not in vars(Inheriting)
        module(x)
    assert vars(Inheriting)["calls"] == Writing.calls + 1
    del Inheriting.calls


def test_it_is_put_back_around_a_recomputation() -> None:
    """And is afterwards as it was found."""
    module, x = Writing(), torch.ones(2)
    written = WrittenState(module)
    before = written.before_forward()
    module(x)
    changed = written.after_forward(before)
    module(x)
    found = state()
    with written.restored(changed):
        assert (Writing.calls, len(LOSSES), COUNT) == (found[0] - 2, len(found[1]) - 2, found[2] - 2)
        module(x)
        assert LOSSES[-1] == found[1][-2]
    assert state() == found


def test_what_is_no_state_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or gone, or larger than can be copied every time."""
    key = next(key for key in keys_of(Writing) if key.endswith("LOSSES"))
    monkeypatch.setitem(globals(), "LOSSES", random.SystemRandom())
    assert look(key) is NO_STATE
    monkeypatch.setitem(globals(), "LOSSES", [0.0] * (LARGEST + 1))
    assert look(key) is NO_STATE
    monkeypatch.delitem(globals(), "LOSSES")
    assert look(key) is ABSENT
    put(key, [1.0])
    assert look(key) == [1.0]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Drawing, "the iterator Drawing.scales"),
        (DrawingElsewhere, f"the iterator {__name__}.SCALES"),
        (DrawingInside, f"what lies in {__name__}.OTHERS"),
        (Writing, None),
        (nn.ReLU, None),
    ],
)
def test_iterators_are_told_of(kind: type[nn.Module], told: str | None) -> None:
    """Of those that forwards name."""
    assert iterator_in([nn.Linear(1, 1), kind()]) == told
