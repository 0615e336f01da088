"""What an optimizer will need: its state, what an update takes, what grows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mimose.measure.optimizers import probe_optimizer
from lightning_mimose.parts import storage_bytes
from tests.helpers.meter import PeakMeter


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two matrices and their biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512, dtype=dtype), nn.Linear(512, 256, dtype=dtype))


Make = Callable[[Iterable[nn.Parameter]], Optimizer]
EXACT: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


def updated(optimizer: Optimizer) -> tuple[int, int]:
    """(bytes of state after the first update, peak of the second one above its start)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    with PeakMeter(nn.ParameterList(parameters), optimizer) as meter:
        optimizer.step()
    return storage_bytes(tensors), meter.peak_bytes - meter.resident_bytes


@pytest.mark.parametrize("name", EXACT)
def test_the_probe_foresees_an_optimizers_state(name: str) -> None:
    """Within 1 % of what the real parameters then get; the probe never says less than 1 % too little."""
    optimizer = EXACT[name](net().parameters())
    cost = probe_optimizer(optimizer)
    state, _ = updated(optimizer)
    assert cost.state_bytes == pytest.approx(state, rel=0.01, abs=64)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sides", [(128, 128, 128), (256, 32, 64, 48, 16), (16, 32, 256, 256)])
def test_the_probe_foresees_the_temporaries_of_an_update(name: str, sides: tuple[int, ...]) -> None:
    """What lives only inside `step`: of all parameters, or, one by one, of two neighbours."""
    optimizer = EXACT[name](nn.ParameterList([nn.Parameter(torch.zeros(n, n)) for n in sides]).parameters())
    cost = probe_optimizer(optimizer)
    _, transient = updated(optimizer)
    assert cost.transient_bytes >= 0.98 * transient - 1024
    assert cost.transient_bytes <= (1.02 if sides[0] != 256 else 1.1) * transient + 1024


@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_in_one_buffer_count_once(foreach: bool) -> None:
    """As recurrent layers have them on an accelerator."""
    buffer = torch.zeros(8 * 1024)
    views = [nn.Parameter(part) for part in buffer.split(1024)]
    apart = [nn.Parameter(part.clone()) for part in buffer.split(1024)]
    one, other = (probe_optimizer(torch.optim.AdamW(each, foreach=foreach)) for each in (views, apart))
    assert one.transient_bytes == other.transient_bytes


def test_a_learning_rate_in_a_tensor_is_probed() -> None:
    """With which torch goes one by one; not replaced by a guess."""
    cost = probe_optimizer(torch.optim.Adam(net().parameters(), lr=torch.tensor(0.1)))
    plain = probe_optimizer(torch.optim.Adam(net().parameters(), lr=0.1))
    assert cost.state_bytes == plain.state_bytes
    assert cost.transient_bytes == pytest.approx(plain.transient_bytes, rel=0.01)


@pytest.mark.parametrize("name", EXACT)
def test_the_probe_does_not_promise_too_little(name: str) -> None:
    """State and temporaries of the first update stay below what was reserved for it."""
    model = net()
    optimizer = EXACT[name](model.parameters())
    cost = probe_optimizer(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with PeakMeter(model, optimizer) as meter:
        optimizer.step()
    needed = meter.peak_bytes - meter.resident_bytes
    assert needed <= 1.01 * (cost.state_bytes + cost.transient_bytes) + 1024


def test_state_in_another_precision_is_measured() -> None:
    """bf16 parameters have bf16 moments."""
    optimizer = torch.optim.AdamW(net(torch.bfloat16).parameters())
    state, _ = updated(torch.optim.AdamW(net(torch.bfloat16).parameters()))
    assert probe_optimizer(optimizer).state_bytes == pytest.approx(state, rel=0.01, abs=64)


def test_existing_state_is_not_reserved_again() -> None:
    """After the first update nothing is to come."""
    optimizer = torch.optim.AdamW(net().parameters())
    updated(optimizer)
    assert probe_optimizer(optimizer).state_bytes == 0


def test_frozen_parameters_get_no_state() -> None:
    """Only what takes gradients."""
    model = net()
    everything = probe_optimizer(torch.optim.AdamW(model.parameters())).state_bytes
    model[0].requires_grad_(False)
    half = probe_optimizer(torch.optim.AdamW(model.parameters())).state_bytes
    assert half == pytest.approx(everything / 2, rel=0.01)


def test_an_optimizer_that_cannot_be_copied_counts_as_adam() -> None:
    """Two values per parameter."""

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("needs a closure")

    model = net()
    assert probe_optimizer(Odd(model.parameters(), lr=0.1)).state_bytes == 2 * storage_bytes(model.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_the_probe_leaves_no_trace(name: str) -> None:
    """Optimizer, parameters, gradients, random state and the global hooks of a step are as before."""
    model = net()
    optimizer = EXACT[name](model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    weights = [p.detach().clone() for p in model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    random = torch.get_rng_state()
    probe_optimizer(optimizer)
    assert len(optimizer.state) == 0
    assert calls == []
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_scheduler_that_wrapped_the_optimizer_is_not_confused() -> None:
    """A learning rate scheduler replaces `step` and counts its calls; the probe is none of them."""

    optimizer = torch.optim.AdamW(net().parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    probe_optimizer(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updated(optimizer)
        schedule.step()
    assert caught == []


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("history", [3, 10])
def test_the_history_of_lbfgs_is_reserved_in_full(history: int, search: str | None) -> None:
    """Whatever is alive while it evaluates and updates, gradients apart; and not much more is reserved than that."""
    model = nn.ParameterList([nn.Parameter(torch.randn(100, 100)), nn.Parameter(torch.randn(10000))])
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        lr=0.05 if search is None else 1,
        history_size=history,
        line_search_fn=search,
        tolerance_grad=0,
        tolerance_change=0,
    )
    scale = torch.logspace(-3, 3, 10000)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model:
                p.grad = (2 * p.view(-1) * scale**2 / 10000).view_as(p) + p.cos() / p.numel()
            return torch.stack([((p.view(-1) * scale) ** 2).mean() + p.sin().mean() for p in model]).sum()

    parameters = storage_bytes(model.parameters())
    reserved = probe_optimizer(optimizer).growing_bytes
    peaks = []
    for _ in range(8):
        with PeakMeter(model, optimizer) as meter:
            optimizer.step(closure)
        peaks.append(meter.peak_bytes - 2 * parameters)
    assert 0.75 * reserved <= max(peaks) <= reserved + 0.01 * parameters


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("evaluations", [3, 8])
def test_a_line_search_over_a_noisy_loss_is_reserved_in_full(evaluations: int, seed: int) -> None:
    """What it holds beside its history, where directions are left out of that: dropout makes another loss each time."""
    torch.manual_seed(seed)
    model, scale = nn.ParameterList([nn.Parameter(torch.randn(20000) * 0.5)]), torch.rand(20000) * 3
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=evaluations, history_size=3, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        noise, (p,) = 2 * torch.randn(()), model
        with torch.no_grad():
            p.grad = 2 * scale * (p - noise) + 6 * (3 * p + noise).cos()
            return (scale * (p - noise).square()).sum() + 2 * (3 * p + noise).sin().sum()

    parameters = storage_bytes(model.parameters())
    reserved = probe_optimizer(optimizer).growing_bytes
    for _ in range(25):
        with PeakMeter(model, optimizer) as meter:
            optimizer.step(closure)
        # The closure's own: a gradient that is being made beside the last one, of three terms.
        assert meter.peak_bytes - 2 * parameters <= reserved + 3.01 * parameters
