"""Whether it goes by the size which units a step calls."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.parting import ENOUGH_STEPS, FEWEST_STEPS, Parting
from lightning_mimose.predict.paths import Key, Path
from tests.helpers.rounds import Chunked
from tests.predict.test_folding import step

NAMES = ("batch", "ids:1")
ALL, SOME = Path(frozenset("abcd"), frozenset()), Path(frozenset("ab"), frozenset())


def key(batch: int, length: int) -> Key:
    """A size."""
    return (("batch", batch), ("ids:1", length))


def seen(limit: int, steps: int, seed: int = 0) -> Parting:
    """So many steps, of which those with longer texts than a limit call fewer units; all measured."""
    chance, parting = random.Random(seed), Parting()
    for _ in range(steps):
        size = key(chance.randint(1, 8), chance.randint(8, 64))
        units, path = (1, SOME) if size[1][1] > limit else (2, ALL)
        parting.called(size, units)
        parting.took(size, units, path)
    return parting


@given(limit=st.integers(24, 48), seed=st.integers(0, 10_000))
def test_what_goes_by_a_length_is_known(limit: int, seed: int) -> None:
    """Of each length that path which it takes is among the likely ones, and near none of the limit there is another."""
    parting = seen(limit, 80, seed)
    assert NAMES in parting.parts
    for length in range(1, 100):
        likely = parting.likely(key(3, length))
        assert (SOME if length > limit else ALL) in likely
        assert len(likely) == 1 or abs(length - limit) < 20


@given(share=st.floats(0.2, 0.8), seed=st.integers(0, 10_000))
def test_what_goes_by_chance_is_not(share: float, seed: int) -> None:
    """Not for long: two sizes in the wrong order are enough, for good."""
    chance, parting = random.Random(seed), Parting()
    for _ in range(200):
        parting.called(key(chance.randint(1, 8), chance.randint(8, 64)), int(chance.random() < share))
    assert not parting.parts


def test_hardly_ever_it_is_taken_for_what_goes_by_the_size() -> None:
    """Blocks that are left out by chance, in 4000 trainings of lengths that hardly ever come again."""
    wrong = 0
    for seed in range(4000):
        chance, parting = random.Random(seed), Parting()
        for _ in range(40):
            parting.called((("ids:1", chance.randint(8, 5000)),), int(chance.random() < 0.4))
            if parting.parts:
                wrong += 1
                break
    assert wrong <= 4


def test_a_few_steps_tell_nothing() -> None:
    """Of either side."""
    parting = Parting()
    for length in range(FEWEST_STEPS - 1):
        parting.called(key(4, length), 1)
    for length in range(2 * ENOUGH_STEPS):
        parting.called(key(4, 100 + length), 2)
    assert not parting.parts
    parting.called(key(4, FEWEST_STEPS), 1)
    assert parting.parts == {NAMES}


def test_a_path_that_was_not_measured_is_not_predicted() -> None:
    """Planned steps alone have shown that there is one."""
    parting = Parting()
    for length in range(ENOUGH_STEPS):
        size = key(4, length)
        parting.called(size, length // FEWEST_STEPS)
        if length < FEWEST_STEPS:
            parting.took(size, 0, ALL)
    assert parting.parts == set()
    for length in range(ENOUGH_STEPS, 2 * ENOUGH_STEPS):
        parting.called(key(4, length), 2)
    assert parting.parts == {NAMES}
    assert parting.likely(key(4, 2)) == {ALL}
    assert parting.likely(key(4, 9)) == parting.likely(key(4, 20)) == set()


@pytest.mark.parametrize("steps", [10, 80])
def test_what_is_loaded_goes_on(steps: int) -> None:
    """Also where it was not known yet."""
    before, after = seen(32, steps), Parting()
    after.load_state_dict(json.loads(json.dumps(before.state_dict({ALL: 0, SOME: 1}))), [ALL, SOME])
    assert after.parts == before.parts
    for length in range(8, 65):
        before.called(key(2, length), 1 if length > 32 else 2)
        after.called(key(2, length), 1 if length > 32 else 2)
        assert after.parts == before.parts
    assert after.parts
    assert all(after.likely(key(2, length)) == before.likely(key(2, length)) for length in range(80))
    after.called(key(2, 12), 1)
    again = Parting()
    again.load_state_dict(json.loads(json.dumps(after.state_dict({}))), [])
    for length in range(8, 65):
        again.called(key(2, length), 1 if length > 32 else 2)
    assert not again.parts


def test_parts_of_the_longest_path_are_learnt_for_their_sizes() -> None:
    """Those that were laid aside before, too; from a checkpoint as well."""
    estimator = Estimator()

    def size(length: int) -> dict[str, int]:
        return {"batch": 4, "ids:1": length}

    longest, part = step(Chunked, 2), step(Chunked, 1)
    for number in range(ENOUGH_STEPS):
        is_long = number % 2 == 1
        dims, units = size(40 + number if is_long else 10 + number), int(is_long)
        estimator.called(dims.items(), units)
        estimator.add(dims, *(part if is_long else longest), units=units)
    estimator.called(size(60).items(), 1)
    estimator.add(size(60), *part, units=1)
    restored = Estimator()
    restored.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    for each in (estimator, restored):
        for length, expected in ((12, longest), (41, part), (60, part)):
            found = each.predict(size(length))
            assert found is not None
            assert found.structure.path == expected[0].path
            assert found.others == ()
