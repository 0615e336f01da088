"""The ledger of gradients: which bytes are older than the step, which were made in it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_mimose.measure.gradients import GradientLedger


def model() -> nn.Sequential:
    """Two layers of 64 and 32 bytes, no biases."""
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))


def sized(module: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """Parameters with their bytes."""
    return [(p, p.numel() * 4) for p in module.parameters()]


def backward(module: nn.Module) -> None:
    """One backward pass."""
    module(torch.randn(3, 4)).sum().backward()


def test_gradients_of_the_last_step_are_old_until_zeroed() -> None:
    """They are alive through the forward and gone when backward begins."""
    net = model()
    backward(net)
    ledger = GradientLedger(sized(net), follow=True)
    assert ledger() == (96, 0, 0)
    net.zero_grad(set_to_none=True)
    ledger.begin_backward()
    assert ledger() == (0, 0, 0)
    ledger.close()


def test_new_gradients_are_counted_as_they_are_made() -> None:
    """The last layer's first."""
    net = model()
    ledger = GradientLedger(sized(net), follow=True)
    ledger.begin_backward()
    seen = []
    net[1].weight.register_post_accumulate_grad_hook(lambda _: seen.append(ledger()))
    net[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(ledger()))
    backward(net)
    assert seen == [(0, 32, 0), (0, 96, 0)]
    ledger.close()


def test_accumulated_gradients_stay_old() -> None:
    """Gradients that were not zeroed are added to in place: nothing new is made, but it is noted where that was."""
    net = model()
    backward(net)
    ledger = GradientLedger(sized(net), follow=True)
    ledger.begin_backward()
    seen = []
    net[1].weight.register_post_accumulate_grad_hook(lambda _: seen.append(ledger()))
    backward(net)
    assert seen == [(96, 0, 32)]
    assert ledger() == (96, 0, 96)
    net[1].weight.grad = None  # in the midst of the step
    backward(net)
    ledger.look()
    assert ledger() == (64, 32, 64)
    net.zero_grad(set_to_none=True)
    ledger.look()
    assert ledger() == (0, 0, 0)
    ledger.close()


def test_a_second_backward_pass_counts_each_gradient_once() -> None:
    """Two passes in one step make the gradients once."""
    net = model()
    ledger = GradientLedger(sized(net), follow=True)
    for _ in range(2):
        ledger.begin_backward()
        backward(net)
        assert ledger() == (0, 96, 0)
    ledger.close()


def test_frozen_parameters_are_not_followed() -> None:
    """They get no gradient and no hook (torch refuses one)."""
    net = model()
    net[0].requires_grad_(False)
    ledger = GradientLedger(sized(net), follow=True)
    ledger.begin_backward()
    backward(net)
    assert ledger() == (0, 32, 0)
    ledger.close()


def test_closing_removes_every_hook() -> None:
    """A later backward pass counts nothing."""
    net = model()
    ledger = GradientLedger(sized(net), follow=True)
    ledger.begin_backward()
    ledger.close()
    backward(net)
    assert ledger() == (0, 0, 0)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_without_following_no_hooks_are_registered() -> None:
    """A step that is only measured pays for none."""
    net = model()
    ledger = GradientLedger(sized(net), follow=False)
    ledger.begin_backward()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_networks_that_take_turns_are_both_followed() -> None:
    """What is frozen in the first backward pass may be trained in the second, and zeroed in between."""
    net = model()
    backward(net)
    ledger = GradientLedger(sized(net), follow=True)
    for trained, other, seen in ((net[0], net[1], (32, 64, 0)), (net[1], net[0], (0, 96, 0))):
        other.requires_grad_(False)
        trained.zero_grad(set_to_none=True)
        ledger.begin_backward()
        backward(net)
        assert ledger() == seen
        other.requires_grad_(True)
    ledger.close()


def test_gradients_that_lie_in_buckets_are_windows() -> None:
    """As DDP makes them with `gradient_as_bucket_view`; others are not, nor is a model without any."""
    net = model()
    assert not GradientLedger(sized(net), follow=True).are_windows
    backward(net)
    assert not GradientLedger(sized(net), follow=True).are_windows
    bucket = torch.zeros(24)
    net[0].weight.grad, net[1].weight.grad = bucket[:16].view(4, 4), bucket[16:].view(2, 4)
    assert GradientLedger(sized(net), follow=True).are_windows
