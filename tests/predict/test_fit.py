"""The fit of every column, and what is predicted of sizes left out."""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import LinearRegression

from lightning_mimose.measure.observe import observe
from lightning_mimose.predict.fit import _left_out, _solve
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


def test_bounded_coefficients_are_those_of_scikit_learn() -> None:
    """Where a free fit would take from larger sizes; columns that are equal are solved once."""
    random = np.random.default_rng(0)
    design = random.random((8, 3))
    values = design @ np.array([[3.0, 2.0], [1e-7, 4.0], [-1e-6, 1.0]]) * 1e6
    values = np.concatenate([values, values, values[:, :1]], axis=1)
    expected = LinearRegression(fit_intercept=False, positive=True).fit(design, values).coef_.T
    assert np.array_equal(_solve(design, values)[:, [0, 2, 4]], expected[:, [0, 2, 4]])


def test_one_fit_tells_what_fits_without_each_size_would_say() -> None:
    """Sizes that a basis cannot tell apart are left out together; an undetermined rest is left unchecked."""
    structure = observe(recorded(TinyText(2), text_batch(2, 8)), 0).structure
    generator = np.random.default_rng(0)
    lengths = [1.0, 2.0, 2.0, 3.0, 5.0, 8.0]
    design = np.array([[1.0, n, n * n] for n in lengths])
    values = generator.uniform(1e6, 1e9, (len(lengths), structure.columns))
    check = _left_out(design, values, structure.summary(values), structure, 0, rounds=False)
    assert sorted(check.checked) == list(range(len(lengths)))
    for row, found in zip(check.checked, check.predicted, strict=True):
        rest = [i for i, n in enumerate(lengths) if n != lengths[row]]
        alone = design[row] @ np.linalg.lstsq(design[rest], values[rest], rcond=None)[0]
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-3)
    assert _left_out(design[:4], values[:4], structure.summary(values[:4]), structure, 0, rounds=False).error == float(
        "inf"
    )
