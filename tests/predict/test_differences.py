"""Levels as differences from those before them."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_mimose.measure.observe import observe
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.differences import Differences
from lightning_mimose.predict.structure import Structure
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded


@pytest.fixture(scope="module")
def structure() -> Structure:
    """Of a real step."""
    return observe(recorded(TinyText(), text_batch(2, 16)), 0, grades=GRADES).structure


@pytest.mark.parametrize("odd", [0, 1, 5], ids="{} odd columns".format)
def test_sums_undo_differences(structure: Structure, odd: int) -> None:
    """Also where nothing is measured from some columns, the very first one among them."""
    chain = Differences(structure).chain
    differences = Differences(structure, set(chain[:odd].tolist()))
    values = np.random.default_rng(0).integers(0, 1000, (3, structure.columns)).astype(np.float64)
    assert np.array_equal(differences.summed(differences.of(values)), values)


def test_an_odd_column_spoils_no_other(structure: Structure) -> None:
    """An error in it stays where it is."""
    column = int(Differences(structure).chain[3])
    differences = Differences(structure, {column})
    values = np.zeros((1, structure.columns))
    found = differences.of(values)
    found[0, column] = 7.0
    beside = {
        own for shape in structure.lean for place, own in shape.positions if structure.positions[place].column == column
    }
    assert set(np.flatnonzero(differences.summed(found)[0]).tolist()) == {column, *beside}
