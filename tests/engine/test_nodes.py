"""The number of operations of a forward."""

from __future__ import annotations

import torch

from lightning_mimose.engine.nodes import Nodes


def forward(operations: int) -> None:
    """So many of them."""
    value = torch.ones(1, requires_grad=True)
    for _ in range(operations):
        value = value * 2


def test_operations_with_gradients_are_counted_but_for_ours() -> None:
    """Once for each forward that has begun."""
    nodes = Nodes()
    assert nodes.end() is None
    nodes.begin()
    forward(5)
    with torch.no_grad():
        forward(3)
    assert nodes.end(own=2) == 3
    forward(4)
    assert nodes.end() is None


def test_a_forward_that_is_begun_anew_counts_from_there() -> None:
    """An attempt that failed is none of it."""
    nodes = Nodes()
    for operations in (7, 2):
        nodes.begin()
        forward(operations)
    assert nodes.end() == 2
