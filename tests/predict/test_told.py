"""Whether numbers go by sizes without one of their dimensions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.predict.told import MOST_PARTS, PROVEN, ToldBySize
from lightning_mimose.sizes import BatchSize


def of(batch: int, side: int) -> BatchSize:
    """A size."""
    return BatchSize((("batch", batch), ("x:2", side)))


@given(modulus=st.integers(2, 7), seed=st.integers(0, 10_000))
def test_what_goes_by_one_dimension_is_told(modulus: int, seed: int) -> None:
    """Whatever it is of that dimension."""
    chance, told = random.Random(seed), ToldBySize()
    for _ in range(60):
        size = of(chance.randint(1, 9), chance.randint(1, 14))
        told.saw(size, size.dims[1][1] % modulus, 1 / modulus)
    assert told.holds


@given(share=st.floats(0.1, 0.9), seed=st.integers(0, 10_000))
def test_what_comes_by_chance_is_not_for_long(share: float, seed: int) -> None:
    """The first part of a size with two numbers refutes it, for good."""
    chance, told = random.Random(seed), ToldBySize()
    for _ in range(600):
        number = chance.random() < share
        told.saw(of(chance.randint(1, 4), chance.randint(1, 6)), number, share if number else 1 - share)
    assert not told.holds


@pytest.mark.parametrize(("share", "holds"), [(0.3, True), (0.99, False)])
def test_what_nearly_always_comes_tells_nothing(share: float, holds: bool) -> None:
    """It would have come anyway."""
    told = ToldBySize()
    for batch in range(3 * PROVEN):
        told.saw(of(batch, 8), 70, share)
    assert told.holds is holds


def test_sizes_that_have_no_dimensions_tell_nothing() -> None:
    """Whatever else stands for them."""
    told = ToldBySize()
    for _ in range(50):
        told.saw("a size", 70, 0.1)
    assert not told.holds


def test_it_does_not_remember_more_and_more() -> None:
    """Thousands of sizes: what comes first is remembered."""
    told = ToldBySize()
    for step in range(5000):
        told.saw(of(step, step), step % 7, 0.1)
    assert all(len(numbers) <= MOST_PARTS for numbers in told._numbers.values())
