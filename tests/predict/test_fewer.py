"""Bases in which few of many dimensions count."""

from __future__ import annotations

import pytest

from lightning_mimose.predict.fewer import FEWEST_DIMENSIONS, MOST_PAIRED, fewer_bases


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
