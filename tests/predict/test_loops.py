"""Loops whose rounds go by the size are learnt as one shape; those that go by chance are not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.folding import fold
from lightning_mimose.predict.loops import paths_at, rise_with_size
from lightning_mimose.predict.paths import Key, Path
from lightning_mimose.predict.prediction import Prediction
from tests.helpers.rounds import CHUNK, Chunked, Nested, Writing
from tests.predict.test_folding import document_step, folded, step


def size(rounds: int, part: int = 0) -> dict[str, int]:
    """Of a batch whose last chunk lacks a part."""
    return {"batch": 4, "ids:1": CHUNK * rounds - part}


def learn(estimator: Estimator, steps: Iterable[int], model: type[nn.Module] = Chunked) -> Estimator:
    """Measured steps of so many rounds."""
    for rounds in steps:
        estimator.add(size(rounds), *step(model, rounds))
    return estimator


def predicted(estimator: Estimator, rounds: int, part: int = 0) -> Prediction:
    """What is predicted for some size."""
    found = estimator.predict(size(rounds, part))
    assert found is not None
    return found


def restored(estimator: Estimator) -> Estimator:
    """From a checkpoint."""
    other = Estimator()
    other.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    return other


def test_what_is_loaded_goes_on_after_a_shorter_batch() -> None:
    """Folded as it is, it says nothing of how often units were called: a last batch of few rows contradicts nothing."""
    estimator = restored(learn(Estimator(), (5, 9, 3, 7, 4, 8, 10)))
    for rounds, rows in ((7, 2), (12, 4), (5, 2)):
        estimator.add({**size(rounds), "batch": rows}, *step(Chunked, rounds))
    assert predicted(estimator, 6).structure == folded(Chunked, 6).structure
    assert len(estimator) > 7


@pytest.mark.parametrize("model", [Chunked, Writing])
def test_a_number_of_rounds_that_was_never_seen_is_predicted(model: type[nn.Module]) -> None:
    """Between others, and beyond them."""
    learnt = learn(Estimator(), (5, 9, 3, 7, 4, 8, 10), model)
    for estimator in (learnt, restored(learnt)):
        for rounds in (6, 12):
            found, truth = predicted(estimator, rounds), folded(model, rounds)
            assert found.trusted
            assert found.others == ()
            assert found.structure == truth.structure
            peaks = [truth.structure.summary(each[None])[0, :2] for each in (found.values, truth.values)]
            assert np.allclose(*peaks, rtol=1e-3)


def test_sizes_tell_how_often_blocks_are_called() -> None:
    """One or two chunks have nothing in between; each number is a path of its own, and only of its sizes."""
    estimator = learn(Estimator(), (1, 2, 4, 3, 6, 5, 2, 1, 4))
    for rounds in (1, 2):
        found = predicted(estimator, rounds)
        assert found.structure == step(Chunked, rounds)[0]
        assert found.others == ()
        assert np.array_equal(found.values, step(Chunked, rounds)[1])
    assert predicted(estimator, 5).structure == folded(Chunked, 5).structure
    either = estimator.predict(size(3, part=2))
    assert either is None or not either.trusted


def test_calls_in_a_loop_inside_a_loop_go_by_two_dimensions() -> None:
    """A document's sentences, and the words of each."""
    seen = [(5, 6), (3, 7), (6, 4), (4, 7), (6, 6), (7, 5), (3, 5), (3, 4), (5, 5), (5, 4), (7, 4), (4, 5), (3, 6)]
    estimator = Estimator()
    for sentences, words in seen:
        estimator.add({"batch": 16, "ids:1": sentences, "ids:2": words}, *document_step(Nested, sentences, words))
    for sentences, words in ((6, 5), (7, 7)):
        found = estimator.predict({"batch": 16, "ids:1": sentences, "ids:2": words})
        truth = fold(*document_step(Nested, sentences, words))
        assert found is not None
        assert truth is not None
        assert found.trusted
        assert found.structure == truth.structure
        peaks = [truth.structure.summary(each[None])[0, :2] for each in (found.values, truth.values)]
        assert np.allclose(*peaks, rtol=1e-3)


@given(seed=st.integers(0, 1 << 20))
def test_a_product_of_two_dimensions_tells_numbers_of_calls(seed: int) -> None:
    """As one that rises with either; one that falls with them says nothing."""
    rnd = random.Random(seed)
    sizes = {(rnd.randint(1, 9), rnd.randint(1, 9)) for _ in range(12)}
    rising: dict[Key, dict[str, int]] = {(("ids:1", s), ("ids:2", w)): {"word": s * w, "across": s} for s, w in sizes}
    assert rise_with_size(rising)
    below = [(a, b) for a in sizes for b in sizes if a != b and a[0] <= b[0] and a[1] <= b[1]]
    if below:
        least, most = rnd.choice(below)
        key: Key = (("ids:1", most[0]), ("ids:2", most[1]))
        assert not rise_with_size(rising | {key: {"word": least[0] * least[1] - 1, "across": most[0]}})


def test_numbers_that_go_by_chance_are_not_folded() -> None:
    """One size, and layers that are left out: the longest path is learnt, as ever."""
    estimator = Estimator()
    for number, rounds in enumerate((9, 7, 8, 9, 6, 9, 8, 7, 9, 8)):
        estimator.add({"batch": 4, "ids:1": 40 + 8 * (number % 5)}, *step(Writing, rounds))
    assert not any(structure.looped for structure in estimator.observed.sizes)
    assert {structure.path for structure in estimator.observed.sizes} == {step(Writing, 9)[0].path}


def test_a_size_that_contradicts_ends_it() -> None:
    """From then on steps count as they are."""
    estimator = learn(Estimator(), (5, 9, 3, 7, 4, 8, 10))
    assert all(structure.looped for structure in estimator.observed.sizes)
    estimator.add(size(6), *step(Chunked, 12))
    assert [*estimator.observed.sizes] == [step(Chunked, 12)[0]]
    learn(estimator, (12, 12, 12))
    assert [*estimator.observed.sizes] == [step(Chunked, 12)[0]]


def test_what_sizes_did_before_they_were_folded_is_no_habit() -> None:
    """Of theirs no path is left."""
    estimator = learn(Estimator(), (5, *[4] * 6, 9, 3, 7, 8, 10))
    assert all(structure.looped for structure in estimator.observed.sizes)
    assert {path for path, _ in estimator.observed.habits.steps.values()} == {folded(Chunked, 6).structure.path}


def test_what_was_refuted_is_so_after_a_checkpoint() -> None:
    """And what could refute it is known: how often units were called in every size."""
    learnt = learn(Estimator(), (5, 9, 3, 7, 4, 8, 10))
    refuted = restored(learn(restored(learnt), ()))
    refuted.add(size(6), *step(Chunked, 12))
    for estimator in (refuted, restored(refuted)):
        learn(estimator, (3, 4, 5, 7, 8, 9, 10))
        assert not any(structure.looped for structure in estimator.observed.sizes)


def test_a_number_that_is_always_the_same_is_not_folded() -> None:
    """A layer that is called as often as there are layers in others (ALBERT): nothing is gained."""
    estimator = Estimator()
    for length in (16, 24, 32, 40, 48, 56, 64):
        structure, values = step(Writing, 6)
        estimator.add({"batch": 4, "ids:1": length}, structure, values * length)
    assert [*estimator.observed.sizes] == [step(Writing, 6)[0]]


def test_a_step_that_tells_nothing_but_its_path_is_known_by_its_loop() -> None:
    """However many rounds it has."""
    estimator = learn(Estimator(), (5, 9, 3, 7, 4, 8, 10))
    assert not estimator.heed(size(6), step(Chunked, 6)[0])
    assert estimator.heed(size(2), step(Chunked, 2)[0])


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=4, max_size=30, unique=True),
    query=st.tuples(st.integers(1, 40), st.integers(1, 60)),
    limits=st.tuples(st.integers(5, 25), st.integers(26, 50)),
)
def test_the_path_that_a_size_takes_is_among_those_that_it_may_take(
    lengths: list[tuple[int, int]], query: tuple[int, int], limits: tuple[int, int]
) -> None:
    """Whatever else parts the sizes that were seen by chance, unless none of them took it."""
    paths = [Path(frozenset("abc"[: count + 1]), frozenset()) for count in range(3)]

    def path_of(length: int) -> Path:
        return paths[sum(length > limit for limit in limits)]

    def key_of(source: int, target: int) -> Key:
        return (("source:1", source), ("target:1", target))

    seen: dict[Path, list[Key]] = {}
    for source, target in lengths:
        seen.setdefault(path_of(target), []).append(key_of(source, target))
    likely = paths_at(key_of(*query), seen)
    assert likely
    assert path_of(query[1]) in likely or path_of(query[1]) not in seen
    if query in lengths:
        assert likely == {path_of(query[1])}
