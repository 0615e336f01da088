"""Fits that take long come late, and then are what they would have been at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from lightning_mimose.measure.observe import Observation, observe
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.fit import Fit
from lightning_mimose.predict.fits import HOPELESS_ERROR, MAY_BE_LATE, Fits
from lightning_mimose.predict.fitting import best_fit
from lightning_mimose.predict.maxima import Measured
from lightning_mimose.predict.paths import Key
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded

SIDES = (64, 24, 96, 48, 80, 16, 72, 40, 56)
Known = dict[Key, Measured]


@cache
def real() -> Observation:
    """A real step's structure, whose values the tests replace."""
    return observe(recorded(TinyText(), text_batch(2, 16)), 0)


def images(sides: Sequence[int], *, lawful: bool = False) -> Known:
    """Whose kernels follow no law, or one."""
    found: Known = {}
    for side in sides:
        luck = 1.0 if lawful else 1 + np.random.default_rng(side).random()
        found[("batch", 8), ("side", side)] = Measured(real().values * side**2 * luck)
    return found


class Asked:
    """Fits that are asked for as training does, size by size."""

    def __init__(self, *, lawful: bool = False) -> None:
        self.fits, self.lawful = Fits(), lawful
        self.fits.hurries = True

    def of(self, count: int) -> Fit:
        """That of so many sizes."""
        found = self.fits.of(real().structure, None, images(SIDES[:count], lawful=self.lawful), 0)
        assert found is not None
        return found

    def measured(self) -> None:
        """One more size was."""
        self.fits.measured([real().structure])


def at_once(count: int) -> Fit:
    """What nobody waits for."""
    known = images(SIDES[:count])
    return best_fit([dict(key) for key in known], list(known.values()), real().structure, 0)


def same(one: Fit, other: Fit) -> bool:
    """Whether they say the same."""
    dims = {"batch": 8, "side": 88}
    return one.error == other.error and bool((one.values_at(dims) == other.values_at(dims)).all())


def arrives(fits: Fits) -> bool:
    """Whether a late one comes."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if fits.settle():
            return True
        time.sleep(0.01)
    return False


def upto(count: int) -> Asked:
    """Asked for each number of sizes up to one."""
    asked = Asked()
    for number in range(1, count + 1):
        asked.of(number)
        if number < count:
            asked.measured()
    return asked


def test_training_goes_on_with_the_one_before() -> None:
    """Until the late one is taken in, which is what it would have been at once."""
    asked = upto(MAY_BE_LATE - 1)
    before = asked.of(MAY_BE_LATE - 1)
    assert before.error > HOPELESS_ERROR
    asked.measured()
    assert asked.of(MAY_BE_LATE) is before
    assert arrives(asked.fits)
    assert same(asked.of(MAY_BE_LATE), at_once(MAY_BE_LATE))
    assert not asked.fits.settle()


def test_one_that_came_after_the_next_size() -> None:
    """It is the one before of the next, which is asked for then."""
    asked = upto(MAY_BE_LATE)
    asked.measured()
    asked.of(MAY_BE_LATE + 1)
    assert arrives(asked.fits)
    assert same(asked.of(MAY_BE_LATE + 1), at_once(MAY_BE_LATE))
    assert arrives(asked.fits)
    assert same(asked.of(MAY_BE_LATE + 1), at_once(MAY_BE_LATE + 1))


def test_one_that_comes_after_a_newer_one() -> None:
    """It does not take its place."""
    asked = upto(MAY_BE_LATE)
    asked.measured()
    with asked.fits.at_leisure():
        newer = asked.of(MAY_BE_LATE + 1)
    asked.measured()
    time.sleep(0.3)  # by then it has come, and otherwise this tests nothing
    asked.fits.settle()
    assert asked.of(MAY_BE_LATE + 2) is newer


def test_who_does_not_hurry_is_told_by_all_that_was_measured() -> None:
    """And training learns of it: its plans were made by what stood in."""
    asked = upto(MAY_BE_LATE)
    assert asked.fits.is_late
    with asked.fits.at_leisure():
        assert same(asked.of(MAY_BE_LATE), at_once(MAY_BE_LATE))
    assert not asked.fits.is_late
    assert asked.fits.settle()
    assert same(asked.of(MAY_BE_LATE), at_once(MAY_BE_LATE))


def test_copies_have_no_stand_ins() -> None:
    """What is being made is not copied; it is begun anew."""
    other = copy.deepcopy(upto(MAY_BE_LATE))
    other.of(MAY_BE_LATE)
    assert arrives(other.fits)
    assert same(other.of(MAY_BE_LATE), at_once(MAY_BE_LATE))


def test_a_fit_that_fails_fails_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a thread, where nobody sees it."""
    asked = upto(MAY_BE_LATE - 1)
    asked.measured()

    def fails(*_: object) -> Fit:
        raise ValueError("no fit")

    monkeypatch.setattr("lightning_mimose.predict.fits.best_fit", fails)
    until = time.monotonic() + 30
    with pytest.raises(ValueError, match="no fit"):
        while time.monotonic() < until:
            asked.of(MAY_BE_LATE)
            asked.fits.settle()


def test_good_fits_are_never_late() -> None:
    """Nor any of the first few sizes: plans begin as early as they would."""
    asked = Asked(lawful=True)
    for number in range(1, len(SIDES) + 1):
        assert asked.of(number).sizes == number
        asked.measured()
    assert not asked.fits.settle()


@pytest.mark.parametrize("count", range(1, MAY_BE_LATE))
def test_few_sizes_are_never_late(count: int) -> None:
    """Whatever they are."""
    assert same(upto(count).of(count), at_once(count))


def test_nothing_is_remembered_of_batches_of_which_nothing_is_known() -> None:
    """Packed batches may have another number of rows in every step of a long training."""
    observation = observe(recorded(TinyText(), text_batch(2, 8)), 0)
    estimator = Estimator()
    for rows in (2, 3, 5, 8, 13):
        estimator.add({"batch": rows, "ids:1": 8}, observation.structure, rows * observation.values)
    for rows in range(1, 300):
        estimator.predict({"batch": rows, "ids:1": 8})
    assert len(estimator.fits._fits) <= 6
