"""A recomputation that was given stand-ins saves what the forward saved, or says that it does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mimose.actions.compared import GOES_BY_OTHERS, TELLS_APART, Compared, Verdict
from lightning_mimose.actions.session import Session
from lightning_mimose.errors import RecomputeError
from lightning_mimose.measure.standins import stand_in

KNOWN: dict[int, float] = {}
LAYER, OTHER = nn.Linear(8, 8), nn.Linear(8, 8)


def known(x: torch.Tensor) -> bool:
    """Whether it is one that was noted."""
    return id(x) in KNOWN


FORWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other values": lambda x: (LAYER(x) * (0.5 if known(x) else 2.0)).sigmoid(),
    "values in one place": lambda x: (LAYER(x) + nn.functional.one_hot(torch.tensor(3 * known(x)), 8)).sigmoid(),
    "another parameter": lambda x: (LAYER if known(x) else OTHER)(x.sigmoid()),
    "fewer tensors": lambda x: LAYER(x).sigmoid().exp() if known(x) else LAYER(x).sigmoid(),
    "more tensors": lambda x: LAYER(x).sigmoid() if known(x) else LAYER(x).sigmoid().exp(),
    "another shape": lambda x: LAYER(x)[: 2 + known(x)].sigmoid(),
    "another type": lambda x: LAYER(x).to(torch.float64 if known(x) else torch.float32).sigmoid(),
    "an error": lambda x: LAYER(x).sigmoid() * KNOWN[id(x)],
}


def run(forward: Callable[..., Any], verdict: Verdict, *, alive: bool = False, whole: bool = True) -> list[Any]:
    """Run a unit on an activation, backward on another tensor in its place; return the parameters' gradients."""
    x, originals = torch.linspace(0, 1, 32).view(4, 8).requires_grad_() * 2, []
    one = stand_in(x)
    KNOWN.clear()
    KNOWN[id(x)] = 1.0
    verdict.alike = not whole
    originals.append(weakref.ref(x))
    unit = Compared("unit", forward, originals, verdict)
    first = [x]
    held = x if alive else None
    del x

    def region(given: torch.Tensor) -> Any:
        return unit(first.pop() if first else given if held is None else held)

    out = checkpoint(region, one, use_reentrant=False, early_stop=False)
    for layer in (LAYER, OTHER):
        layer.zero_grad()
    out.sum().backward()
    return [None if layer.weight.grad is None else layer.weight.grad.clone() for layer in (LAYER, OTHER)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", FORWARDS)
def test_whatever_is_saved_otherwise_is_told(name: str, whole: bool) -> None:
    """An error is taken for a difference as well: the unit will raise it again if it is its own mistake."""
    verdict = Verdict()
    with pytest.raises(RecomputeError, match="'unit': it computes something else") as told:
        run(FORWARDS[name], verdict, whole=whole)
    assert told.value.reasons == {"unit": TELLS_APART}
    assert verdict.tells_apart
    run(FORWARDS[name], Verdict(), alive=True)  # with what it was given it can be repeated


def test_a_factor_that_is_not_saved_changes_no_gradient() -> None:
    """The graph is the forward's."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = LAYER(x).sigmoid() * (0.5 if known(x) else 2.0)
        return y

    verdict = Verdict()
    assert torch.equal(run(forward, verdict)[0], run(forward, verdict, alive=True)[0])
    assert not verdict.tells_apart


def test_what_is_the_same_is_read_in_full_once() -> None:
    """Then samples are compared. Where the originals are still there nothing is learnt."""
    verdict = Verdict()
    run(LAYER, verdict, alive=True)
    assert not verdict.alike
    run(LAYER, verdict)
    assert verdict == Verdict(alike=True)
    rnn = nn.LSTM(8, 8)  # saves a workspace of which a part is never written
    run(lambda x: rnn(x)[0], verdict)
    assert not verdict.tells_apart


@pytest.mark.parametrize("name", ["other values", "another path", "an error"])
def test_what_differs_on_the_very_same_tensors_is_told(name: str) -> None:
    """By something that nobody hands it: first on stand-ins, then on what it was given."""
    now = [1.0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = now.pop() if now else {"other values": 2.0, "another path": 0.0}[name]
        return (LAYER(x) * scale).sigmoid() if scale else LAYER(x).exp()

    verdict = Verdict()
    with pytest.raises(RecomputeError) as told:
        run(forward, verdict)
    assert told.value.reasons == {"unit": TELLS_APART}
    assert not verdict.goes_by_others
    now.append(1.0)
    with pytest.raises(RecomputeError) as told:
        run(forward, verdict, alive=True)
    assert told.value.reasons["unit"].startswith(GOES_BY_OTHERS)
    assert ("KeyError" in told.value.reasons["unit"]) == (name == "an error")
    assert verdict == Verdict(tells_apart=True, goes_by_others=True)


def test_running_out_of_memory_is_no_difference() -> None:
    """Another plan cures that."""
    verdict = Verdict()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not known(x):
            raise torch.OutOfMemoryError
        y: torch.Tensor = LAYER(x)
        return y

    with pytest.raises(torch.OutOfMemoryError):
        run(forward, verdict)
    assert verdict == Verdict()


def test_such_a_unit_is_not_refused() -> None:
    """It is recomputed on what it was given."""
    session = Session()
    session.refuse({"unit": TELLS_APART})
    assert not session.refused
