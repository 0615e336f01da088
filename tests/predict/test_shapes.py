"""Who holds an input until when, as several steps have shown it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_mimose.predict.shapes import NEVER, LeanShape, LooseShape

SEEN = LooseShape(size=0, holders=(0,), until_time=90, ending=1, since_time=10)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (10, 10, 10),
        (10, 14, 14),
        (14, 10, 14),
        (10, None, None),
        (None, 10, None),
        (10, NEVER, NEVER),
        (None, NEVER, NEVER),
    ],
)
def test_the_longest_hold_of_several_steps_is_expected(one: int | None, other: int | None, both: int | None) -> None:
    """None stands for some time in backward."""
    merged = replace(SEEN, since_time=one).with_holds_of(replace(SEEN, since_time=other))
    assert merged.since_time == both
    assert merged.ends_there == (one == other)
    assert merged.lasts == (both == NEVER)


def test_nothing_new_changes_nothing() -> None:
    """Not even the object, of which much has been computed."""
    assert SEEN.with_holds_of(replace(SEEN)) is SEEN
    later = SEEN.with_holds_of(replace(SEEN, since_time=14))
    assert later.with_holds_of(later) is later
    assert not later.with_holds_of(SEEN).ends_there


def test_what_outlived_one_step_may_outlive_another() -> None:
    """Where it was not seen when others let go."""
    unseen = replace(SEEN, since_time=None)
    assert not unseen.lasts
    assert unseen.with_holds_of(replace(unseen, outlives=True)).lasts


def test_recipes_borrow_what_they_did_in_any_step() -> None:
    """Each of it once."""
    lean = LeanShape(call=0, action="lean", saved=0, work=1, positions=(), borrowed=(1, 4))
    assert lean.with_loans_of(replace(lean, borrowed=(2, 4))).borrowed == (1, 2, 4)
    assert lean.with_loans_of(replace(lean, borrowed=(4,))) is lean
