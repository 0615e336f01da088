"""What is added where no polynomial describes a moment: nothing that was seen is predicted too low."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.menu import GRADE_INSIDE, GRADES
from lightning_mimose.predict.assemble import assemble
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.predict.shortfalls import shortfalls
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded

LENGTHS = (32, 40, 56, 64, 88, 96, 120, 128)
BENT = 64
"""A length above which another part of a moment is the larger one."""


@pytest.fixture(scope="module")
def steps() -> list[Observation]:
    """The same step at several lengths."""
    return [observe(recorded(TinyText(3), text_batch(2, n)), 0, grades=("lean",)) for n in LENGTHS]


def timeline(observation: Observation, values: np.ndarray) -> Timeline:
    resident = Resident(0, 0, True, 0)
    return assemble(observation.structure, values, resident, rates=Rates(1e-9), minimum_share=0.0)


def test_exact_columns_get_nothing(steps: list[Observation]) -> None:
    """What follows a polynomial stays as it is."""
    sizes = [{"length": n} for n in LENGTHS]
    values = np.array([n * steps[0].values + n**2 * steps[1].values for n in LENGTHS])
    fit = best_fit(sizes, [Measured(row) for row in values], steps[0].structure, 0)
    np.testing.assert_allclose(fit.short, 0.0, atol=0.5)


def test_a_moment_with_a_bend_is_never_predicted_too_low(steps: list[Observation]) -> None:
    """One that no whole peak shows, so that the fit looks exact; a plan may have its peak there."""
    structure = steps[0].structure
    values = np.array([step.values for step in steps])
    bent = [i for i, position in enumerate(structure.positions) if position.backward][-2]
    column = structure.positions[bent].column
    for row, length in enumerate(LENGTHS):
        values[row, column] -= 0.3 * values[row, column] * (length > BENT)
    sizes = [{"length": n} for n in LENGTHS]
    fit = best_fit(sizes, [Measured(row) for row in values], structure, 0)
    assert fit.error < 1e-6, "the bend has to be in no whole peak"
    low = fit.basis.design(sizes) @ fit.coefficients
    assert (values - low)[:, column].max() > 100, "a polynomial has to miss it"
    for size, row in zip(sizes, values, strict=True):
        predicted, seen = timeline(steps[0], fit.values_at(size)), timeline(steps[0], row)
        for unit in (None, *structure.units):
            actions = {unit: "recompute"} if unit and (unit, "recompute") in seen.option_index else {}
            below = seen.level_bytes(seen.chosen(actions)) - predicted.level_bytes(predicted.chosen(actions))
            assert below.max() <= 1, (size, actions)


def test_what_a_moment_is_measured_from_counts(steps: list[Observation]) -> None:
    """Both are missed by as much in turns: a miss of one is none where the other has as much to spare."""
    structure = steps[0].structure
    call = next(c for c in structure.calls if c.region)
    missing = np.zeros((2, structure.columns))
    missing[:, call.before_backward] = -100.0, 50.0
    missing[:, call.working] = 100.0, 20.0
    assert shortfalls(structure, missing, np.zeros(2))[call.working] == 70.0
    assert shortfalls(structure, missing, np.array([0.0, 45.0]))[call.working] == 25.0, "what is left free is not added"
    assert not shortfalls(structure, missing, np.array([0.0, 75.0])).any()


def test_what_runs_again_leanly_is_measured_from_the_same() -> None:
    """Its recomputation from where its backward begins, and what is there in that from nothing."""
    structure = observe(recorded(TinyText(3), text_batch(2, 40), lean=True), 0, grades=GRADES).structure
    shape = next(each for each in structure.lean if each.action == GRADE_INSIDE)
    (_, alone), call = shape.again[-1], structure.calls[shape.call]
    missing = np.zeros((2, structure.columns))
    missing[:, call.before_backward] = -100.0, 50.0
    missing[:, shape.working] = 100.0, 20.0
    missing[:, alone] = 30.0, -10.0
    short = shortfalls(structure, missing, np.array([0.0, 5.0]))
    assert (short[shape.working], short[alone]) == (65.0, 30.0)
