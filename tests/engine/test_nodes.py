"""The number of operations of a forward."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from lightning_mimose.engine.nodes import MOST, STEADY, Nodes


def differing(steps: Sequence[tuple[int, int]]) -> list[int]:
    """Of steps with a size and a number of operations each, those that are told."""
    nodes, weight, told = Nodes(), torch.ones(1, requires_grad=True), []
    for step, (size, operations) in enumerate(steps):
        nodes.begin()
        value = weight
        for _ in range(operations):
            value = value * 2
        if nodes.differ(size):
            told.append(step)
    return told


def test_another_loss_is_told_once() -> None:
    """Whatever the sizes, as long as they do not decide."""
    steps = [(step % 4, 5) for step in range(12)] + [(step % 4, 7) for step in range(12)]
    assert differing(steps) == [12]
    new_sizes = [(step, 5) for step in range(12)] + [(100 + step, 7) for step in range(12)]
    assert differing(new_sizes) == [12]


def test_a_loop_over_what_a_batch_holds_tells_nothing() -> None:
    """Its number goes by the size, or by chance."""
    assert differing([(step % 5, 2 + step % 5) for step in range(40)]) == []
    chance = random.Random(0)
    assert differing([(step % 3, chance.randint(1, 4)) for step in range(60)]) == []


def test_where_it_goes_by_the_size_another_one_of_the_same_size_is_told() -> None:
    """After all sizes were met more than once."""
    steps = [(step % 3, 2 + step % 3) for step in range(3 * STEADY)]
    assert differing([*steps, (0, 9)]) == [3 * STEADY]


def test_few_steps_say_nothing() -> None:
    """One after the other may be different at first."""
    assert differing([(0, 5)] * STEADY + [(0, 6)]) == []
    assert differing([(0, 5)] * (STEADY + 1) + [(0, 6)]) == [STEADY + 1]


def test_it_does_not_remember_more_and_more() -> None:
    """Of ever new sizes."""
    nodes = Nodes()
    for size in range(3 * MOST):
        nodes.begin()
        nodes.differ(size)
    assert len(nodes._of) <= MOST


def test_a_step_that_was_not_begun_tells_nothing() -> None:
    """A sheltered one, which tries things beside itself."""
    assert not Nodes().differ(0)
