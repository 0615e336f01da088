"""State that a forward writes: it ends as without recomputation, bit for bit, however it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_mimose.actions.recompute import recompute
from lightning_mimose.actions.state import WrittenState
from lightning_mimose.errors import MimoseError


class Normed(nn.Module):
    """BatchNorm: running statistics are written without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Spectral(nn.Module):
    """Power iteration, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Replaced(nn.Module):
    """A moving average whose buffer is another object each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).tanh()


class Data(Replaced):
    """The same through `.data`, which bumps no version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - self.mean.clone()).tanh()


class Attribute(nn.Module):
    """State that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.linear(x) * self.calls.clone()).tanh()


class AttributeReplaced(Attribute):
    """The same, by assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return (self.linear(x) * self.calls.clone()).tanh()


STATEFUL: list[type[nn.Module]] = [Normed, Spectral, Replaced, Data, Attribute, AttributeReplaced]


def states(module: nn.Module) -> list[torch.Tensor]:
    """Everything that a forward could have written."""
    found = [*module.parameters(), *module.buffers()]
    found += [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]


def trained(
    kind: type[nn.Module], run: Callable[[nn.Module, WrittenState, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """States and gradients after some steps."""
    torch.manual_seed(0)
    module = kind()
    watched = WrittenState(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradients: list[torch.Tensor] = []
    for _ in range(4):
        x = torch.randn(6, 4, requires_grad=True)
        optimizer.zero_grad()
        run(module, watched, x).pow(2).sum().backward()
        assert x.grad is not None
        gradients += [x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        optimizer.step()
    return [*states(module), *gradients]


def plain(module: nn.Module, watched: WrittenState, x: torch.Tensor) -> torch.Tensor:
    """As the module does it."""
    return module(x)


def again(module: nn.Module, watched: WrittenState, x: torch.Tensor) -> torch.Tensor:
    """Recomputed."""
    return recompute(module.forward, (x,), {}, watched)


@pytest.mark.parametrize("kind", STATEFUL)
def test_written_state_ends_as_without_recomputation(kind: type[nn.Module]) -> None:
    """State, gradients and weights are equal bit for bit after several steps."""
    with_it, without = trained(kind, again), trained(kind, plain)
    assert len(with_it) == len(without)
    assert all(map(torch.equal, with_it, without))


@pytest.mark.parametrize("kind", STATEFUL)
def test_two_calls_of_one_module_in_a_step_are_kept_apart(kind: type[nn.Module]) -> None:
    """Each recomputation sees the state that its own forward saw, though backward meets them in reverse."""

    def twice(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda module, watched, x: run(module, watched, run(module, watched, x))

    assert all(map(torch.equal, trained(kind, twice(again)), trained(kind, twice(plain))))


def test_a_norm_that_is_switched_to_training_later_is_noticed() -> None:
    """Finetuning unfreezes a backbone after some epochs: it wrote nothing in eval mode, and does now."""

    def unfrozen(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Normed()
        watched = WrittenState(module)
        for mode in (False, True, True, False):
            module.train(mode)
            run(module, watched, torch.randn(6, 4)).sum().backward()
        return states(module)

    assert all(map(torch.equal, unfrozen(again), unfrozen(plain)))


def test_a_second_backward_over_the_same_graph_sees_the_same_state() -> None:
    """With `retain_graph`."""
    module = Normed()
    out = again(module, WrittenState(module), torch.randn(6, 4)).pow(2).sum()
    out.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    out.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, module.parameters(), strict=True))
    assert module.body[1].num_batches_tracked == 1


def test_the_version_of_a_restored_buffer_is_left_alone() -> None:
    """Autograd may have saved the buffer itself: putting it back must not look like a change of it."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return (x * self.count.clone()).exp()

    module, x = Uses(), torch.randn(4, requires_grad=True)
    before = recompute(module.forward, (x,), {}, WrittenState(module))
    outside = (x * module.count).sum()
    (before.sum() + outside).backward()
    assert torch.equal(module.count, torch.full((4,), 2.0))


def test_only_what_is_written_is_copied_once_it_is_known() -> None:
    """A large table that is only read costs one copy, in the first step."""
    module = Normed()
    module.register_buffer("table", torch.zeros(100_000))
    watched = WrittenState(module)
    assert "table" in {name for _, name, _, _ in watched.before_forward()}
    again(module, watched, torch.randn(6, 4))
    names = [name for _, name, _, _ in watched.before_forward()]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_unit_without_state_copies_nothing() -> None:
    """The common case."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watched = WrittenState(module)
    again(module, watched, torch.randn(2, 4))
    assert watched.before_forward() == []


def test_a_large_buffer_that_is_first_written_late_is_an_error() -> None:
    """It was not copied, so its recomputation would see another one: nothing is trained on that."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("table", torch.zeros(1 << 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2:
                self.table.add_(1)
            return (x * self.table[0]).exp()

    module, x = Late(), torch.randn(4, requires_grad=True)
    watched = WrittenState(module)
    for _ in range(2):
        again(module, watched, x).sum().backward()
    with pytest.raises(MimoseError, match=r"began to write Late.table \(262,144 bytes\).*units=\["):
        again(module, watched, x)


def test_an_activation_that_is_kept_in_an_attribute_is_no_state() -> None:
    """A module that remembers its output (for an auxiliary loss) still has the graph of its own forward."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.linear(x).exp()
            return self.last.sin()

    found = []
    for run in (plain, again):
        torch.manual_seed(0)
        module = Remembers()
        watched = WrittenState(module)
        for _ in range(2):
            out = run(module, watched, torch.randn(6, 4))
            (out.sum() + module.last.sum()).backward()
        found.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *found))
