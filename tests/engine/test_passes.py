"""What stands for what a step does with gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch

from lightning_mimose.engine.passes import Passes

WEIGHT = torch.ones(1, requires_grad=True)


def forward(operations: int) -> torch.Tensor:
    """So many of them."""
    value = WEIGHT
    for _ in range(operations):
        value = value * 2
    return value


def back(loss: torch.Tensor) -> None:
    loss.backward()


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def through(loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, WEIGHT, create_graph=True)


def apart(_: torch.Tensor) -> None:
    """Something else than the loss goes back."""


def step(passes: Passes, *parts: tuple[int, Callable[[torch.Tensor], None]], announced: bool = True) -> Hashable | None:
    """Passes of so many operations, each of which goes back in its way."""
    passes.begin()
    for operations, way in parts:
        loss = forward(operations)
        passes.begin_backward(loss)
        way(loss)
        if announced:
            passes.end_backward()
    return passes.end()


def test_operations_with_gradients_are_counted_but_for_ours() -> None:
    """Once for each step that has begun."""
    passes = Passes()
    assert passes.end() is None
    passes.begin()
    forward(5)
    with torch.no_grad():
        forward(3)
    passes.begin_backward(own=2)
    forward(4)
    assert passes.end() == 3
    forward(4)
    passes.begin_backward()
    assert passes.end() is None


def test_a_forward_that_is_begun_anew_counts_from_there() -> None:
    """An attempt that failed is none of it."""
    passes = Passes()
    for operations in (7, 2):
        passes.begin()
        forward(operations)
        if operations == 7:
            passes.begin_backward(forward(1))
    passes.begin_backward()
    assert passes.end() == 2


def test_a_forward_without_a_backward_stands_for_nothing() -> None:
    """A batch that was skipped."""
    passes = Passes()
    passes.begin()
    forward(5)
    assert passes.end() is None


@pytest.mark.parametrize(
    "parts",
    [
        [(3, twice)],
        [(3, through)],
        [(3, apart)],
        [(3, back), (4, back)],
        [(3, back), (5, back)],
        [(3, back), (4, twice)],
    ],
    ids=["twice", "a graph of its own", "its parts", "another pass", "another one", "another pass, twice"],
)
def test_steps_that_go_back_otherwise_differ(parts: list[tuple[int, Callable[[torch.Tensor], None]]]) -> None:
    """Each is equal to itself, and to none of the others."""
    passes = Passes()
    assert step(passes, *parts) == step(passes, *parts)
    others: list[list[tuple[int, Callable[[torch.Tensor], None]]]]
    others = [[(3, back)], [(3, twice)], [(3, through)], [(3, apart)], [(3, back), (4, back)], [(3, back), (5, back)]]
    assert all(step(passes, *parts) != step(passes, *other) for other in others if other != parts)


def test_the_number_of_parts_that_are_alike_does_not_matter() -> None:
    """Of a batch that comes in as many as there is room for."""
    passes = Passes()
    assert step(passes, *3 * [(4, back)]) == step(passes, *5 * [(4, back)])


def test_a_pass_that_nobody_announces_is_counted() -> None:
    """One by a hook that comes after the step's own, but for operations that are ours."""
    passes = Passes()

    def ended(operations: int, own: int = 0) -> Hashable | None:
        passes.begin()
        loss = forward(3)
        passes.begin_backward(loss)
        loss.backward()
        passes.end_backward()
        forward(operations)
        return passes.end(own)

    assert ended(0) == ended(4, own=4) == 3
    assert ended(4) not in (3, ended(5))


def test_the_end_of_a_pass_need_not_be_told() -> None:
    """What follows it is not counted then."""
    passes = Passes()
    assert step(passes, (3, back), announced=False) == 3
    assert step(passes, (3, back), (4, back), announced=False) == 3


@pytest.mark.parametrize("end", [Passes.end, Passes.drop, Passes.begin])
def test_no_hook_is_left_on_the_graph(end: Callable[[Passes], object]) -> None:
    """However the step ends; a graph that is kept has none of them afterwards."""
    passes = Passes()
    passes.begin()
    loss = forward(2)
    passes.begin_backward(loss)
    held = next(iter(passes._handles))
    end(passes)
    assert not passes._handles
    assert held.hooks_dict_ref() in (None, {})
    loss.backward()
