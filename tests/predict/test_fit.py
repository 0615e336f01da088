"""The fit of every column, and what is predicted of sizes left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression

from lightning_mimose.measure.observe import observe
from lightning_mimose.predict import fitting
from lightning_mimose.predict.checking import EXACT_ERROR, left_out
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Expansion, Measured
from lightning_mimose.predict.solving import MISSED, monotone
from lightning_mimose.predict.structure import Structure
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


def rows_of(values: NDArray[np.float64]) -> list[Measured]:
    """Sizes of which no local maxima are known."""
    return [Measured(row) for row in values]


def test_bounded_coefficients_are_those_of_scikit_learn() -> None:
    """Where a free fit would take from larger sizes; columns that are equal are solved once."""
    random = np.random.default_rng(0)
    design = random.random((8, 3))
    values = design @ np.array([[3.0, 2.0], [1e-7, 4.0], [-1e-6, 1.0]]) * 1e6
    values = np.concatenate([values, values, values[:, :1]], axis=1)
    expected = LinearRegression(fit_intercept=False, positive=True).fit(design, values).coef_.T
    assert np.array_equal(monotone(design, values)[:, [0, 2, 4]], expected[:, [0, 2, 4]])


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(-8, 0))
def test_none_that_could_be_bounded_is_passed_over(seed: int, exponent: float) -> None:
    """Which columns no coefficients above zero describe is told without a solver; that tells the same of each."""
    random = np.random.default_rng(seed)
    design = np.vander(np.sort(random.uniform(0.1, 1.0, 8)), 3)
    truth = random.uniform(0, 1, (3, 20)) - 10**exponent * random.uniform(0, 1, (3, 20))
    values = (design @ truth + MISSED * random.uniform(-1, 1, (8, 20))) * 1e6
    found = monotone(design, values)
    for target, coefficients in zip(values.T, found.T, strict=True):
        close = MISSED * np.abs(target).max()
        bound = LinearRegression(fit_intercept=False, positive=True).fit(design, target).coef_
        bounded = np.abs(design @ bound - target).max() <= close
        assert not bounded or coefficients.min() >= -1e-9 * np.abs(target).max()


def test_one_fit_tells_what_fits_without_each_size_would_say() -> None:
    """Sizes that a basis cannot tell apart are left out together; an undetermined rest is left unchecked."""
    structure = observe(recorded(TinyText(2), text_batch(2, 8)), 0).structure
    generator = np.random.default_rng(0)
    lengths = [1.0, 2.0, 2.0, 3.0, 5.0, 8.0]
    design = np.array([[1.0, n, n * n] for n in lengths])
    values = generator.uniform(1e6, 1e9, (len(lengths), structure.columns))
    check = left_out(design, Expansion(rows_of(values)), structure.summary(values), structure, 0, rounds=False)
    assert sorted(check.checked) == list(range(len(lengths)))
    for row, found in zip(check.checked, check.predicted, strict=True):
        rest = [i for i, n in enumerate(lengths) if n != lengths[row]]
        alone = design[row] @ np.linalg.lstsq(design[rest], values[rest], rcond=None)[0]
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-3)
    assert left_out(
        design[:4], Expansion(rows_of(values[:4])), structure.summary(values[:4]), structure, 0, rounds=False
    ).error == float("inf")


def rows(sides: Sequence[int], small: int) -> tuple[list[dict[str, int]], NDArray[np.float64], Structure]:
    """Images whose smallest ones take a kernel that needs as much again."""
    torch.manual_seed(0)
    observation = observe(recorded(TinyText(), text_batch(2, 16)), 0)
    areas = np.array([side**2 for side in sides], dtype=float)
    scratch = np.where(np.array(sides) <= small, areas.max(), 0.0)
    sizes = [{"batch": 8, "side": side} for side in sides]
    return sizes, np.outer(areas + scratch, observation.values), observation.structure


def images(sides: Sequence[int], small: int) -> tuple[list[dict[str, int]], list[Measured], Structure]:
    """The same as `best_fit` takes them."""
    sizes, values, structure = rows(sides, small)
    return sizes, rows_of(values), structure


def test_sizes_below_which_kernels_work_otherwise_areleft_out() -> None:
    """The rest is described exactly, and nothing is said of smaller ones."""
    sides = (64, 24, 96, 48, 80, 16, 72)
    sizes, values, structure = rows(sides, small=16)
    fit = best_fit(sizes, rows_of(values), structure, 0)
    assert fit.error < EXACT_ERROR
    assert fit.covers({"batch": 8, "side": 40})
    assert not fit.covers({"batch": 8, "side": 16})
    assert not fit.covers({"batch": 8, "side": 20})
    assert fit.values_at({"batch": 8, "side": 40}) == pytest.approx(values[0] * 40**2 / 64**2, rel=1e-6)


def test_all_sizes_count_where_kernels_are_the_same() -> None:
    """None is left out then."""
    sizes, values, structure = rows((64, 24, 96, 48, 80, 16, 72), small=0)
    fit = best_fit(sizes, rows_of(values), structure, 0)
    assert (fit.sizes, fit.without) == (7, ())
    assert fit.covers({"batch": 8, "side": 12})


def test_no_side_is_believed_to_be_the_same_below_what_was_seen() -> None:
    """Small heights have shown that kernels change; small widths may as well."""
    pairs = ((64, 32), (96, 48), (48, 64), (80, 96), (128, 40), (112, 128), (32, 80), (72, 56), (16, 64), (16, 96))
    _, values, structure = rows([1], small=0)
    areas = [h * w + (128 * 128 if min(h, w) <= 16 else 0) for h, w in pairs]
    sizes = [{"batch": 8, "height": h, "width": w} for h, w in pairs]
    fit = best_fit(sizes, rows_of(np.outer(areas, values[0])), structure, 0)
    assert fit.error < EXACT_ERROR
    assert fit.covers({"batch": 8, "height": 64, "width": 64})
    assert not fit.covers({"batch": 8, "height": 64, "width": 16})


def test_one_image_of_another_width_does_not_tell_a_sum_from_a_product() -> None:
    """Heights vary beside one width, and a single image has another: sums of both sides describe all of them."""
    _, values, structure = rows([1], small=0)
    pairs = ((190, 190), (190, 95), (95, 95), (161, 95), (127, 95))
    sizes = [{"batch": 8, "height": h, "width": w} for h, w in pairs]
    found = best_fit(sizes, rows_of(np.outer([h * w for h, w in pairs], values[0])), structure, 0)
    for height, width in ((250, 95), (250, 250), (95, 190)):
        dims = {"batch": 8, "height": height, "width": width}
        believed = found.error_at(dims, 0) < EXACT_ERROR
        assert not believed or found.values_at(dims) == pytest.approx(values[0] * height * width, rel=1e-6)
        assert believed or width != 95  # what all but one size have in common is known


def test_what_one_size_alone_says_is_believed_of_no_other() -> None:
    """Targets that are half as long as their sources tell nothing of others; one that is not, not in what way."""
    _, values, structure = rows([1], small=0)

    def law(source: int, target: int) -> int:
        return source**2 + target**2 + 3 * source * target + 100 * source

    pairs = ((40, 20), (72, 36), (24, 12), (56, 28), (64, 32), (33, 16), (48, 24))
    sizes = [{"batch": 8, "input_ids:1": source, "labels:1": target} for source, target in pairs]
    found = best_fit(sizes, rows_of(np.outer([law(*pair) for pair in pairs], values[0])), structure, 0)
    for source, target, known in ((96, 48, True), (80, 40, True), (80, 48, False), (40, 64, False)):
        dims = {"batch": 8, "input_ids:1": source, "labels:1": target}
        assert (found.error_at(dims, 0) < EXACT_ERROR) == known
        assert not known or found.values_at(dims) == pytest.approx(values[0] * law(source, target), rel=1e-6)


def test_one_longest_side_tells_nothing_of_images_that_are_smaller_both_ways() -> None:
    """Their area is a sum of the other side then, with and without a batch that varies."""
    _, values, structure = rows([1], small=0)
    pairs = ((32, 20), (24, 32), (32, 32), (32, 16), (12, 32), (32, 28), (20, 32), (32, 12), (16, 32), (32, 24))
    for batches in ((4,), (4, 2, 3)):
        sizes = [
            {"batch": batches[i % len(batches)], "input:2": height, "input:3": width}
            for i, (height, width) in enumerate(pairs)
        ]
        areas = [size["batch"] * size["input:2"] * size["input:3"] for size in sizes]
        found = best_fit(sizes, rows_of(np.outer(areas, values[0])), structure, 0)
        for height, width in ((24, 24), (12, 12), (28, 32), (32, 24)):
            dims = {"batch": batches[-1], "input:2": height, "input:3": width}
            predicted = found.error_at(dims, 0) < EXACT_ERROR
            assert predicted or (32 not in (height, width))
            assert not predicted or found.values_at(dims) == pytest.approx(
                values[0] * batches[-1] * height * width, rel=1e-6
            )


def test_one_smaller_batch_is_believed_to_be_one() -> None:
    """Where bytes are the batch times something of the rest, it is no feature of its own that it rests on."""
    _, values, structure = rows([1], small=0)
    pairs = ((8, 40), (8, 52), (8, 61), (8, 77), (3, 45))
    sizes = [{"batch": batch, "ids:1": tokens} for batch, tokens in pairs]
    found = best_fit(sizes, rows_of(np.outer([batch * tokens for batch, tokens in pairs], values[0])), structure, 0)
    assert found.error < EXACT_ERROR
    assert found.values_at({"batch": 3, "ids:1": 70}) == pytest.approx(values[0] * 210, rel=1e-6)


def test_what_was_left_out_is_left_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more sizes the same is tried first, and nothing else if that does; else all is looked at again."""
    sides = (64, 24, 96, 48, 80, 16, 72)
    first = best_fit(*images(sides, small=16), 0)
    assert first.without == (("side", 16),)
    made: list[int] = []
    outlined = fitting.outlined

    def counted(sizes: Any, *rest: Any, **how: Any) -> Any:
        made.append(len(sizes))
        return outlined(sizes, *rest, **how)

    monkeypatch.setattr(fitting, "outlined", counted)
    again = best_fit(*images((*sides, 40), small=16), 0, first.without)
    assert (made, again.without, again.error < EXACT_ERROR) == ([7], first.without, True)
    made.clear()
    best_fit(*images((*sides, 40), small=24), 0, first.without)
    assert made[:2] == [7, 8]
    made.clear()
    best_fit(*images((*sides, 40), small=16), 0, (("side", 64),))  # of which too few are left
    assert made[0] == 8


def test_half_of_the_sizes_are_left_at_least() -> None:
    """Fewer say too little; those that are left out have a fit of their own, and do not become ever more."""
    pairs = [(64, 32), (96, 48), (48, 64), (80, 96), (128, 40), (112, 128), (72, 56)]
    for small, without in ((6, True), (8, False)):
        all_pairs = [*pairs, *((16, 24 + 8 * i) for i in range(small))]
        _, values, structure = rows([1], small=0)
        areas = [h * w + (128 * 128 if h <= 16 else 0) for h, w in all_pairs]
        sizes = [{"batch": 8, "height": h, "width": w} for h, w in all_pairs]
        found = best_fit(sizes, rows_of(np.outer(areas, values[0])), structure, 0)
        assert (found.without == (("height", 16),)) is without


def test_a_good_fit_leaves_nothing_out() -> None:
    """A little noise is no sign of another kernel."""
    sizes, values, structure = rows((64, 24, 96, 48, 80, 16, 72, 40, 56), small=0)
    noise = np.random.default_rng(0).uniform(-2e-3, 2e-3, (len(sizes), 1))
    fit = best_fit(sizes, rows_of(values * (1 + noise)), structure, 0)
    assert fit.error > EXACT_ERROR
    assert (fit.sizes, fit.without) == (9, ())


def test_no_more_than_the_smallest_areleft_out() -> None:
    """Kernels that change in the middle of the range are no reason to believe in what is left."""
    sizes, values, structure = rows((64, 24, 96, 48, 80, 16, 72), small=64)
    assert best_fit(sizes, rows_of(values), structure, 0).error > EXACT_ERROR


def test_a_square_says_nothing_of_other_sides_than_three() -> None:
    """Any three values follow a parabola, also in many sizes."""
    _, values, structure = rows([1], small=0)

    def law(side: int, tokens: int) -> int:
        return (side // 4) ** 4 + 9 * side**2 + 40 * tokens

    pairs = ((28, 31), (24, 53), (28, 50), (28, 24), (32, 39), (32, 54), (32, 46), (24, 56), (24, 30))
    sizes = [{"batch": 4, "input:2": side, "t:1": tokens} for side, tokens in pairs]
    found = best_fit(sizes, rows_of(np.outer([law(*pair) for pair in pairs], values[0])), structure, 0)
    known, other = {"batch": 4, "input:2": 28, "t:1": 41}, {"batch": 4, "input:2": 16, "t:1": 41}
    assert found.error_at(known, 0) < EXACT_ERROR
    assert found.values_at(known) == pytest.approx(values[0] * law(28, 41), rel=1e-6)
    assert found.error_at(other, 0) > 1
