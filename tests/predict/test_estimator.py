"""The estimator: exact where bytes are polynomials, careful where they are not, and what it learnt can be saved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.features import BLOCKS
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.nearby import nearer
from lightning_mimose.predict.prediction import Prediction
from lightning_mimose.predict.structure import Structure
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded

Size = dict[str, int]
Law = Callable[[Size], NDArray[np.float64]]


@cache
def real(layers: int = 2) -> Observation:
    """A real step's structure, whose values the tests replace."""
    return observe(recorded(TinyText(layers), text_batch(2, 8)), 0)


def structure() -> Structure:
    """Of the model that the laws below are about."""
    return real().structure


def law(seed: int = 0, degree: int = 2, batchless: bool = False) -> Law:
    """Every column a polynomial with whole, non-negative coefficients, as bytes are."""
    generator = np.random.default_rng(seed)
    draw = generator.integers(0, 1000, (4, structure().columns)) * 4
    draw[degree + 1 :] = 0

    def values(size: Size) -> NDArray[np.float64]:
        batch, n = size["batch"], size.get("ids:1", 1)
        alone = draw[3] * n if batchless else 0
        return (draw[0] + alone + batch * (draw[1] * n + draw[2] * n**2)).astype(np.float64)

    return values


def learnt(sizes: list[Size], values: Law, estimator: Estimator | None = None) -> Estimator:
    """An estimator that saw these sizes."""
    estimator = Estimator() if estimator is None else estimator
    for size in sizes:
        estimator.add(size, structure(), values(size))
    return estimator


def predicted(estimator: Estimator, size: Size) -> Prediction:
    """A prediction there must be."""
    prediction = estimator.predict(size)
    assert prediction is not None
    return prediction


def text(*lengths: int, batch: int = 8) -> list[Size]:
    """Batches of one size and several lengths."""
    return [{"batch": batch, "ids:1": n, "mask:1": n} for n in lengths]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    degree=st.integers(0, 2),
    lengths=st.lists(st.integers(4, 600), min_size=5, max_size=8, unique=True),
    asked=st.integers(4, 2400),
)
def test_polynomials_in_one_dimension_are_recovered(seed: int, degree: int, lengths: list[int], asked: int) -> None:
    """Constant, linear and quadratic columns, to the byte inside the range seen and not far beyond it."""
    exact = law(seed, degree)
    estimator = learnt(text(*lengths), exact)
    (size,) = text(asked)
    prediction = predicted(estimator, size)
    inside = min(lengths) <= asked <= max(lengths)
    spread = max(lengths) > 1.5 * min(lengths)
    between = any(asked % block and not any(length % block for length in lengths) for block in BLOCKS)
    if inside and spread:
        assert prediction.trusted is not between
    if prediction.trusted:
        np.testing.assert_allclose(prediction.values, exact(size), rtol=1e-5, atol=0.5)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(8, 300)), min_size=8, max_size=12, unique=True),
    asked=st.tuples(st.integers(1, 16), st.integers(8, 300)),
)
def test_polynomials_in_two_dimensions_are_recovered(
    seed: int, sizes: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    """Whatever combinations of batch and length were seen: what is trusted is right."""
    exact = law(seed)
    estimator = learnt([{"batch": b, "ids:1": n} for b, n in sizes], exact)
    size = {"batch": asked[0], "ids:1": asked[1]}
    prediction = estimator.predict(size)
    if prediction is not None and prediction.trusted:
        scale = np.abs(exact(size)).max()
        np.testing.assert_allclose(prediction.values, exact(size), rtol=1e-4, atol=1e-4 * scale)


def first_trusted(sizes: list[Size], exact: Law, asked: Size) -> int:
    """After how many sizes another one is trusted."""
    estimator = Estimator()
    for count, size in enumerate(sizes, 1):
        estimator.add(size, structure(), exact(size))
        prediction = estimator.predict(asked)
        if prediction is not None and prediction.trusted:
            np.testing.assert_allclose(prediction.values, exact(asked), rtol=1e-4, atol=1.0)
            return count
    return 99


@pytest.mark.parametrize("lengths", [(40, 72, 24, 56, 64, 33), (512, 16, 128, 300, 64, 80), (10, 20, 30, 40, 50, 60)])
def test_one_varying_dimension_is_trusted_after_six_sizes(lengths: tuple[int, ...]) -> None:
    """In whichever order the lengths come."""
    asked = sum(lengths) // len(lengths)
    assert first_trusted(text(*lengths), law(), text(asked)[0]) <= 6


@pytest.mark.parametrize("follows", [lambda n: n, lambda n: 2 * n + 1, lambda n: 700 - n])
def test_dimensions_that_follow_from_others_cost_no_more_sizes(follows: Callable[[int], int]) -> None:
    """As long as they do: another size is none of those that were learnt from, until some of its kind were."""

    columns = np.random.default_rng(5).integers(1, 1000, (3, structure().columns)).astype(np.float64)

    def both(size: Size) -> NDArray[np.float64]:
        n, m = size["x:1"], size["y:1"]
        found: NDArray[np.float64] = 8 * np.array([n, m, n * m]) @ columns
        return found

    sizes = [{"batch": 8, "x:1": n, "y:1": follows(n)} for n in (40, 72, 24, 56, 64, 33)]
    assert first_trusted(sizes, both, {"batch": 8, "x:1": 50, "y:1": follows(50)}) <= 6
    off = [{"batch": 8, "x:1": n, "y:1": follows(n) + more} for n, more in ((50, 9), (30, 20), (66, 5), (44, 31))]
    assert first_trusted(sizes, both, off[0]) == 99
    assert first_trusted([*sizes, *off[1:]], both, off[0]) <= 9


def test_what_follows_is_trusted_no_further_than_what_it_follows_from() -> None:
    """A label twelve times as long as any before is another matter, however little longer its text is."""

    def both(size: Size) -> NDArray[np.float64]:
        return np.full(structure().columns, 1000.0 * size["x:1"])

    estimator = learnt([{"batch": 8, "x:1": 500 + n, "y:1": n} for n in (10, 14, 19, 25, 30, 34)], both)
    assert predicted(estimator, {"batch": 8, "x:1": 560, "y:1": 60}).trusted
    assert not predicted(estimator, {"batch": 8, "x:1": 900, "y:1": 400}).trusted


def test_two_varying_dimensions_are_trusted_after_ten_sizes() -> None:
    """Batch and length, both random; with a part that does not scale with the batch."""
    generator = np.random.default_rng(3)
    sizes = [
        {"batch": int(b), "ids:1": int(n)}
        for b, n in zip(*generator.integers((2, 20), (9, 200), (12, 2)).T, strict=True)
    ]
    assert first_trusted(sizes, law(), {"batch": 5, "ids:1": 101}) <= 10


def test_a_shorter_last_batch_does_not_disturb() -> None:
    """It is one more size; lengths at the usual batch stay trusted and exact, whether it fits their law or not."""

    def odd(size: Size) -> NDArray[np.float64]:
        return law()(size) * (1.3 if size["batch"] == 3 else 1.0)

    estimator = learnt(text(24, 40, 64, 80, 100), odd)
    before = predicted(estimator, text(50)[0])
    estimator.add(text(48, batch=3)[0], structure(), odd(text(48, batch=3)[0]))
    after = predicted(estimator, text(50)[0])
    assert before.trusted
    assert after.trusted
    np.testing.assert_allclose(after.values, odd(text(50)[0]), rtol=1e-6)


def test_a_shorter_batch_of_the_same_law_is_learnt_from_one_or_two() -> None:
    """Almost everything scales with the batch."""
    estimator = learnt([*text(24, 40, 64, 80, 100), *text(48, 72, batch=3)], law())
    size = text(60, batch=3)[0]
    prediction = predicted(estimator, size)
    assert prediction.trusted
    np.testing.assert_allclose(prediction.values, law()(size), rtol=1e-5, atol=1.0)


def test_nothing_is_known_before_the_first_step() -> None:
    """No prediction, rather than a wild one."""
    estimator = Estimator()
    assert estimator.predict(text(8)[0]) is None
    assert len(estimator) == 0


def test_one_size_says_nothing_about_another() -> None:
    """But everything about itself."""
    estimator = learnt(text(64), law())
    assert predicted(estimator, text(64)[0]).trusted
    other = estimator.predict(text(65)[0])
    assert other is None or not other.trusted


def test_a_size_that_was_measured_is_predicted_as_measured() -> None:
    """Exactly, with no error, even if no polynomial fits."""
    generator = np.random.default_rng(0)
    sizes = text(24, 40, 64, 80)
    values = [generator.uniform(0, 1e6, structure().columns) for _ in sizes]
    estimator = Estimator()
    for size, value in zip(sizes, values, strict=True):
        estimator.add(size, structure(), value)
    for size, value in zip(sizes, values, strict=True):
        prediction = predicted(estimator, size)
        assert prediction.trusted
        assert prediction.error == 0.0
        assert (prediction.values == value).all()


def test_the_latest_measurement_of_a_size_counts() -> None:
    """The same size again replaces what was known of it."""
    estimator = learnt(text(24), law(0))
    estimator.add(text(24)[0], structure(), law(1)(text(24)[0]))
    assert (predicted(estimator, text(24)[0]).values == law(1)(text(24)[0])).all()
    assert len(estimator) == 1


def test_a_size_of_the_first_step_is_predicted_beside_the_gradients_there_are_now() -> None:
    """A manual optimization keeps gradients between steps, and had none in the first one."""
    estimator, first, later = Estimator(), replace(structure(), old_gradient_bytes=0), law()
    now = replace(structure(), old_gradient_bytes=4096)
    estimator.add(text(24)[0], first, law(1)(text(24)[0]))
    for size in text(40, 56, 64, 80, 100):
        estimator.add(size, now, later(size))
    prediction = predicted(estimator, text(24)[0])
    assert prediction.trusted
    assert prediction.structure == now
    assert prediction.values == pytest.approx(later(text(24)[0]))
    estimator.add(text(24)[0], now, later(text(24)[0]))
    prediction = predicted(estimator, text(24)[0])
    assert prediction.trusted
    assert (prediction.values == later(text(24)[0])).all()


def test_what_was_seen_around_a_size_counts_however_short_the_last_ones_were() -> None:
    """Short texts take another way through the same blocks: what they say of long ones is no more than theirs."""
    long, short = replace(structure(), positions=structure().positions[:-1]), structure()
    large, small = law(1), law(2)
    estimator = Estimator()
    for size in text(60, 80, 100, 130, 160):
        estimator.add(size, long, large(size))
    for size in text(21, 24, 27, 31, 34):
        estimator.add(size, short, small(size))

    def told(length: int) -> set[Structure]:
        prediction = predicted(estimator, text(length)[0])
        assert prediction.trusted
        for each in (prediction, *prediction.others):
            law_of = small if each.structure == short else large
            assert each.values == pytest.approx(law_of(text(length)[0]))
        return {each.structure for each in (prediction, *prediction.others)}

    assert told(29) == {short}
    assert told(90) == {short, long}
    assert told(55) == {short, long}, "in between they may take either"
    assert told(40) == {short}
    estimator.add(text(120)[0], long, large(text(120)[0]))
    assert told(90) == {long}
    assert told(29) == {short, long}


def test_batches_of_one_that_all_have_one_shape_are_predicted_by_it_alone() -> None:
    """Whatever was measured last, and however little they have; but not beyond the sizes they were seen with."""
    one, several = replace(structure(), positions=structure().positions[:-1]), structure()
    small, large = law(1), law(2)
    estimator = Estimator()
    for size in text(20, 30, 40, 50, 60, batch=1):
        estimator.add(size, one, small(size))
    for size in (*text(15, 27, 39, 55, 70, batch=4), *text(21, 35, 44, 58, 65, batch=2)):
        estimator.add(size, several, large(size))
    prediction = predicted(estimator, text(45, batch=1)[0])
    assert prediction.trusted
    assert prediction.structure == one
    assert not prediction.others
    assert prediction.values == pytest.approx(small(text(45, batch=1)[0]))
    beyond = predicted(estimator, text(80, batch=1)[0])
    assert several in {each.structure for each in (beyond, *beyond.others)}
    estimator.add(text(33, batch=1)[0], several, large(text(33, batch=1)[0]))
    unsure = predicted(estimator, text(45, batch=1)[0])
    assert several in {each.structure for each in (unsure, *unsure.others)}


def test_other_shapes_count_on_the_path_that_a_size_takes() -> None:
    """Not on the latest one alone: two tasks in turns, of which one has two shapes."""
    task = replace(structure(), calls=tuple(replace(call, key=f"{call.key}!") for call in structure().calls))
    large, small, long = law(1), law(2), replace(task, positions=task.positions[:-1])
    estimator, generator = Estimator(), np.random.default_rng(0)
    for size in text(60, 80, 100, 130, 160):
        estimator.add(size, long, large(size))
    for size in text(24, 31, 34, 51, 57):
        estimator.add(size, task, small(size))
    for size in text(*generator.choice(range(20, 170), 20, replace=False).tolist()):
        estimator.add(size, structure(), small(size))
    for size, shape in ((text(33)[0], task), (text(40)[0], structure())):
        estimator.add(size, shape, small(size))
    prediction = predicted(estimator, text(151)[0])
    assert prediction.trusted
    assert long in {each.structure for each in (prediction, *prediction.others)}
    assert predicted(estimator, text(43)[0]).trusted


def test_which_other_shapes_say_something_of_a_size() -> None:
    """None of one that was measured; none beside other gradients, or of very few sizes."""
    short, long = structure(), replace(structure(), positions=structure().positions[:-1])
    key = tuple(sorted(text(90)[0].items()))

    def others(shape: Structure, lengths: Sequence[int]) -> list[Structure]:
        estimator = Estimator()
        for size in text(*lengths):
            estimator.add(size, shape, law()(size))
        for size in text(21, 24, 27):
            estimator.add(size, short, law()(size))
        return nearer(estimator.observed.sizes, short, key)

    assert others(long, (60, 80, 130)) == [long]
    assert not others(long, (60, 130)), "too few"
    assert not others(long, (60, 90, 130)), "it was measured"
    assert not others(long, (600, 800, 900)), "no nearer"
    assert not others(replace(long, old_gradient_bytes=4096), (60, 80, 130))


def test_a_shape_of_which_no_such_sizes_are_left_says_nothing() -> None:
    """It is still known of batches of another kind."""
    estimator, long = Estimator(), replace(structure(), positions=structure().positions[:-1])
    for size in text(60, 80, 130):
        estimator.add(size, long, law()(size))
    estimator.add({"batch": 8, "mask:1": 24}, structure(), law()({"batch": 8, "ids:1": 24}))
    key = tuple(sorted(text(90)[0].items()))
    assert nearer(estimator.observed.sizes, structure(), key) == [long]
    assert nearer(estimator.observed.sizes, long, key) == []


@pytest.mark.parametrize("asked", [1, 20_000])
def test_far_outside_the_range_nothing_is_trusted(asked: int) -> None:
    """However well the fit does inside it."""
    estimator = learnt(text(40, 64, 80, 100, 120), law())
    assert not predicted(estimator, text(asked)[0]).trusted


@pytest.mark.parametrize(("nearly", "asked"), [((128, 126, 124, 121), 43), ((100, 101, 103, 106), 240)])
def test_lengths_that_are_nearly_the_same_say_little_of_others(nearly: tuple[int, ...], asked: int) -> None:
    """As where the longest come first: four of them lie on a line, whatever grows with their square."""
    values, size = law(degree=2), text(asked)[0]
    few = predicted(learnt(text(*nearly), values), size)
    assert not few.trusted
    assert predicted(learnt(text(*nearly), values), text(nearly[1] + 1)[0]).trusted
    more = predicted(learnt(text(*nearly, (nearly[0] + asked) // 2), values), size)
    assert more.trusted
    np.testing.assert_allclose(more.values, values(size), rtol=1e-6)


@pytest.mark.parametrize(("batches", "asked"), [((4, 8, 15, 12, 6), 16), ((16, 24, 32), 15)])
def test_beyond_where_kernels_change_nothing_is_trusted(batches: tuple[int, ...], asked: int) -> None:
    """Until a size of the other side was measured, however well the others are described."""
    measured = [{"batch": batch, "ids:1": 8} for batch in batches]
    size = {"batch": asked, "ids:1": 8}
    assert learnt(measured, law()).predict(size).trusted  # type: ignore[union-attr]
    estimator = learnt(measured, law(), Estimator(turns={"batch": (2, 16)}))
    assert estimator.predict(size).trusted is False  # type: ignore[union-attr]
    assert estimator.predict({**size, "batch": sorted(batches)[1]}).trusted  # type: ignore[union-attr]
    estimator.add(size, structure(), law()(size))
    other = {**size, "batch": asked + (1 if asked > 15 else -1)}
    assert estimator.predict(other).trusted  # type: ignore[union-attr]


@pytest.mark.parametrize("few", [2, 3])
def test_sizes_on_both_sides_of_where_kernels_change_are_described_apart(few: int) -> None:
    """What is right for one side is no formula for both; of a side with few sizes, these alone are known."""
    small, large = law(1), law(2)
    lengths = (40, 64, 80, 100, 120)
    sizes = [*text(*lengths[:few], batch=1), *text(*lengths, batch=4), *text(*lengths, batch=9)]

    def values(size: Size) -> NDArray[np.float64]:
        return small(size) if size["batch"] < 2 else large(size)

    (asked,), (single,) = text(90, batch=6), text(90, batch=1)
    assert not predicted(learnt(sizes, values), asked).trusted
    estimator = learnt(sizes, values, Estimator(turns={"batch": (2,)}))
    found = predicted(estimator, asked)
    assert found.trusted
    np.testing.assert_allclose(found.values, large(asked), rtol=1e-6)
    assert predicted(estimator, sizes[0]).trusted
    assert not predicted(estimator, single).trusted


def test_a_dimension_that_never_varied_is_not_extrapolated() -> None:
    """Only batches of 8 were seen: what of one with 16?"""
    estimator = learnt(text(40, 64, 80, 100, 120), law())
    other = estimator.predict(text(64, batch=16)[0])
    assert other is None or not other.trusted


def test_a_batch_with_other_dimensions_is_not_predicted() -> None:
    """A batch that brings one more tensor is another kind of step."""
    estimator = learnt(text(40, 64, 80, 100, 120), law())
    other = estimator.predict({**text(64)[0], "more:1": 3})
    assert other is None or not other.trusted


def noisy(share: float) -> Law:
    """A law that holds up to some share."""

    def values(size: Size) -> NDArray[np.float64]:
        generator = np.random.default_rng(size["ids:1"])
        return law()(size) * generator.uniform(1 - share, 1 + share, structure().columns)

    return values


def test_large_residuals_are_not_trusted() -> None:
    """Kernels that change from size to size by a third: run sheltered."""
    estimator = learnt(text(*range(20, 200, 20)), noisy(0.5))
    assert not predicted(estimator, text(91)[0]).trusted


def test_small_residuals_are_trusted_late_and_reported() -> None:
    """Parts of a percent: not from few sizes, and the error is told, so that it can be kept free."""
    sizes = text(*range(20, 200, 15))
    assert not predicted(learnt(sizes[:4], noisy(0.001)), text(57)[0]).trusted
    prediction = predicted(learnt(sizes, noisy(0.001)), text(91)[0])
    assert prediction.trusted
    assert 0.0 < prediction.error < 0.05


def test_larger_residuals_are_trusted_after_twice_as_many_sizes() -> None:
    """Up to a tenth: sizes that stay sheltered for ever cost more than what is kept free."""
    asked, sizes = text(50)[0], text(*range(20, 104, 7))
    early, late = (predicted(learnt(sizes[:count], noisy(0.02)), asked) for count in (9, 12))
    assert 0.05 < min(early.error, late.error) < max(early.error, late.error) < 0.1
    assert (early.trusted, late.trusted) == (False, True)
    assert not predicted(learnt(sizes, noisy(0.022)), asked).trusted  # by more


@pytest.mark.parametrize("seed", range(8))
def test_sizes_that_all_are_multiples_say_nothing_of_how_others_are_rounded(seed: int) -> None:
    """Kernels that differ a little made a pyramid look as good as a line, and what lay between two steps was absurd."""
    exact, generator = law(seed, degree=1), np.random.default_rng(seed)
    estimator = Estimator()
    for size in text(500, 700, 900, 1200, 800):
        estimator.add(size, structure(), exact(size) * generator.uniform(0.99, 1.01, structure().columns))
    for n in (510, 633, 750, 1001):
        (size,) = text(n)
        prediction = predicted(estimator, size)
        if prediction.trusted:
            total = exact(size).sum()
            assert abs(prediction.values.sum() - total) < 0.05 * total


@pytest.mark.parametrize("seed", range(3))
def test_lengths_that_strides_without_padding_shorten(seed: int) -> None:
    """Two convolutions and attention: also where the highest moment is another one in longer sequences."""
    draw, chance = np.random.default_rng(seed).integers(100, 1000, (4, structure().columns)) * 4.0, random.Random(seed)

    def exact(size: Size) -> NDArray[np.float64]:
        left = ((size["ids:1"] - 3) // 2 - 2) // 2 + 1
        held: NDArray[np.float64] = draw[1] * size["ids:1"] + draw[2] * left + draw[3] * left**2 / 8
        return draw[0] + size["batch"] * held

    sizes = text(*(chance.randrange(100, 400) for _ in range(24)))
    estimator = learnt(sizes, exact)
    for length in (103, 209, 355):
        (size,) = text(length)
        prediction = predicted(estimator, size)
        assert prediction.trusted
        assert prediction.values.sum() == pytest.approx(exact(size).sum(), rel=0.002)


@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_that_are_padded_to_whole_blocks(block: int, seed: int) -> None:
    """Attention in windows: while all lengths were whole blocks nothing is said of others, and soon it is known."""
    exact = law(seed)

    def padded(size: Size) -> NDArray[np.float64]:
        whole = -(-size["ids:1"] // block) * block
        return exact({**size, "ids:1": whole}) + 8 * size["batch"] * size["ids:1"]

    whole = [block * n for n in (12, 6, 8, 10)]
    estimator = learnt(text(*whole), padded)
    (between,) = text(9 * block + block // 2 + 1)
    assert not predicted(estimator, between).trusted
    for size in text(*(block * n - 3 for n in (7, 11, 9, 13, 6))):
        estimator.add(size, structure(), padded(size))
    prediction = predicted(estimator, between)
    assert prediction.trusted
    np.testing.assert_allclose(prediction.values, padded(between), rtol=1e-4)


def test_smaller_blocks_that_describe_what_was_seen_as_well_are_told() -> None:
    """Of sizes that they would round otherwise, and until a step of one of those came out as predicted."""
    exact = law(0, 1)

    def padded(size: Size) -> NDArray[np.float64]:
        return exact({**size, "ids:1": -(-size["ids:1"] // 16) * 16}) + 8 * size["batch"] * size["ids:1"]

    estimator = learnt(text(52, 20, 64, 32, 18, 24), padded)
    alike, otherwise = text(58, 40)
    assert not predicted(estimator, alike).torn
    found = predicted(estimator, otherwise)
    assert found.torn.keys() == {("ids:1", 32, 16)}
    assert found.values.sum() > padded(otherwise).sum()
    (values,) = found.torn.values()
    np.testing.assert_allclose(values, padded(otherwise), rtol=1e-6)
    estimator.trust.decide(found.torn)
    assert not predicted(estimator, otherwise).torn
    settled = learnt([*text(52, 20, 64, 32, 18, 24), otherwise], padded)
    for size in text(44, 58, 12):
        assert not predicted(settled, size).torn


@pytest.mark.parametrize("block", [16, 64])
def test_whole_blocks_of_one_of_two_lengths_say_nothing_of_others(block: int) -> None:
    """Texts are padded where they have to be, which is another shape; and their translations are of any length."""
    exact = law(0, 1)
    sizes = [
        {"batch": 4, "ids:1": block * n, "labels:1": labels}
        for n, labels in ((2, 11), (5, 30), (3, 18), (4, 9), (6, 25), (2, 33), (5, 14))
    ]
    estimator = learnt(sizes, exact)
    assert predicted(estimator, {"batch": 4, "ids:1": 3 * block, "labels:1": 21}).trusted
    assert not predicted(estimator, {"batch": 4, "ids:1": 3 * block + 4, "labels:1": 21}).trusted


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("padded", ["ids:1", "labels:1"])
@pytest.mark.parametrize("batches", [(4,), (4, 4, 6, 2)])
def test_one_of_two_lengths_may_be_padded_to_whole_blocks(block: int, padded: str, batches: tuple[int, ...]) -> None:
    """An encoder with attention in windows, beside a decoder: known after a few more sizes, whichever is padded."""
    generator, columns = np.random.default_rng(block), structure().columns
    factors = generator.uniform(1, 4, (7, columns)) * np.array([64, 32, 32, 48, 0.2, 0.1, 0.1])[:, None]
    (other,) = {"ids:1", "labels:1"} - {padded}

    def exact(size: Size) -> NDArray[np.float64]:
        free, length = size[other], size[padded]
        whole = -(-length // block) * block
        values: NDArray[np.float64] = (
            np.array([1.0, length, whole, free, free**2, free * length, free * whole]) @ factors
        )
        return 1024 * factors[0] + size["batch"] * values

    def size(number: int) -> Size:
        lengths = {padded: int(generator.integers(10, 5 * block)), other: int(generator.integers(8, 90))}
        return {"batch": batches[number % len(batches)], "ids:1": lengths["ids:1"], "labels:1": lengths["labels:1"]}

    seen = [each for each in map(size, range(24)) if each[padded] % block][:20]
    estimator = learnt(seen, exact)
    longest = max(each[other] for each in seen)
    # The other one may be padded as well, to blocks that are larger than what was seen.
    assert not predicted(estimator, {**seen[0], other: longest + 1}).trusted
    for asked in map(size, range(12)):
        prediction = predicted(estimator, asked)
        assert prediction.trusted or asked[other] > longest
        np.testing.assert_allclose(prediction.values, exact(asked), rtol=1e-4)


def test_square_images_that_all_are_multiples_say_nothing_of_others() -> None:
    """Neither do a few others, whichever way those were rounded."""

    def square(*sides: int) -> list[Size]:
        return [{"batch": 2, "ids:1": side * side, "image:2": side, "image:3": side} for side in sides]

    estimator = learnt(square(112, 32, 64, 80, 48, 96, 72, 56), law(degree=1))
    assert predicted(estimator, square(128)[0]).trusted
    assert not predicted(estimator, square(100)[0]).trusted


def test_predictions_are_never_negative() -> None:
    """Not even where a fit would be."""
    estimator = learnt(text(100, 120, 140, 160, 180), noisy(0.004))
    for asked in (1, 10, 50, 300, 1000):
        assert (predicted(estimator, text(asked)[0]).values >= 0).all()


def test_memory_is_bounded_and_the_range_is_kept() -> None:
    """A thousand sizes: the extremes of every dimension stay known."""
    sizes = [{"batch": 2 + i % 7, "ids:1": 16 + (i * 37) % 900} for i in range(300)]
    estimator = learnt([{"batch": 1, "ids:1": 500}, {"batch": 4, "ids:1": 4000}, *sizes], law())
    assert len(estimator) <= 48
    assert predicted(estimator, {"batch": 4, "ids:1": 4000}).error == 0.0


def test_after_the_model_changed_the_latest_structure_is_predicted() -> None:
    """A layer was unfrozen, say: other calls, other columns."""
    estimator = learnt(text(24, 40, 64, 80, 100), law())
    other = real(3)
    estimator.add(text(32)[0], other.structure, other.values)
    assert predicted(estimator, text(32)[0]).structure == other.structure
    later = estimator.predict(text(50)[0])
    assert later is None or not later.trusted or later.structure == other.structure


def test_a_kind_of_batch_that_makes_fewer_calls_is_learnt_for_itself() -> None:
    """A text without images: no shortened form of the other, for it has other dimensions."""
    estimator, longer, values = Estimator(), real(3), law()
    for number, length in enumerate((24, 40, 64, 80, 100, 32, 56, 72, 90, 48)):
        size = text(length)[0]
        if number % 2:
            estimator.add({**size, "pixels:1": 9}, longer.structure, longer.values * length)
        else:
            estimator.add(size, structure(), values(size))
    found = predicted(estimator, text(70)[0])
    assert found.trusted
    assert found.values == pytest.approx(values(text(70)[0]))
    assert predicted(estimator, {**text(70)[0], "pixels:1": 9}).structure == longer.structure
    assert not estimator.observed.varies


def test_a_size_known_from_before_and_after_a_change_is_predicted_as_it_is_now() -> None:
    """An exact repeat of the old model's size is no repeat."""
    estimator = learnt(text(24, 40, 64, 80, 100), law())
    other = real(3)
    estimator.add(text(64)[0], other.structure, other.values)
    assert predicted(estimator, text(64)[0]).structure == other.structure


def test_what_was_learnt_survives_json() -> None:
    """Another estimator predicts the same after loading, and goes on learning the same structure."""
    estimator = learnt(text(24, 40, 64, 80, 100), law())
    state = json.loads(json.dumps(estimator.state_dict()))
    other = Estimator()
    other.load_state_dict(state)
    assert len(other) == 5
    for asked in (24, 50, 400):
        one, two = predicted(estimator, text(asked)[0]), predicted(other, text(asked)[0])
        assert one.structure == two.structure
        assert (one.values == two.values).all()
        assert (one.error, one.trusted) == (two.error, two.trusted)
    other.add(text(24)[0], structure(), law()(text(24)[0]))
    assert len(other) == 5


def test_the_rate_of_recomputation_is_the_measured_one() -> None:
    """Seconds per operation over all regions measured; a guess, but positive, before."""
    assert Estimator().seconds_per_operation() > 0
    estimator = Estimator()
    values = real().values.copy()
    for call in structure().calls:
        values[[call.flops, call.besides]] = (4e8, 6e8) if call.region else (1.0, 1.0)
    regions = sum(call.region for call in structure().calls)
    estimator.add(text(8)[0], structure(), values, seconds=2.0 * regions)
    assert estimator.seconds_per_operation() == pytest.approx(2e-9)


def test_what_measuring_takes_is_no_part_of_the_rate() -> None:
    """A small batch's operations take longer beside a meter, each: the largest batch decides."""
    estimator, regions = Estimator(), sum(call.region for call in structure().calls)
    for size, seconds, operations in (text(2)[0], 1.1, 1e8), (text(8)[0], 2.0, 1e9), (text(16)[0], 5.0, 2e9):
        values = real().values.copy()
        for call in structure().calls:
            values[[call.flops, call.besides]] = (operations, 0.0)
        estimator.add(size, structure(), values, seconds=regions * seconds)
    assert estimator.seconds_per_operation() == pytest.approx(2.5e-9)


def test_batches_of_one_batch_size_are_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit of all sizes is then that of the batch size too."""
    fits: list[int] = []

    def counted(*given: Any) -> Any:
        fits.append(len(given[0]))
        return best_fit(*given)

    monkeypatch.setattr("lightning_mimose.predict.fits.best_fit", counted)
    estimator = learnt(text(16, 24, 40), law())
    for size in text(20, 30, 4000):  # the last is trusted by no fit, so all are asked
        predicted(estimator, size)
    assert fits == [3]


def test_after_a_wrong_prediction_one_size_alone_is_trusted_when_it_was_measured_again() -> None:
    """Two more sizes are asked for, which a run that has but one left never brings; what was known stays doubted."""
    values = law()
    sizes = [{"batch": 4, "ids:1": n} for n in (8, 16, 24, 32, 40, 48)]
    estimator = learnt(sizes, values)
    assert predicted(estimator, sizes[0]).trusted
    estimator.distrust()
    assert not predicted(estimator, sizes[0]).trusted
    estimator.add(sizes[0], structure(), values(sizes[0]))
    assert predicted(estimator, sizes[0]).trusted
    assert not predicted(estimator, sizes[1]).trusted
    assert not predicted(estimator, {"batch": 4, "ids:1": 20}).trusted
    estimator.distrust()
    assert not predicted(estimator, sizes[0]).trusted


def test_batches_with_other_dimensions_are_fitted_apart() -> None:
    """A mask that not every batch has, another task's input: the step makes the same calls."""
    plain, masked, other = law(), law(1), law(2)
    estimator = Estimator()
    for n in (8, 16, 24, 40, 48):
        size = {"batch": 4, "ids:1": n}
        for dims, values in ((size, plain), ({**size, "mask:1": n}, masked), ({"batch": 4, "image:1": n}, other)):
            estimator.add(dims, structure(), values(size))
    size = {"batch": 4, "ids:1": 32}
    for dims, values in ((size, plain), ({**size, "mask:1": 32}, masked), ({"batch": 4, "image:1": 32}, other)):
        found = predicted(estimator, dims)
        assert found.trusted
        np.testing.assert_allclose(found.values, values(size), rtol=1e-6)
    relations = learnt([{"x:1": n, "y:1": n, "batch": 2} for n in (3, 5)], lambda _: plain(size)).relations
    assert [relation.name for relation in relations] == ["y:1"]


def test_a_kind_of_batch_that_comes_late_is_learnt() -> None:
    """Though as many sizes as are kept are there of another kind."""
    values = law()
    estimator = learnt([{"batch": 4, "ids:1": n} for n in range(20, 90)], values)
    for n in (8, 16, 24, 40, 48):
        estimator.add({"batch": 4, "image:1": n}, structure(), values({"batch": 4, "ids:1": n}))
    assert len(estimator) == 48
    assert predicted(estimator, {"batch": 4, "image:1": 32}).trusted
    assert predicted(estimator, {"batch": 4, "ids:1": 19}).trusted


def test_sizes_with_a_small_side_have_a_fit_of_their_own() -> None:
    """However many they are: they are measured until it does, and would be for ever otherwise."""

    def values(size: Size) -> NDArray[np.float64]:
        height, width = size["image:2"], size["image:3"]
        return real().values * (height * width + (20_000 if height <= 16 else 0))

    wide = [(64, 32), (96, 48), (48, 64), (80, 96), (128, 40), (112, 128), (72, 56)]
    low = [(16, 24 + 7 * i) for i in range(6)]
    known = [{"batch": 8, "image:2": height, "image:3": width} for height, width in (*wide, *low)]
    estimator = learnt(known, values)
    for height, width in ((64, 64), (16, 80), (16, 44)):
        size = {"batch": 8, "image:2": height, "image:3": width}
        prediction = estimator.predict(size)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, values(size), rtol=1e-6)
    unknown = estimator.predict({"batch": 8, "image:2": 12, "image:3": 64})
    assert unknown is None or not unknown.trusted
    assert estimator.relations == ()


@pytest.mark.parametrize("batches", [(2,), (1, 2, 3)], ids=["one batch size", "several"])
def test_texts_in_rows_of_several(batches: tuple[int, ...]) -> None:
    """Answers to choose from: how many there are is a batch size to attention, which goes with the square of a length.

    Two sides of one tensor are no sides of an image then.
    """
    generator = np.random.default_rng(3)
    draw = generator.integers(1, 1000, (4, structure().columns)) * 4

    def values(size: Size) -> NDArray[np.float64]:
        rows, n = size["batch"] * size["ids:1"], size["ids:2"]
        found = draw[0] + size["batch"] * draw[1] + rows * (draw[1] + draw[2] * n + draw[3] * n**2)
        return found.astype(np.float64)

    seen = [
        {"batch": batch, "ids:1": count, "ids:2": length}
        for batch in batches
        for count, length in [(4, 64), (2, 20), (3, 28), (2, 48), (4, 36), (3, 52), (2, 60), (4, 24)]
    ]
    estimator = learnt(seen, values)
    for count, length in [(3, 44), (4, 16), (2, 32)]:
        size = {"batch": batches[-1], "ids:1": count, "ids:2": length}
        prediction = predicted(estimator, size)
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, values(size), rtol=1e-6)


def test_a_square_that_hardly_shows_is_not_left_out_where_all_others_tell_of_it() -> None:
    """Without it sizes are missed by less than is good, and shorter texts by more."""
    generator = np.random.default_rng(5)
    draw = generator.integers(1, 1000, (4, structure().columns)) * 4.0

    def values(size: Size) -> NDArray[np.float64]:
        batch, n = size["batch"], size["ids:1"]
        found: NDArray[np.float64] = 400 * draw[0] + batch * (100 * draw[1] + 20 * draw[2] * n + 0.05 * draw[3] * n**2)
        return found

    seen = [
        {"batch": batch, "ids:1": length}
        for batch, length in [(12, 24), (7, 24), (12, 12), (9, 24), (11, 24), (5, 24), (7, 12), (4, 20)]
    ]
    estimator = learnt(seen, values)
    for batch, length in [(8, 24), (10, 12), (4, 8), (9, 8)]:
        size = {"batch": batch, "ids:1": length}
        prediction = predicted(estimator, size)
        if prediction.trusted:
            np.testing.assert_allclose(prediction.values, values(size), rtol=2e-3)
    assert predicted(estimator, {"batch": 8, "ids:1": 24}).trusted


@pytest.mark.parametrize("power", [1, 2])
def test_a_dimension_of_two_values_hides_no_square_of_another(power: int) -> None:
    """One image or three beside attention over a text: the two tell their square, and nothing of what is between."""
    draw = np.random.default_rng(0).integers(0, 1000, (5, structure().columns)) * 4.0

    def values(size: Size) -> NDArray[np.float64]:
        batch, n, images = size["batch"], size["ids:1"], size["img:1"]
        found: NDArray[np.float64] = draw[0] + batch * (
            draw[1] + draw[2] * n + draw[3] * n**2 + draw[4] * images**power
        )
        return found

    chance = random.Random(0)
    sizes = [
        {"batch": chance.randint(1, 4), "ids:1": chance.randint(16, 128), "img:1": chance.choice((1, 3))}
        for _ in range(30)
    ]
    estimator = learnt(sizes, values)
    for length in (20, 64, 101):
        for images in (1, 3):
            size = {"batch": 3, "ids:1": length, "img:1": images}
            found = predicted(estimator, size)
            assert found.trusted
            peaks = [structure().summary(each[None])[0, :2] for each in (found.values, values(size))]
            assert np.allclose(*peaks, rtol=1e-6 if power == 1 else 5e-3)
        assert not predicted(estimator, {"batch": 3, "ids:1": length, "img:1": 2}).trusted
