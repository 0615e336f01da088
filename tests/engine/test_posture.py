"""How modules are set."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_mimose.engine.posture import MOST_TURNS, Posture


class Scaled(nn.Module):
    """Has rates of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_drop, self.dropout_prob, self.width = 0, 0.5, 8


def model() -> nn.Sequential:
    """Some layers."""
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0), Scaled(), nn.BatchNorm1d(2))


def test_modes_and_rates_are_seen() -> None:
    """Of modules that do something else for them; a rate may be written as a whole number."""
    net = model()
    posture = Posture(net)
    seen = [posture.now()]
    net[3].eval()
    seen.append(posture.now())
    net[1].p = 0.1
    seen.append(posture.now())
    net[2].attn_drop = 0.2
    seen.append(posture.now())
    net.eval()
    seen.append(posture.now())
    assert len(set(seen)) == len(seen)
    net[1].p = 0.3
    assert posture.now() == seen[-1], "how high a rate is changes no memory"


def test_a_rate_that_becomes_a_tensor_is_taken_to_be_on() -> None:
    """Its value is nobody's business here: on an accelerator one would have to wait for it."""
    net = model()
    posture = Posture(net)
    net[1].p = torch.tensor([0.1, 0.2])
    on = posture.now()
    net[1].p = 0.1
    assert posture.now() == on


def test_what_happens_between_a_steps_beginning_and_its_first_unit_is_expected_next_time() -> None:
    """For each way in which steps begin."""
    net = model()
    posture = Posture(net)
    turned = []
    for number in range(8):
        net.train(number % 2 == 0)
        posture.expected()
        net.train(number % 2 > 0)
        turned.append(posture.turned())
    assert turned == [*[True] * 4, *[False] * 4]


def test_it_does_not_remember_more_and_more() -> None:
    """Ever new ways to begin."""
    net = nn.Sequential(*[nn.Dropout(0.1) for _ in range(10)])
    posture = Posture(net)
    for number in range(4 * MOST_TURNS):
        for bit, module in enumerate(net):
            module.train(bool(number >> bit & 1))
        posture.expected()
        net.train(number % 2 == 0)
        posture.turned()
    assert len(posture._turned) <= MOST_TURNS


def test_no_module_is_kept_alive() -> None:
    """One that is replaced goes."""
    net = model()
    posture = Posture(net)
    ref = weakref.ref(net[3])
    net[3] = nn.Identity()
    gc.collect()
    assert ref() is None
    posture.now()


def test_what_is_trained_is_a_part_of_it() -> None:
    """And is found to be other than it was when the step began."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    posture, everything, head = Posture(net), (True, True), (False, True)
    assert posture.expected(head) == (*posture.now(), *head)
    assert not posture.turned(head)
    posture.expected(head)
    assert posture.turned(everything)
    assert not posture.turned(everything), "a step turns once"
    assert posture.of_modules(posture.now(everything)) == posture.now()


@pytest.mark.parametrize("period", [2, 3, 5])
def test_what_turns_in_every_so_many_th_step_is_expected(period: int) -> None:
    """Two networks that take turns, or one that is trained more often than the other; after two periods."""
    posture, turned = Posture(nn.Linear(2, 2)), []
    for number in range(4 * period):
        posture.expected((True, True))
        turned.append(posture.turned((True, False) if number % period else (False, True)))
    assert turned[0]
    assert not any(turned[2 * period :])
