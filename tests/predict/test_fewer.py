"""Bases in which few of many dimensions count."""

from __future__ import annotations

import pytest

from lightning_mimose.predict.features import bases
from lightning_mimose.predict.fewer import FEWEST_DIMENSIONS, MOST_DIMENSIONS, MOST_PAIRED, fewer_bases, may_do_without


def sizes(*names: str) -> list[dict[str, int]]:
    """Some, in which every dimension takes several values."""
    return [{name: 8 + (3 + place) * step % (5 + place) for place, name in enumerate(names)} for step in range(12)]


def test_two_dimensions_are_both_looked_at() -> None:
    """They are learnt soon enough."""
    names = ("source:1", "target:1")
    assert len(names) < FEWEST_DIMENSIONS
    assert fewer_bases(names, sizes(*names)) == []


def test_any_two_of_a_few_and_the_batch() -> None:
    names = ("batch", "pixels:2", "boxes.0:0", "boxes.1:0")
    found = {basis.dims for basis in fewer_bases(names, sizes(*names))}
    assert ("batch", "pixels:2") in found
    assert ("batch", "boxes.0:0", "boxes.1:0") in found
    assert all("batch" in dims and len(dims) < len(names) for dims in found)


@pytest.mark.parametrize("images", [MOST_PAIRED, 2 * MOST_PAIRED])
def test_of_many_only_single_ones_and_the_sides_of_one_tensor(images: int) -> None:
    names = ("pixels:2", "pixels:3", *(f"boxes.{image}:0" for image in range(images)))
    found = {basis.dims for basis in fewer_bases(names, sizes(*names))}
    assert found == {*((name,) for name in names), ("pixels:2", "pixels:3")}


def test_of_very_many_none() -> None:
    names = tuple(f"boxes.{image}:0" for image in range(MOST_DIMENSIONS + 1))
    assert fewer_bases(names, sizes(*names)) == []


def test_sides_without_a_tensors_name_are_any_two() -> None:
    """Names of the user's own say nothing of what they are sides of."""
    names = tuple(f"name{number}" for number in range(2 * MOST_PAIRED))
    assert all(len(basis.dims) == 1 for basis in fewer_bases(names, sizes(*names)))


def test_what_goes_with_what_counts_may_count_instead_of_it() -> None:
    """A target that is about as long as its source, in all that was seen."""
    lengths = (20, 31, 44, 52, 67, 71, 83, 95)
    near = [{"source:1": n, "target:1": n + n // 10 + n % 2, "boxes:0": n % 5} for n in lengths]
    apart = [{"source:1": n, "target:1": 20 + 37 * n % 80, "boxes:0": n % 5} for n in lengths]
    names = ("source:1", "target:1", "boxes:0")
    linear = bases(("source:1",), [{"source:1": n} for n in lengths])[0]
    assert not may_do_without(linear, names, near)
    assert may_do_without(linear, names, apart)
