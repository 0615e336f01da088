"""Attempts: what is put back, when a step runs again, and when it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lightning_mimose.actions.proof import DIFFERS
from lightning_mimose.engine.attempts import MOST_FAILURES_IN_A_ROW, Attempts
from lightning_mimose.errors import RecomputeError, is_out_of_memory


class Running:
    """As much of a running step as attempts ask."""

    def __init__(self, gradients: Literal["freed", "zeroed", "kept"] = "freed", leaner: int = 1) -> None:
        self.stepping, self.learning, self.gradients = True, True, gradients
        self.latest_region: str | None = None
        self.refused: dict[str, str] = {}
        self.leaner = leaner
        self.asked: list[bool] = []

    def again(self, *, leaner: bool, why: str, allocator_failed: bool = False) -> bool:
        self.asked.append(leaner)
        return sum(self.asked) <= self.leaner

    def refuse(self, reasons: dict[str, str]) -> None:
        self.refused |= reasons

    def out_of_memory(self, error: BaseException, hint: str) -> BaseException:
        return MemoryError(hint)


def out_of_memory() -> None:
    """Fails as a device does."""
    raise torch.OutOfMemoryError("CUDA out of memory")


class Failing:
    """Calls a function; the first calls end in the errors given."""

    def __init__(self, function: Callable[[], Any], *errors: BaseException) -> None:
        self.function, self.errors, self.calls = function, list(errors), 0

    def __call__(self) -> Any:
        self.calls += 1
        result = self.function()
        if self.errors:
            raise self.errors.pop(0)
        return result


def attempts(running: Running, model: nn.Module, **options: Any) -> Attempts:
    parameters = list(model.parameters())
    return Attempts(running, model, parameters, torch.device("cpu"), **{"retry": True, **options})


OOM = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OOM, True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_what_counts_as_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_a_step_that_succeeds_runs_once() -> None:
    running, once = Running(), Failing(lambda: 3)
    assert attempts(running, nn.Linear(2, 2)).run(once) == 3
    assert once.calls == 1
    assert running.asked == []


def test_everything_is_put_back_before_the_second_attempt() -> None:
    """Buffers, generators, what `keep` guards; a plain run makes the same."""
    model, logged = nn.BatchNorm1d(3), [1]

    def step() -> torch.Tensor:
        logged.append(2)
        return model(torch.randn(4, 3)).sum().detach()

    def undo() -> None:
        del logged[1:]

    state = torch.get_rng_state()
    expected = step()
    mean, after = model.running_mean.clone(), torch.get_rng_state()
    model.reset_running_stats()
    undo()
    torch.set_rng_state(state)
    found = attempts(Running(), model, keep=lambda: undo).run(Failing(step, OOM))
    assert torch.equal(found, expected)
    assert torch.equal(model.running_mean, mean)
    assert model.num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), after)
    assert logged == [1, 2]


@pytest.mark.parametrize("failures", [1, 2])
def test_gradients_that_stay_get_this_batch_once(failures: int) -> None:
    """However much of it the failed attempts had added."""
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    x, target = torch.randn(2, 4), torch.randn(2, 4)

    def backward(layers: int = 3) -> None:
        y = x
        for layer in model:
            y = layer(y).tanh()
        gradients = torch.autograd.grad((y - target).pow(2).sum(), [layer.weight for layer in model])
        for layer, gradient in list(zip(model, gradients, strict=True))[:layers]:
            torch.autograd.backward(layer.weight, gradient)  # accumulates as a backward pass does

    backward()
    first = [layer.weight.grad.clone() for layer in model]
    backward()
    expected = [layer.weight.grad.clone() for layer in model]
    for layer, gradient in zip(model, first, strict=True):
        layer.weight.grad = gradient.clone()
    reached = iter([2, 1][:failures])

    def once() -> None:
        layers = next(reached, None)
        backward(3 if layers is None else layers)
        if layers is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    attempts(Running("kept", leaner=5), model).run(once)
    assert all(torch.equal(layer.weight.grad, e) for layer, e in zip(model, expected, strict=True))
    assert not any(layer.weight._post_accumulate_grad_hooks for layer in model)


def test_gradients_that_are_freed_anyway_are_dropped() -> None:
    """Half made ones only take memory."""
    model = nn.Linear(2, 2)
    seen = []

    def once() -> None:
        seen.append(model.weight.grad is not None)
        model(torch.ones(1, 2)).sum().backward()
        if len(seen) == 1:
            out_of_memory()

    attempts(Running(), model).run(once)
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("options", "hint"),
    [({"retry": False}, "on_oom"), ({"forbids": lambda: "not under X"}, "not under X"), ({}, "in force already")],
)
def test_where_it_must_not_run_again_the_error_says_why(options: dict[str, Any], hint: str) -> None:
    once = Failing(lambda: None, OOM, OOM, OOM)
    with pytest.raises(MemoryError, match=hint):
        attempts(Running(leaner=1 if options else 0), nn.Linear(2, 2), **options).run(once)
    assert once.calls == 1


def test_failures_in_a_row_are_bounded() -> None:
    running = Running(leaner=10**6)
    attempted = attempts(running, nn.Linear(2, 2))
    with pytest.raises(MemoryError, match="smaller budget"):
        attempted.run(Failing(lambda: None, *[OOM] * 100))
    assert len(running.asked) == MOST_FAILURES_IN_A_ROW


def test_a_unit_that_cannot_be_repeated_is_left_out() -> None:
    running, once = Running(), Failing(lambda: 1, RecomputeError({"a": "changed"}))
    assert attempts(running, nn.Linear(2, 2)).run(once) == 1
    assert running.refused == {"a": "changed"}
    assert running.asked == [False]


def test_a_checkpoint_error_names_the_unit() -> None:
    running = Running()
    running.latest_region = "layers.3"
    assert attempts(running, nn.Linear(2, 2)).run(Failing(lambda: 1, CheckpointError("other tensors"))) == 1
    assert running.refused == {"layers.3": DIFFERS}
    with pytest.raises(RecomputeError, match=r"layers\.3.*units="):
        attempts(running, nn.Linear(2, 2), forbids=lambda: "x").run(Failing(lambda: 1, CheckpointError("other")))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), CheckpointError("of somebody else")])
def test_other_errors_are_nobodys_business(error: BaseException) -> None:
    once = Failing(lambda: None, error)
    with pytest.raises(type(error)):
        attempts(Running(), nn.Linear(2, 2)).run(once)
    assert once.calls == 1


def test_outside_a_step_nothing_is_guarded() -> None:
    """A closure that an optimizer calls again inside its update, say."""
    running = Running()
    running.stepping = False
    with pytest.raises(torch.OutOfMemoryError):
        attempts(running, nn.Linear(2, 2)).run(Failing(lambda: None, OOM))


def test_parameters_that_the_attempt_wrote_cannot_be_put_back() -> None:
    """An optimizer that steps inside backward, a momentum encoder: running again would write them twice."""
    model = nn.Linear(2, 2)

    def once() -> None:
        with torch.no_grad():
            model.weight.mul_(0.5)
        out_of_memory()

    with pytest.raises(MemoryError, match="written parameters"):
        attempts(Running(), model).run(once)


@pytest.mark.parametrize("steps", [1, 8])
def test_one_of_many_parameters_that_steps_write_is_known(steps: int) -> None:
    """All are looked at in every step, however many there are."""
    model, running = nn.ParameterList(torch.zeros(1) for _ in range(300)), Running()
    attempted, quiet = attempts(running, model), Failing(lambda: None)
    for _ in range(3):
        attempted.run(quiet)

    def once() -> None:
        with torch.no_grad():
            model[123].add_(1)

    for _ in range(steps):
        attempted.run(once)
    with pytest.raises(MemoryError, match="written parameters"):
        attempted.run(Failing(once, OOM))
    assert model[123] == steps + 1


@pytest.mark.parametrize("later", [False, True], ids=["from the start", "since it was named anew"])
def test_gradients_that_nobody_zeroes_stay(later: bool) -> None:
    """Of a parameter outside every optimizer."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    inside, outside = model[0].weight, model[1].weight
    outside.grad = torch.ones(2, 2)
    calls = []

    def once() -> None:
        calls.append(1)
        inside.grad = None
        (model[1](model[0](torch.ones(1, 2)))).sum().backward()
        if len(calls) == 1:
            out_of_memory()

    zeroed = list(model[0].parameters())
    attempted = Attempts(
        Running(leaner=3), model, list(model.parameters()) if later else zeroed, torch.device("cpu"), retry=True
    )
    if later:
        attempted.zeroes(zeroed)
    attempted.run(once)
    model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()
    once_more = outside.grad.clone()
    outside.grad = torch.ones(2, 2)
    for _ in range(2):
        model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()
    assert torch.equal(once_more, outside.grad)
