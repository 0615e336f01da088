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


def bounded() -> Estimator:
    """One that has only seen steps that no fit describes."""
    estimator = Estimator()
    estimator.bounds.add({"tokens": 4}, 1000)
    return estimator


def posture(number: int) -> tuple[bool, ...]:
    """One of many."""
    return tuple(bool(number >> bit & 1) for bit in range(8))


def test_what_was_learnt_comes_back_with_the_posture() -> None:
    """A norm that is frozen in every other epoch."""
    postures, first, second = Postures(), learnt(), learnt()
    assert not postures.take(TRAIN, 0, first).changed
    assert not postures.take(TRAIN, 0, first).changed
    assert postures.take(EVAL, 0, first) == (True, None)
    assert postures.take(TRAIN, 0, second) == (True, first)
    assert postures.take(EVAL, 0, first) == (True, second)


def test_the_oldest_is_forgotten() -> None:
    """Not every one of many is remembered."""
    postures, known = Postures(), [learnt() for _ in range(KNOWN + 2)]
    for number in range(len(known)):
        postures.take(posture(number), 0, known[number - 1])
        assert postures.now == posture(number)
    assert postures.take(posture(len(known) - 2), 0, known[-1]).known is known[-2]
    assert postures.take(posture(0), 0, known[-1]).known is None


def test_one_in_which_nothing_was_learnt_is_new_when_it_comes_back() -> None:
    """A first step that began in one and ran in another."""
    postures = Postures()
    postures.take(TRAIN, 0, Estimator())
    postures.take(EVAL, 0, Estimator())
    assert postures.take(TRAIN, 0, learnt()) == (True, None)


def test_a_model_that_is_always_set_anew_is_followed_no_more() -> None:
    """Its steps would all be sheltered."""
    postures = Postures()
    changed = [postures.take(posture(number), 0, Estimator()).changed for number in range(2 * MOST_NEW)]
    assert changed[1 : MOST_NEW + 2] == [True] * (MOST_NEW + 1)
    assert not any(changed[MOST_NEW + 2 :])
    assert not postures.follows


def test_where_nothing_holds_any_more_no_posture_brings_it_back() -> None:
    """Layers were frozen meanwhile."""
    postures, first = Postures(), learnt()
    postures.take(TRAIN, 0, first)
    postures.take(EVAL, 0, first)
    postures.forget()
    assert postures.take(TRAIN, 0, Estimator()).known is None


def test_state_says_how_modules_were_set() -> None:
    """A run that goes on with them set otherwise learns anew; one from an older state takes it as it comes."""
    postures, other, older = Postures(), Postures(), Postures()
    postures.take((True, False, True), 0, Estimator())
    other.load_state_dict(postures.state_dict())
    assert other.now == (True, False, True)
    assert other.take(TRAIN, 0, Estimator()).changed
    older.load_state_dict("")
    assert not older.take(TRAIN, 0, Estimator()).changed


def test_a_state_is_of_the_usual_kind() -> None:
    """It may be saved in a step of another one; a run that goes on from it begins with that."""
    postures, usual, rare = Postures(), learnt(), learnt()
    assert postures.usual(usual) is usual
    for step in range(12):
        kind = postures.foresee(TRAIN, step)
        postures.take(TRAIN, kind, usual)
        postures.saw(step, "a size", 70)
    postures.take(TRAIN, 1, usual)
    assert postures.usual(rare) is usual
    assert postures.take(TRAIN, 0, rare).known is usual
    assert postures.take(TRAIN, 1, usual).known is rare


def test_every_kind_of_a_mode_is_remembered() -> None:
    """Six in turns, in two modes; those of a mode that is forgotten are forgotten with their kinds."""
    postures, known = Postures(), {}
    order = [(modes, kind) for modes in (TRAIN, EVAL) for kind in range(6)]
    present = Estimator()
    for modes, kind in (*order, *order):
        taken = postures.take(modes, kind, present)
        if (modes, kind) in known:
            assert taken.known is known[modes, kind]
        present = known.setdefault((modes, kind), learnt() if kind < 2 else bounded())
    kinds = postures.kinds
    for number in range(1, KNOWN + 1):
        postures.take(posture(number + 8), 0, learnt())
    assert postures.take(EVAL, 0, learnt()).known is None
    assert postures.kinds is not kinds


def test_kinds_are_those_of_a_mode() -> None:
    """After all was forgotten, too."""
    postures = Postures()
    for _ in range(2):
        postures.take(TRAIN, 0, learnt())
        trained = postures.kinds
        postures.take(EVAL, 0, learnt())
        assert postures.kinds is not trained
        postures.take(TRAIN, 0, learnt())
        assert postures.kinds is trained
        postures.forget()


def test_a_posture_that_teaches_nothing_is_no_reason_to_give_up_modes() -> None:
    """As a kind that was foreseen and did not come."""
    postures, usual = Postures(), learnt()
    for step in range(8 * MOST_NEW):
        postures.take(TRAIN, step % 2, usual if step % 2 else Estimator())
    assert postures.follows


def test_a_posture_that_no_step_ran_in_is_no_reason_to_give_up_modes() -> None:
    """Steps begin in it, and turn before anything has run: two networks of which each step trains another."""
    postures, known = Postures(), {TRAIN: learnt(), EVAL: learnt()}
    now = known[TRAIN]
    for step in range(8 * MOST_NEW):
        began = postures.take((True, False), 0, now)
        taken = postures.take(TRAIN if step % 2 else EVAL, 0, began.known or Estimator(), begins=False)
        now = taken.known or known[TRAIN if step % 2 else EVAL]
    assert postures.follows
    assert taken.known is known[TRAIN]
