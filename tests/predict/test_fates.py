"""Which inputs die early, and what is believed of those that were never seen."""

from __future__ import annotations

from dataclasses import replace

from lightning_mimose.predict.fates import Fates
from lightning_mimose.predict.shapes import CallShape, LooseShape
from lightning_mimose.predict.structure import Structure

MASK, BIAS, OTHER = frozenset({"a", "b"}), frozenset({"c"}), frozenset({"d"})


def test_an_input_that_lived_once_is_never_taken_to_die() -> None:
    """Whatever came before and comes after."""
    fates = Fates()
    assert fates.learn({MASK: {"b"}}, [MASK], {})
    assert fates.ends(MASK) == {"b"}
    assert fates.learn({MASK: None}, [MASK], {})
    assert fates.ends(MASK) is None
    assert not fates.learn({MASK: {"b"}}, [MASK], {})
    assert fates.ends(MASK) is None
    assert not fates.any_dies


def test_the_latest_of_all_deaths_counts() -> None:
    """It may die with one call in a step and with another in the next."""
    fates = Fates()
    fates.learn({MASK: {"b"}}, [MASK], {})
    assert fates.learn({MASK: {"head"}}, [MASK], {})
    assert fates.ends(MASK) == {"b", "head"}


def test_what_a_recipe_may_have_held_says_nothing_by_living() -> None:
    """By dying it does; and what units held for a recomputation is not among `loose`."""
    fates = Fates()
    assert not fates.learn({MASK: None, OTHER: {"d"}}, [MASK], {MASK: [("a", "lean")]})
    assert fates.ends(MASK) is None
    assert fates.learn({MASK: {"b"}}, [MASK], {MASK: [("a", "lean")]})
    assert fates.ends(MASK) == {"b"}
    assert fates.ends(OTHER) is not None


def test_a_grade_under_which_an_input_died_does_not_need_it() -> None:
    """That unit's, for that input; of another grade or unit nothing is known."""
    fates, other = Fates(), Fates()
    fates.learn({MASK: {"b"}}, [MASK], {MASK: [("a", "lean"), ("a", "lean+masks")]})
    other.load_state_dict(fates.state_dict())
    for each in (fates, other):
        assert not each.borrows(MASK, "a", "lean+masks")
        assert each.borrows(MASK, "a", "lean+products")
        assert each.borrows(MASK, "b", "lean+masks")
        assert each.borrows(BIAS, "a", "lean+masks")


def test_inputs_never_seen_die_only_where_all_that_were_seen_did() -> None:
    """The calls of a neural ODE are others in every batch."""
    fates = Fates()
    assert fates.ends(OTHER) is None
    fates.learn({MASK: {"b"}}, [MASK], {})
    assert fates.ends(OTHER) == frozenset()
    fates.learn({BIAS: None}, [BIAS], {})
    assert fates.ends(OTHER) is None
    assert fates.ends(MASK) == {"b"}


def test_what_was_learnt_survives_a_checkpoint() -> None:
    """As plain data."""
    fates, other = Fates(), Fates()
    fates.learn({MASK: {"b"}, BIAS: None}, [MASK, BIAS], {})
    other.load_state_dict(fates.state_dict())
    assert other.ends(MASK) == {"b"}
    assert other.ends(BIAS) is None
    assert other.ends(OTHER) is None


def call(key: str, time: int) -> CallShape:
    """Of a unit of that name."""
    return CallShape(key, key, True, time, time + 1, 20 - time, *range(8))


def test_what_outlives_the_latest_sheltered_step_is_not_taken_to_die() -> None:
    """Nobody but those who hold it in backward can have kept it; the first batch's may have been kept to look at."""
    calls = (call("a", 1), call("b", 3), call("c", 5))
    loose = (LooseShape(0, (1, 0), 18, outlives=True), LooseShape(0, (2,), 15))
    fates = Fates()
    fates.learn({MASK: {"b"}, BIAS: {"c"}}, [MASK, BIAS], {})
    fates.learn_held(Structure(("a", "b", "c"), (-1,) * 3, calls, (), loose, 0, 8))
    assert fates.lasts(MASK)
    assert fates.ends(MASK) is None
    assert not fates.lasts(BIAS)
    assert fates.ends(BIAS) == {"c"}
    fates.learn_held(Structure(("a", "b", "c"), (-1,) * 3, calls, (), loose[1:], 0, 8))
    assert fates.lasts(MASK)
    none = (replace(loose[0], outlives=False), loose[1])
    fates.learn_held(Structure(("a", "b", "c"), (-1,) * 3, calls, (), none, 0, 8))
    assert not fates.lasts(MASK)
    assert fates.ends(MASK) == {"b"}
