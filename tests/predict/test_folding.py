"""Steps whose loops are folded: of one shape whatever the number of rounds, and with the same peak under every plan."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from lightning_mimose.measure.observe import observe
from lightning_mimose.menu import GRADES
from lightning_mimose.predict.assemble import assemble
from lightning_mimose.predict.folding import Folded, fold
from lightning_mimose.predict.maxima import Maxima
from lightning_mimose.predict.rates import Rates
from lightning_mimose.predict.rounds import TOLERANCE, repeats
from lightning_mimose.predict.shapes import CallShape, Resident
from lightning_mimose.predict.structure import Structure
from lightning_mimose.predict.timeline import Timeline
from tests.helpers.architectures import ancestors
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded
from tests.helpers.rounds import (
    DROPPING,
    MODELS,
    NESTED,
    Chunked,
    Nested,
    Truncated,
    Writing,
    document_of,
    loss_of,
    text_of,
)


@cache
def step(model: type[nn.Module], rounds: int) -> tuple[Structure, NDArray[np.float64]]:
    """A measured step of so many rounds."""
    seen = observe(recorded(model(), text_of(model, rounds), loss_fn=loss_of, lean=True), 1000, None, GRADES)
    return seen.structure, seen.values


@cache
def document_step(model: type[nn.Module], sentences: int, words: int) -> tuple[Structure, NDArray[np.float64]]:
    """A measured step of a loop inside a loop."""
    trace = recorded(model(), document_of(sentences, words), loss_fn=loss_of, lean=True)
    seen = observe(trace, 1000, None, GRADES)
    return seen.structure, seen.values


def folded(model: type[nn.Module], rounds: int) -> Folded:
    """The same, folded."""
    found = fold(*step(model, rounds))
    assert found is not None
    return found


def _inside(call: CallShape, other: CallShape) -> bool:
    return other.in_time < call.in_time and call.out_time < other.out_time


def timeline(structure: Structure, values: NDArray[np.float64]) -> Timeline:
    """Of a step."""
    resident = Resident(1_000_000, 50_000, zeroes_gradients=True, update_bytes=1_000_000)
    return assemble(structure, values, resident, rates=Rates(1e-9), minimum_share=0.0)


def any_plan(timeline: Timeline, seed: int) -> dict[str, str]:
    """Actions of units of which none encloses another."""
    rnd, chosen, taken = random.Random(seed), dict[str, str](), set[int]()
    share, units = rnd.random(), list(range(len(timeline.units)))
    rnd.shuffle(units)
    for unit in units:
        actions = [option.action for option in timeline.options if option.unit == unit]
        apart = not taken.intersection(ancestors(timeline, unit))
        apart = apart and all(unit not in ancestors(timeline, other) for other in taken)
        if actions and apart and rnd.random() < share:
            chosen[timeline.units[unit]] = rnd.choice(actions)
            taken.add(unit)
    return chosen


@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_rounds_is_one_shape(model: type[nn.Module]) -> None:
    """From three on; the parts that make up a step say how many there were."""
    few, many = folded(model, 3), [folded(model, rounds) for rounds in (5, 6, 9)]
    assert {few.structure, *(each.structure for each in many)} == {few.structure}
    assert len({each.structure.path for each in many}) == 1
    for rounds, (structure, values, _) in zip((3, 5, 6, 9), (few, *many), strict=True):
        calls = structure.counts(values)
        looped = [count for call, count in zip(structure.calls, calls.tolist(), strict=True) if call.count >= 0]
        assert set(looped) == {rounds - 3}


@pytest.mark.parametrize("model", MODELS)
def test_what_moments_are_the_largest_of_is_known_of_those_that_are_left(model: type[nn.Module]) -> None:
    """The loss, for instance, is not in the loop; of rounds in between nothing is known."""
    trace = recorded(model(), text_of(model, 6), loss_fn=loss_of, lean=True)
    seen = observe(trace, 1000, None, GRADES)
    found = fold(seen.structure, seen.values, seen.maxima)
    assert found is not None
    before, after = (
        {position.label: position.column for position in structure.positions}
        for structure in (seen.structure, found.structure)
    )
    tops = of_columns(found.maxima)
    assert before["backward step"] in of_columns(seen.maxima)
    assert tops[after["backward step"]] == of_columns(seen.maxima)[before["backward step"]]
    assert all(found.values[column] == max(0.0, *each) for column, each in tops.items())


def of_columns(maxima: Maxima) -> dict[int, list[float]]:
    """Column -> its maxima."""
    found: dict[int, list[float]] = {}
    for column, top in zip(np.repeat(maxima.columns, maxima.lengths).tolist(), maxima.tops.tolist(), strict=True):
        found.setdefault(column, []).append(top)
    return found


@settings(deadline=None, max_examples=60)
@given(model=st.sampled_from(MODELS), rounds=st.sampled_from([3, 4, 5, 8]), seed=st.integers(0, 1 << 20))
def test_a_folded_step_has_the_same_peak_under_any_plan(model: type[nn.Module], rounds: int, seed: int) -> None:
    """And takes as long."""
    whole, found = timeline(*step(model, rounds)), timeline(*folded(model, rounds)[:2])
    assert found.option_index.keys() == whole.option_index.keys()
    plan = any_plan(whole, seed)
    assert found.peak_bytes(plan) == whole.peak_bytes(plan)
    assert found.added_seconds(plan) == pytest.approx(whole.added_seconds(plan), rel=1e-3)


@pytest.mark.parametrize("model", NESTED)
def test_loops_inside_of_loops_are_one_shape(model: type[nn.Module]) -> None:
    """However often either goes round; of all calls none gets lost."""
    lengths = [(3, 4), (3, 6), (4, 4), (6, 5), (5, 7)]
    found = [fold(*document_step(model, *each)) for each in lengths]
    shapes = [each.structure for each in found if each is not None]
    assert len(shapes) == len(lengths)
    assert len(set(shapes)) == 1
    for each, (sentences, words) in zip(found, lengths, strict=True):
        assert each is not None
        counts = dict.fromkeys(each.structure.units, 0.0)
        for call, count in zip(each.structure.calls, each.structure.counts(each.values).tolist(), strict=True):
            counts[call.unit] += count
        assert counts["across"] == sentences
        assert counts["word" if model is Nested else "word.word"] == sentences * words


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(NESTED),
    lengths=st.sampled_from([(3, 4), (4, 6), (6, 5)]),
    seed=st.integers(0, 1 << 20),
)
def test_loops_inside_of_loops_have_the_same_peak_under_any_plan(
    model: type[nn.Module], lengths: tuple[int, int], seed: int
) -> None:
    """As good as: a round in between may be above the others by as much as that."""
    found = fold(*document_step(model, *lengths))
    assert found is not None
    whole, short = timeline(*document_step(model, *lengths)), timeline(*found[:2])
    assert short.option_index.keys() == whole.option_index.keys()
    plan = any_plan(whole, seed)
    assert short.peak_bytes(plan) == pytest.approx(whole.peak_bytes(plan), rel=TOLERANCE)
    assert short.added_seconds(plan) == pytest.approx(whole.added_seconds(plan), rel=1e-3)


@pytest.mark.parametrize("model", DROPPING)
def test_rounds_without_a_backward_are_one_shape(model: type[nn.Module]) -> None:
    """From four on; what they save is gone in the next one, so that it is never there of all of them."""
    found = [folded(model, rounds) for rounds in (8, 10, 12, 16)]
    assert len({each.structure for each in found}) == 1
    saved = [each.values[[call.saved for call in each.structure.calls if call.kept_until]] for each in found]
    assert len(saved[0]) > 0
    assert all(np.array_equal(each, saved[0]) for each in saved)
    assert fold(*step(model, 4)) is None


@settings(deadline=None, max_examples=40)
@given(model=st.sampled_from(DROPPING), rounds=st.sampled_from([8, 10, 12]), seed=st.integers(0, 1 << 20))
def test_rounds_without_a_backward_have_the_same_peak_under_any_plan(
    model: type[nn.Module], rounds: int, seed: int
) -> None:
    """And take as long."""
    whole, found = timeline(*step(model, rounds)), timeline(*folded(model, rounds)[:2])
    assert found.option_index.keys() == whole.option_index.keys()
    plan = any_plan(whole, seed)
    assert found.peak_bytes(plan) == whole.peak_bytes(plan)
    assert found.added_seconds(plan) == pytest.approx(whole.added_seconds(plan), rel=1e-3)


def test_results_that_are_dropped_one_by_one_later_are_not_folded() -> None:
    """Of what they save another part is there in every round."""
    structure, values = step(Truncated, 8)
    dropped = [i for i, call in enumerate(structure.calls) if call.kept_until and call.unit.endswith("0")]
    assert len(dropped) == 6
    calls = list(structure.calls)
    for i, later in zip(dropped, dropped[2:], strict=False):
        calls[i] = replace(calls[i], kept_until=calls[later].kept_until)
    assert fold(structure, values) is not None
    assert fold(replace(structure, calls=tuple(calls)), values) is None


def test_rounds_around_loops_of_different_lengths_are_alike() -> None:
    """Sentences of some words more or less, side by side: in calls and times, as if a few had never been made."""
    structure, values = document_step(Nested, 5, 7)
    words = [i for i, call in enumerate(structure.calls) if call.unit == "word"]
    # Those inside of it as well, and what it holds.
    gone = {words[number] for number in (4, 10, 11, 18)}
    gone |= {i for i, call in enumerate(structure.calls) if any(_inside(call, structure.calls[j]) for j in gone)}
    times = {t for i in gone for t in (structure.calls[i].in_time, structure.calls[i].out_time)}
    times |= {structure.calls[i].backward_time for i in gone}
    left = [i for i in range(len(structure.calls)) if i not in gone]
    kept = [p for p, position in enumerate(structure.positions) if position.time not in times]
    place, index = {p: new for new, p in enumerate(kept)}, {i: new for new, i in enumerate(left)}
    fewer = replace(
        structure,
        calls=tuple(structure.calls[i] for i in left),
        positions=tuple(structure.positions[p] for p in kept),
        lean=tuple(
            replace(
                each,
                call=index[each.call],
                positions=tuple((place[p], c) for p, c in each.positions if p in place),
                again=tuple((place[p], c) for p, c in each.again if p in place),
            )
            for each in structure.lean
            if each.call in index
        ),
    )
    assert not structure.loose
    found = fold(fewer, values)
    whole = fold(structure, values)
    assert found is not None
    assert whole is not None
    assert found.structure == whole.structure
    words_left = [
        c
        for call, c in zip(found.structure.calls, found.structure.counts(found.values), strict=True)
        if call.unit == "word"
    ]
    assert sum(words_left) == 35 - 4


@pytest.mark.parametrize("model", MODELS)
def test_what_is_in_between_grows_with_the_number_of_rounds(model: type[nn.Module]) -> None:
    """So that a line tells it; a step of one length more is what follows from two others."""
    few, more, most = (folded(model, rounds).values for rounds in (5, 7, 9))
    assert np.allclose(2 * more - few, most, atol=2e-3 * most.max())


@pytest.mark.parametrize("rounds", [1, 2])
def test_fewer_rounds_are_not_folded(rounds: int) -> None:
    """There is nothing in between."""
    assert fold(*step(Chunked, rounds)) is None


def test_a_step_without_loops_is_not_folded() -> None:
    """Nor one that was folded already."""
    seen = observe(recorded(TinyText(4), text_batch(2, 8)), 0)
    assert fold(seen.structure, seen.values) is None
    assert fold(*folded(Writing, 6)) is None


def test_a_round_in_between_that_takes_more_than_the_others_is_not_folded() -> None:
    """It would be missing, kept or recomputed."""
    structure, values = step(Writing, 7)
    middle = [call for call in structure.calls if call.unit == "writer"][3]
    place = next(p for p in structure.positions if p.time == middle.backward_time)
    for column in (place.column, middle.working):
        higher = values.copy()
        higher[column] += values.max()
        assert fold(structure, higher) is None


def test_rounds_whose_backward_is_in_another_order_are_not_folded() -> None:
    """What is alive in between would be another sum."""
    structure, values = step(Writing, 6)
    of_writer = [i for i, call in enumerate(structure.calls) if call.unit == "writer"]
    calls = list(structure.calls)
    one, other = of_writer[2], of_writer[3]
    calls[one] = replace(calls[one], backward_time=structure.calls[other].backward_time)
    calls[other] = replace(calls[other], backward_time=structure.calls[one].backward_time)
    assert fold(replace(structure, calls=tuple(calls)), values) is None


def test_a_folded_shape_outlives_a_checkpoint() -> None:
    """As plain data."""
    found = folded(Chunked, 5).structure
    assert Structure.of(json.loads(json.dumps(asdict(found)))) == found


def test_what_stands_for_a_loop_is_no_loop() -> None:
    """Its calls come three times, the middle one of an outer loop even in a row: they are left as they are."""
    first, between, last, other = 1, 2, 1, 3
    once = [first, between, last, last, other]
    assert repeats([*once, *once], folded={between}) == []
    assert repeats([*once, between, between, between, between, *once, *once], folded={between}) == []
    assert repeats([*once, *once, *once], folded={between}) == [(0, 5, 3)]


@given(
    before=st.lists(st.integers(10, 12), max_size=3, unique=True),
    each=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    count=st.integers(3, 6),
    after=st.lists(st.integers(20, 22), max_size=3, unique=True),
)
def test_what_is_repeated_is_found(before: list[int], each: list[int], count: int, after: list[int]) -> None:
    """Wherever it is."""
    assert repeats([*before, *each * count, *after]) == [(len(before), len(each), count)]
    assert repeats([*before, *each * 2, *after]) == []
