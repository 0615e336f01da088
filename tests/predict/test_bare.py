"""A first step that found no gradients: what it took is believed until others contradict it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_mimose.predict.estimator import Estimator
from tests.predict.test_estimator import Size, law, structure, text

FIRST = text(64)[0]


def more(size: Size) -> NDArray[np.float64]:
    """What steps take that find gradients: something is alive in all of it besides."""
    return law(1)(size) + 4e6


def learnt(*lengths: int, first: bool = True) -> Estimator:
    """One that has seen a first step, which took less, and others."""
    estimator = Estimator()
    if first:
        estimator.add(FIRST, structure(), law(1)(FIRST), bare=True)
    for size in text(*lengths):
        estimator.add(size, structure(), more(size))
    return estimator


def test_it_is_believed_as_long_as_nothing_else_is_known() -> None:
    """A training whose batches are of one size or two is planned by it."""
    for estimator in (learnt(), learnt(40)):
        prediction = estimator.predict(FIRST)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_array_equal(prediction.values, law(1)(FIRST))


@pytest.mark.parametrize("loaded", [False, True])
def test_others_contradict_it(loaded: bool) -> None:
    """From then on its size is predicted by them, and theirs are not spoilt by it."""
    lengths = 12, 28, 44, 52, 80
    estimator = learnt(*lengths[:2])
    if loaded:
        saved = json.loads(json.dumps(estimator.state_dict()))
        estimator = Estimator()
        estimator.load_state_dict(saved)
    for size in text(*lengths[2:]):
        estimator.add(size, structure(), more(size))
    for size in text(64, 36):
        prediction = estimator.predict(size)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, more(size), rtol=1e-6)


def test_it_is_measured_again() -> None:
    """Then it is a step like others, and that it was another tells nothing about how they scatter."""
    estimator = learnt(40)
    estimator.add(FIRST, structure(), more(FIRST))
    prediction = estimator.predict(FIRST)
    assert prediction is not None
    assert prediction.trusted
    assert prediction.error == 0
    np.testing.assert_array_equal(prediction.values, more(FIRST))
    assert not estimator.disbelieve(FIRST.items())


def test_one_that_took_no_less_is_not_contradicted() -> None:
    """Kernels may need more for its size than others tell; nothing of that is left at its end."""
    estimator, first = Estimator(), more(FIRST)
    left = structure().positions[-1].column
    first[np.arange(len(first)) != left] += 4e6
    estimator.add(FIRST, structure(), first, bare=True)
    for size in text(12, 28, 44, 52, 80):
        estimator.add(size, structure(), more(size))
    assert estimator.disbelieve(FIRST.items())


def test_steps_that_often_find_no_gradients_are_no_exceptions() -> None:
    """A loop that frees them when a step is over."""
    estimator = learnt(40)
    estimator.add(text(12)[0], structure(), more(text(12)[0]), bare=True)
    prediction = estimator.predict(FIRST)
    assert prediction is not None
    assert prediction.trusted
    assert not estimator.disbelieve(FIRST.items())


def test_nothing_is_left_of_what_is_not_believed() -> None:
    """Where it was all that was known, nothing is."""
    estimator = learnt()
    assert estimator.disbelieve(FIRST.items())
    assert estimator.predict(FIRST) is None
    assert not estimator.relations
    assert len(estimator) == 0
    assert estimator.seconds_per_operation() > 0


def test_what_the_very_first_step_made_for_good_is_no_part_of_others() -> None:
    """The state of optimizers that update within backward, where no step finds gradients of an earlier one."""
    first, estimator = law(1)(FIRST), Estimator()
    first[[call.working for call in structure().calls if call.region]] += 4e7
    estimator.add(FIRST, structure(), first, bare=True)
    for size in text(28, 44, 52, 80, 36):
        estimator.add(size, structure(), law(1)(size), bare=True)
    for size in text(40, 64):
        prediction = estimator.predict(size)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, law(1)(size), rtol=1e-6)


def throughout(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A step in all of which something is there besides."""
    levels = [position.column for position in structure().positions]
    starts = [call.before_backward for call in structure().calls if call.region]
    values[[*levels, *starts]] += 4e6
    return values


@pytest.mark.parametrize("first", [(64,), (160,)], ids=["among the others", "the largest"])
def test_what_it_made_before_its_forward_and_keeps_is_no_part_of_others(first: tuple[int, ...]) -> None:
    """A memory of features, averages of the weights: there from the beginning to the end, and in no later step."""
    (size,), estimator = text(*first), Estimator()
    estimator.add(size, structure(), throughout(law(1)(size)), bare=True)
    for other in text(28, 44, 52, 80, 36):
        estimator.add(other, structure(), law(1)(other), bare=True)
    for other in (*text(40), size):
        prediction = estimator.predict(other)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, law(1)(other), rtol=1e-6)


def test_batches_of_any_number_contradict_it() -> None:
    """Where hardly any other is as large as the first one, it takes more of them to tell."""
    estimator = Estimator()
    estimator.add(FIRST, structure(), throughout(law(1)(FIRST)), bare=True)
    sizes = [*text(12, 28, 44, 80, batch=5), *text(20, 36, 52, 72, batch=6), *text(24, 40, 60, 84, batch=11)]
    sizes += text(16, 32, 56, 76, batch=12)
    for size in sizes:
        estimator.add(size, structure(), law(1)(size), bare=True)
    for size in (FIRST, *text(48, batch=9)):
        prediction = estimator.predict(size)
        assert prediction is not None
        assert prediction.trusted
        np.testing.assert_allclose(prediction.values, law(1)(size), rtol=1e-6)
