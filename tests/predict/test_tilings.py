"""Surfaces of images whose sides are rounded."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from lightning_mimose.predict.tilings import EDGES, STEMS, Surfaces, Tiling, designs, tilings

SIDES = ("height", "width")


def size(height: int, width: int, batch: int = 1) -> dict[str, int]:
    """Of a batch of images."""
    return {"batch": batch, "height": height, "width": width}


@pytest.mark.parametrize(("multiple", "surface"), [(1, 33 * 50), (16, 48 * 64), (-16, 32 * 48)])
def test_sides_are_rounded_up_or_down(multiple: int, surface: int) -> None:
    """A convolution with padding rounds up, one without rounds down."""
    features = Tiling(SIDES, None, multiple, multiple).design([size(33, 50)])
    assert features.tolist() == [[1, surface]]


def test_scores_go_with_the_square_of_a_rounded_surface() -> None:
    """Or with two of them: attention over a map whose sides were halved, rounded up, three times."""
    height, width = 33, 50
    tokens = 5 * 7
    features = Tiling(SIDES, "batch", 8, 8, attends=True).design([size(height, width, 3)])
    assert features.tolist() == [[1, 3, 3 * 64 * tokens, 3 * (64 * tokens) ** 2]]
    features = Tiling(SIDES, None, 2, 8, attends=True).design([size(height, width)])
    assert features.tolist() == [[1, 34 * 50, 64 * tokens, 34 * 50 * 64 * tokens]]


@pytest.mark.parametrize("edges", EDGES)
def test_what_pads_is_there_only_where_it_pads(edges: str) -> None:
    """Images that are whole windows are not copied."""
    tiling = Tiling(SIDES, None, 4, 16, edges)  # type: ignore[arg-type]
    sizes = [size(32, 48), size(32, 49)]
    assert Surfaces(sizes).pads(tiling).tolist() == [False, True]
    once_more = tiling.design(sizes)[:, 3]
    assert once_more.tolist() == [0, 32 * 52 if edges == "fine" else 32 * 64]


def test_all_but_one_constant_goes_with_the_batch() -> None:
    """Twice the images, twice the surface."""
    tiling = Tiling(SIDES, "batch", 2, 8)
    one, two = tiling.design([size(30, 30), size(30, 30, 2)])
    assert np.array_equal(two[1:], 2 * one[1:])
    assert one[0] == two[0] == 1


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("batch", [None, "batch"])
def test_many_candidates_at_once_have_the_features_of_each(stem: int, batch: str | None) -> None:
    """Worked out one by one, in whole numbers."""

    def features(tiling: Tiling, dims: dict[str, int]) -> list[int]:
        sides = [dims[name] // tiling.stem * tiling.stem for name in SIDES]
        fine, coarse = (prod(-(-side // each) * each for side in sides) for each in (tiling.fine, tiling.coarse))
        found = [fine] if tiling.fine == tiling.coarse else [fine, coarse]
        if tiling.attends:
            found.append(fine * coarse)
        if tiling.edges is not None:
            padded = any(-(-side // tiling.fine) * tiling.fine % tiling.coarse for side in sides)
            found.append((fine if tiling.edges == "fine" else coarse) * padded)
        return [1, *found] if batch is None else [1, dims["batch"], *(dims["batch"] * each for each in found)]

    sizes = [size(33, 50, 3), size(64, 64), size(7, 224, 2), size(1, 500, 5)]
    for step in tilings(SIDES, batch, stem):
        expected = [[features(tiling, dims) for dims in sizes] for tiling in step]
        assert designs(step, Surfaces(sizes)).tolist() == expected


def test_candidates_become_no_simpler() -> None:
    """Those of one list have equally many features, those of the next have more."""
    features = [{tiling.design([size(9, 9)]).shape[1] for tiling in step} for step in tilings(SIDES, None)]
    assert features == [{2}, {3}, {4}]
