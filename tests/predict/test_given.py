"""What the model is given may tell more of a step than its batch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_mimose.predict.estimator import Estimator
from tests.predict.test_estimator import Size, law, structure

SIZES: list[Size] = [
    {"batch": 6, "a:1": a, "b:1": b}
    for a, b in [(64, 20), (28, 44), (52, 36), (16, 80), (72, 48), (40, 60), (24, 32), (56, 76), (68, 12), (20, 56)]
]
"""Of which two lengths vary."""


def longer(size: Size) -> int:
    """The one that both are padded to."""
    return max(size["a:1"], size["b:1"])


def first(size: Size) -> int:
    """The one that the model reads."""
    return size["a:1"]


def told(steps: Callable[[Size], int], given: Callable[[Size], int], sizes: list[Size]) -> bool:
    """Whether shapes tell more, if steps go by one length, and the first unit is given another."""
    exact, estimator = law(1), Estimator()
    for size in sizes:
        estimator.add(size, structure(), exact({"batch": 6, "ids:1": steps(size)}))
    shapes = {tuple(sorted(size.items())): (6, given(size), 32) for size in sizes}
    return estimator.is_told_better_by(shapes, sizes[-1].items())


def test_the_longer_of_two_lengths_is_read_where_it_is_known() -> None:
    """No polynomial in both tells the larger of them."""
    assert told(longer, longer, SIZES)


def test_it_takes_as_many_sizes_as_would_have_shown_a_formula_of_the_batches_own() -> None:
    """Two lengths may have one yet."""
    assert not told(longer, longer, SIZES[:-1])


@pytest.mark.parametrize(
    ("steps", "given"),
    [
        (lambda size: size["a:1"] + size["b:1"], lambda size: size["a:1"] + size["b:1"]),  # their batches tell all
        (longer, first),  # it knows less than they do
        (longer, lambda size: min(32, longer(size))),  # a part of what is to come
        (lambda size: longer(size) * first(size) % 37, longer),  # nobody tells
    ],
    ids=["a sum", "one of them", "the first chunk", "chance"],
)
def test_sizes_are_read_in_batches_otherwise(steps: Callable[[Size], int], given: Callable[[Size], int]) -> None:
    """To read them elsewhere is to learn anew."""
    assert not told(steps, given, SIZES)


def test_shapes_of_several_kinds_tell_nothing() -> None:
    """Texts in some steps, and images in others."""
    exact, estimator = law(1), Estimator()
    for size in SIZES:
        estimator.add(size, structure(), exact({"batch": 6, "ids:1": longer(size)}))
    shapes = {tuple(sorted(s.items())): (6, longer(s), *[3] * (i % 2)) for i, s in enumerate(SIZES)}
    assert not estimator.is_told_better_by(shapes, SIZES[-1].items())
    assert not estimator.is_told_better_by({}, SIZES[-1].items())
    assert not Estimator().is_told_better_by({}, SIZES[-1].items())
