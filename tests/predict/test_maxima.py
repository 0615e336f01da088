"""Columns that are the larger of several polynomials: fitted as such, exactly, where it is known which is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.checking import EXACT_ERROR
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Expansion, Groups, Maxima, Measured
from tests.helpers.recording import recorded

LENGTHS = (9, 14, 19, 26, 64)


@cache
def step(length: int) -> Observation:
    """A measured step of texts of some length: where they are long, attention takes the most."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    ids = torch.randint(1, 64, (4, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(4, dtype=torch.long)}
    return observe(recorded(BertForSequenceClassification(config), batch, lean=True), 0, grades=GRADES)


def measured(length: int) -> Measured:
    """What was measured of it."""
    return Measured(step(length).values, step(length).maxima)


def test_moments_with_a_bend_are_predicted_exactly() -> None:
    """Five sizes are enough, lean saves included, of lengths in between and of longer ones."""
    sizes = [{"length": n} for n in LENGTHS]
    structure = step(LENGTHS[0]).structure
    assert all(step(n).structure == structure for n in LENGTHS)
    plain = best_fit(sizes, [Measured(step(n).values) for n in LENGTHS], structure, 0)
    fit = best_fit(sizes, [measured(n) for n in LENGTHS], structure, 0)
    assert fit.error < EXACT_ERROR
    assert not fit.doubtful
    moments = [position.column for position in structure.positions]
    moments += [column for shape in structure.lean for _, column in shape.positions]
    missed = []
    for n in (11, 17, 23, 40, 90):
        seen = step(n).values[moments]
        np.testing.assert_allclose(fit.values_at({"length": n})[moments], seen, atol=64)
        missed.append(np.abs(plain.values_at({"length": n})[moments] - seen) / seen.clip(1))
    assert np.max(missed) > 0.01, "it has to bend"


def test_what_was_learnt_is_taken_up_again() -> None:
    """The local maxima are a part of it."""
    estimator, other = Estimator(), Estimator()
    for n in LENGTHS:
        estimator.add({"length": n}, step(n).structure, step(n).values, step(n).maxima)
    other.load_state_dict(estimator.state_dict())
    predictions = [each.predict({"length": 40}) for each in (estimator, other)]
    assert all(each is not None and each.trusted and each.error < EXACT_ERROR for each in predictions)


def test_the_largest_of_them_is_the_column() -> None:
    """Of real steps, to the byte."""
    for n in LENGTHS:
        each = step(n)
        assert len(each.maxima.columns) > 10
        ends = np.cumsum(each.maxima.lengths)
        for column in set(each.maxima.columns.tolist()):
            parts = np.flatnonzero(each.maxima.columns == column)
            tops = each.maxima.tops[ends[parts[0]] - each.maxima.lengths[parts[0]] : ends[parts[-1]]]
            assert max(0.0, tops.max()) == each.values[column]


def expanded(*sizes: Groups) -> Expansion:
    """Of sizes with one column."""
    found = [Measured(np.array([max(map(max, each))]), Maxima.of({0: each})) for each in sizes]
    return Expansion(found, expands=True)


@settings(deadline=None, max_examples=60)
@given(
    laws=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100), st.integers(0, 10)), min_size=2, max_size=6),
    asked=st.integers(4, 300),
)
def test_the_largest_of_polynomials_is_found(laws: list[tuple[int, int, int]], asked: int) -> None:
    """Inside of what was seen nothing is predicted too low, whatever is the largest in between only."""

    def tops(n: int) -> tuple[float, ...]:
        return tuple(float(a + b * n + c * n * n) for a, b, c in laws)

    seen = (4, 40, 90, 170, 300)
    expansion = expanded(*((tops(n),) for n in seen))
    assert expansion.collapsed(expansion.values)[:, 0].tolist() == [max(tops(n)) for n in seen]
    if expansion:
        design = np.vander(np.array(seen, dtype=float), 3)
        solved = np.linalg.lstsq(design, expansion.values, rcond=None)[0]
        found = expansion.collapsed(np.vander(np.array([asked], dtype=float), 3) @ solved)[0, 0]
        assert found == pytest.approx(max(tops(asked)), rel=1e-6, abs=1e-3)


BERT = LENGTHS[0]
"""Of whose step the structure is taken."""


def bent(tops: Callable[[int], tuple[float, ...]], lengths: Sequence[int]) -> tuple[Fit, int]:
    """A fit of steps in which one moment is the largest of some maxima; and that moment's column."""
    structure, flat = step(BERT).structure, step(BERT).values * 0.0
    column = next(position.column for position in reversed(structure.positions) if position.backward)
    found = []
    for n in lengths:
        values = flat + n
        values[column] = max(tops(n))
        found.append(Measured(values, Maxima.of({column: (tops(n),)})))
    return best_fit([{"length": n} for n in lengths], found, structure, 0), column


@pytest.mark.parametrize("seen", [(8, 10, 12, 15, 100, 110, 120), (20, 25, 30, 35, 40)])
def test_what_is_the_largest_in_no_size_that_was_seen(seen: tuple[int, ...]) -> None:
    """Between them, or beyond them: nothing in what was seen is bent, or says that anything is amiss."""

    def tops(n: int) -> tuple[float, ...]:
        return 100e4, (60 + n) * 1e4, 0.025e4 * n**2

    fit, column = bent(tops, seen)
    assert fit.error < EXACT_ERROR
    for n in (20, 50, 60, 70, 90, 120, 160):
        assert fit.values_at({"length": n})[column] == pytest.approx(max(tops(n)), rel=1e-6)


def test_maxima_that_change_places_are_not_followed() -> None:
    """The largest follows a polynomial, and which of two comes first does not: it stays what it is."""

    def tops(n: int) -> tuple[float, ...]:
        large, small = 1e4 * n, 0.9e4 * n + 1e4
        return (large, small) if n % 3 else (small, large)

    fit, column = bent(tops, (20, 32, 41, 57, 64, 80, 91, 102))
    for n in (25, 45, 64, 100, 200):
        assert fit.values_at({"length": n})[column] == pytest.approx(max(tops(n)), rel=1e-6)


def test_other_maxima_in_some_sizes_are_not_taken_for_each_other() -> None:
    """Of a part in which their number differs the largest is left; with other parts, nothing is known."""
    same, other = (3.0, 1.0, 2.0), (9.0, 5.0)
    assert expanded((same, (4.0,)), (other, (6.0,))).values.tolist() == [[3.0, 4.0], [9.0, 6.0]]
    assert not expanded((same, (4.0,)), (same,))
    assert not expanded((same, (4.0,)), (other, (6.0,), (1.0,)))


def test_what_stays_far_below_is_left_out() -> None:
    """What grows faster than the largest, or falls more slowly, may be that elsewhere."""
    assert expanded(((10.0, 5.0),), ((20.0, 6.0),)).values.tolist() == [[5.0, 10.0], [6.0, 20.0]]
    assert expanded(((10.0, 5.0),), ((20.0, 15.0),)).values.tolist() == [[5.0, 10.0], [15.0, 20.0]]
    assert not expanded(((10.0, 5.0),), ((20.0, 10.0),)), "it grows as fast"
    assert not expanded(((100.0, 5.0),), ((200.0, 15.0),)), "far from it"


def test_sizes_of_which_nothing_is_known_stay_as_they_were() -> None:
    """A loop that was folded, say."""
    known = Measured(np.array([4.0]), Maxima.of({0: ((4.0, 1.0),)}))
    assert not Expansion([known, Measured(np.array([8.0]))], expands=True)
    assert not Expansion([Measured(np.array([8.0]))], expands=True)
