"""Least squares in many bases at once."""

from __future__ import annotations

import numpy as np

from lightning_mimose.predict.solving import all_solved
from lightning_mimose.predict.tilings import Surfaces, tilings

SIDES = ("height", "width")
RANDOM = np.random.default_rng(0)
SIZES = [{"height": int(h), "width": int(w)} for h, w in RANDOM.integers(20, 300, (14, 2))]


def test_what_a_basis_describes_is_what_it_misses_nowhere() -> None:
    """Also of a column that is right at the first size alone."""
    first, *_ = tilings(SIDES, None)
    solved = all_solved(first, Surfaces(SIZES))
    exact = solved[3].design @ np.array([[5.0], [2.0]])
    almost = exact + np.eye(len(SIZES))[:, -1:]
    targets = np.concatenate([exact, almost, RANDOM.random((len(SIZES), 5))], axis=1)
    close = np.full(targets.shape[1], 1e-6)
    for each in solved:
        missed = np.abs(each.residuals(targets)).max(axis=0)
        assert each.describes(targets, close).tolist() == (missed <= close).tolist()
    assert solved[3].describes(targets, close)[:2].tolist() == [True, False]


def test_no_bases_and_too_few_sizes_give_none() -> None:
    """Two more sizes than features have to be there."""
    first, *_ = tilings(SIDES, None)
    assert all_solved([], Surfaces(SIZES)) == []
    assert all_solved(first, Surfaces(SIZES[:3])) == []
    assert all_solved(first, Surfaces(SIZES[:4]))
