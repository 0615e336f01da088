"""What runs is counted: operations of matrix products as torch counts them, and the rest by its elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from lightning_mimose.measure.flops import (
    DRAW_OPERATIONS,
    ELEMENT_OPERATIONS,
    LIGHT_OPERATIONS,
    WINDOW_OPERATIONS,
    FlopTally,
)

ROWS, COLUMNS = 24, 16


def test_matrix_products_are_counted_as_torch_does() -> None:
    x, w = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS, COLUMNS)
    with FlopCounterMode(display=False) as counter:
        x @ w
    with FlopTally() as tally:
        x @ w
    assert tally.total == counter.get_total_flops() > 0
    assert tally.besides == 0


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda x: functional.gelu(x), ELEMENT_OPERATIONS),
        (lambda x: functional.layer_norm(x, (COLUMNS,)), ELEMENT_OPERATIONS),
        (lambda x: x.exp().add(x), ELEMENT_OPERATIONS + LIGHT_OPERATIONS),
        (lambda x: x.t().view(COLUMNS, ROWS), 0),
        (lambda x: torch.empty_like(x), 0),
    ],
)
def test_the_rest_is_counted_by_what_it_makes(function: object, operations: int) -> None:
    """A view makes nothing, nor does memory that nobody has filled."""
    x = torch.randn(ROWS, COLUMNS)
    with FlopTally() as tally:
        function(x)  # type: ignore[operator]
    assert tally.total == 0
    assert tally.besides == operations * ROWS * COLUMNS


def test_random_numbers_are_the_dearest() -> None:
    x = torch.randn(ROWS, COLUMNS)
    with FlopTally() as tally:
        functional.dropout(x, 0.1)
    assert DRAW_OPERATIONS * x.numel() < tally.besides < 2 * DRAW_OPERATIONS * x.numel()


@pytest.mark.parametrize(
    ("pool", "window"),
    [
        (lambda x: functional.max_pool2d(x, 3, 2), 9),
        (lambda x: functional.max_pool2d(x, (2, 3)), 6),
        (lambda x: functional.max_pool1d(x[0], 4), 4),
        (lambda x: functional.avg_pool2d(x, 3, 1), 9),
        (lambda x: functional.max_pool3d(x, 2), 8),
    ],
)
def test_pools_are_counted_by_their_windows(pool: Callable[[Tensor], Tensor], window: int) -> None:
    """On a CPU a ResNet's first pool takes as long as several of its convolutions."""
    x = torch.randn(4, 8, 12, 12, requires_grad=True)
    with FlopTally() as tally:
        out = pool(x)
    assert tally.besides == WINDOW_OPERATIONS * window * out.numel()


def test_pools_of_channels_that_come_last_are_fast() -> None:
    x = torch.randn(4, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    with FlopTally() as tally:
        out = functional.max_pool2d(x, 3, 2)
    assert tally.besides == ELEMENT_OPERATIONS * out.numel()


@pytest.mark.parametrize(
    ("operation", "dynamic"),
    [
        (lambda x: x[x > 0], True),
        (lambda x: (x > 0).nonzero(as_tuple=True), True),
        (lambda x: x.argmax(1).unique(), True),
        (lambda x: x[:, torch.tensor([0, 2])], False),
        (lambda x: x.topk(2).values.softmax(1), False),
    ],
)
def test_sizes_that_depend_on_values_are_noticed(operation: Callable[[Tensor], object], dynamic: bool) -> None:
    """Routing; indexing by numbers is none, though torch's tag says so of all indexing."""
    with FlopTally() as tally:
        operation(torch.randn(4, 8))
    assert tally.dynamic is dynamic
