"""Which results are handed on: never one that another one of them is rebuilt from."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.menu import PRODUCTS
from lightning_mimose.predict.handing import NO_GRADE, NOT_TAKEN, HandingShape, common, limits
from lightning_mimose.predict.shapes import NEVER

GRADE = st.integers(1, PRODUCTS)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Results in order of the forward, each of which may need some before it."""
    needs: list[list[tuple[int, int]]] = []
    for number in range(draw(st.integers(0, 12))):
        before = st.tuples(st.integers(0, number - 1), GRADE)
        needs.append(draw(st.lists(before, max_size=2)) if number else [])
    return needs, [draw(GRADE) for _ in needs]


@given(chains())
def test_nothing_that_is_handed_on_needs_another_that_is(chain: tuple[list[list[tuple[int, int]]], list[int]]) -> None:
    """In any grade up to its limit; and what could be handed on without that is."""
    needs, grades = chain
    found = limits(needs, grades)
    for number, limit in enumerate(found):
        assert limit == 0 or grades[number] <= limit <= PRODUCTS
        needed = [grade for before, grade in needs[number] if found[before]]
        assert all(limit < grade for grade in needed) or limit == 0
        if not needed:
            assert limit == PRODUCTS


def test_every_other_sum_of_a_residual_stream() -> None:
    """Each is the one before it and something more."""
    assert limits([[], [(0, 1)], [(1, 1)], [(2, 1)], [(3, 1)]], [1] * 5) == [5, 0, 5, 0, 5]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(NOT_TAKEN, PRODUCTS))))
def test_what_is_handed_on_is_so_on_every_path(paths: list[dict[str, int]]) -> None:
    """A path that does not call a unit says nothing of it."""
    found = common(paths)
    for unit in "abc":
        said = [path[unit] for path in paths if unit in path]
        assert found.get(unit, NOT_TAKEN) == min(said, default=NOT_TAKEN)


SHAPE = HandingShape(0, 1, 0, 2, 3, 4, also=(5, 6, 7, 8, 9), grade=1, needs=((0, 3),), since_time=7)


def test_it_is_plain_data() -> None:
    """As it goes through a checkpoint of the training, which knows lists and no tuples."""
    data = asdict(SHAPE)
    data["also"], data["needs"] = list(data["also"]), [list(pair) for pair in data["needs"]]
    again = HandingShape.of(data)
    assert again == SHAPE
    assert (again.grade, again.needs, again.since_time) == (1, ((0, 3),), 7)
    assert hash(again) == hash(SHAPE)


def test_the_longest_hold_counts() -> None:
    """Whichever step has shown it."""
    longer = replace(SHAPE, since_time=9)
    assert SHAPE.with_holds_of(longer).since_time == longer.with_holds_of(SHAPE).since_time == 9
    assert SHAPE.with_holds_of(replace(SHAPE, since_time=NEVER)).since_time == NEVER
    assert SHAPE.with_holds_of(SHAPE) is SHAPE


def test_what_any_step_needed_counts() -> None:
    """Images are padded at some sizes only, and other operations make the result then."""
    other = replace(SHAPE, needs=((0, 2), (1, 4)), grade=3)
    both = SHAPE.with_holds_of(other)
    assert both == SHAPE
    assert (both.needs, both.grade) == (((0, 2), (1, 4)), 3)
    assert other.with_holds_of(SHAPE).needs == both.needs
    assert SHAPE.with_holds_of(replace(SHAPE, grade=NO_GRADE)).grade == NO_GRADE
    assert limits([()], [NO_GRADE]) == [0]
