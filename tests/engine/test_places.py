"""Where sizes are read from the next step on, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.engine.places import MOST_RISES, Doubt, Places
from lightning_mimose.sizes import Place


def places(**options: Any) -> tuple[Places, Advisor, list[int]]:
    """With what they tell: that sizes mean something else."""
    advisor, moves = Advisor(1000), list[int]()
    return Places(advisor, [lambda: moves.append(1)], **({"fixed": False} | options)), advisor, moves


def test_a_rise_takes_force_with_the_next_step() -> None:
    """And only one is decided about at a time."""
    where, advisor, moves = places()
    assert where.rise("they tell nothing", with_batch=True)
    assert where.stay
    assert not where.rise("they tell nothing", with_batch=True)
    assert (where.level, moves) == (0, [])
    where.turn()
    assert advisor.tracker.place == Place(1, with_batch=True)
    assert moves == [1]
    where.turn()
    assert moves == [1]


def test_no_size_is_read_further_inside_than_in_the_first_unit() -> None:
    """Its own call is the last there is."""
    where, _, _ = places()
    where.move(Place(2))
    where.at_unit = True
    assert where.stay
    assert not where.rise("they tell nothing")


def test_where_sizes_have_to_be_known_at_once_they_are_read_in_the_batch() -> None:
    """Even if what is known was learnt by others."""
    where, advisor, _ = places(fixed=True)
    advisor.tracker.restart(1)
    where.turn()
    assert where.level == 0
    assert not where.may_go_inside()
    assert not where.rise("they tell nothing")


def test_what_does_not_help_a_unit_is_taken_back() -> None:
    """What was learnt before is known again, and such a unit is not looked at any more."""
    where, advisor, _ = places()
    before = advisor.estimator
    assert where.cures("blocks.1", "blocks", "they differ")
    where.turn()
    assert advisor.estimator is not before
    assert where.cures("blocks.1", "blocks", "they differ")
    where.turn()
    assert (where.level, advisor.estimator is before) == (0, True)
    assert "blocks" in advisor.tracker.ignored
    for _ in range(MOST_RISES - 1):
        assert where.cures("others.1", "others", "they differ")
        where.turn()
        where.cures("others.1", "others", "they differ")
        where.turn()
    assert not where.cures("more.1", "more", "they differ")


@pytest.mark.parametrize(("called", "confirms"), [((2, 8), False), ((2, 9), True)])
def test_a_doubt_is_looked_into_once(called: tuple[int, ...], confirms: bool) -> None:
    """Whether the model is called with something that the batch does not hold."""
    doubt = Doubt("they tell nothing")
    assert not doubt.is_confirmed_by([("x", called)]), "no step was looked at yet"
    doubt.begin([("a", (2, 8)), ("b", (3, 8))])
    assert doubt.looking
    assert doubt.is_confirmed_by([("x", called)]) is confirms
    assert doubt.over
    assert not doubt.is_confirmed_by([("x", (7, 7))])
