"""What was learnt in one posture and another."""

from __future__ import annotations

from lightning_mimose.measure.observe import observe
from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.postures import KNOWN, MOST_NEW, Postures
from tests.helpers.models import TinyText, text_batch
from tests.helpers.recording import recorded

TRAIN, EVAL = (True, True), (False, False)


def learnt() -> Estimator:
    """One that has seen a step."""
    seen, estimator = observe(recorded(TinyText(layers=1), text_batch(2, 4)), 0), Estimator()
    estimator.add({"tokens": 4}, seen.structure, seen.values)
    return estimator


def posture(number: int) -> tuple[bool, ...]:
    """One of many."""
    return tuple(bool(number >> bit & 1) for bit in range(8))


def test_what_was_learnt_comes_back_with_the_posture() -> None:
    """A norm that is frozen in every other epoch."""
    postures, first, second = Postures(), learnt(), learnt()
    assert not postures.take(TRAIN, first).changed
    assert not postures.take(TRAIN, first).changed
    assert postures.take(EVAL, first) == (True, None)
    assert postures.take(TRAIN, second) == (True, first)
    assert postures.take(EVAL, first) == (True, second)


def test_the_oldest_is_forgotten() -> None:
    """Not every one of many is remembered."""
    postures, known = Postures(), [learnt() for _ in range(KNOWN + 2)]
    for number in range(len(known)):
        postures.take(posture(number), known[number - 1])
        assert postures.now == posture(number)
    assert postures.take(posture(len(known) - 2), known[-1]).known is known[-2]
    assert postures.take(posture(0), known[-1]).known is None


def test_one_in_which_nothing_was_learnt_is_new_when_it_comes_back() -> None:
    """A first step that began in one and ran in another."""
    postures = Postures()
    postures.take(TRAIN, Estimator())
    postures.take(EVAL, Estimator())
    assert postures.take(TRAIN, learnt()) == (True, None)


def test_a_model_that_is_always_set_anew_is_followed_no_more() -> None:
    """Its steps would all be sheltered."""
    postures = Postures()
    changed = [postures.take(posture(number), Estimator()).changed for number in range(2 * MOST_NEW)]
    assert changed[1 : MOST_NEW + 2] == [True] * (MOST_NEW + 1)
    assert not any(changed[MOST_NEW + 2 :])
    assert not postures.follows


def test_where_nothing_holds_any_more_no_posture_brings_it_back() -> None:
    """Layers were frozen meanwhile."""
    postures, first = Postures(), learnt()
    postures.take(TRAIN, first)
    postures.take(EVAL, first)
    postures.forget()
    assert postures.take(TRAIN, Estimator()).known is None


def test_state_says_how_modules_were_set() -> None:
    """A run that goes on with them set otherwise learns anew; one from an older state takes it as it comes."""
    postures, other, older = Postures(), Postures(), Postures()
    postures.take((True, False, True), Estimator())
    other.load_state_dict(postures.usual(Estimator())[0])
    assert other.now == (True, False, True)
    assert other.take(TRAIN, Estimator()).changed
    older.load_state_dict("")
    assert not older.take(TRAIN, Estimator()).changed


def test_a_state_is_of_the_posture_of_most_steps() -> None:
    """It may be saved in a step of another one; where that is all that was learnt, that is it."""
    postures, usual, rare = Postures(), learnt(), learnt()
    assert postures.usual(usual) == ("", usual)
    for _ in range(5):
        postures.take(TRAIN, usual)
    postures.take((*TRAIN, 2), usual)
    assert postures.usual(rare) == ("11", usual)
    assert postures.take(TRAIN, rare).known is usual
    postures.forget()
    postures.take((*TRAIN, 2), Estimator())
    assert postures.usual(rare) == ("112", rare)


def test_a_posture_that_teaches_nothing_is_new_only_once() -> None:
    """As one that was foreseen and did not come."""
    postures, usual = Postures(), learnt()
    for step in range(8 * MOST_NEW):
        postures.take((*TRAIN, step % 2), usual if step % 2 == 0 else Estimator())
    assert postures.follows
