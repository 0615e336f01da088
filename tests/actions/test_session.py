"""The session by itself: which actions stand, and what came of a step."""

from __future__ import annotations

import weakref

import pytest
import torch

from lightning_mimose.actions.session import Session
from lightning_mimose.actions.trial import CHANGES_INPUT

WHY = "its results differ"


def test_actions_stand_as_they_are_while_nothing_is_refused() -> None:
    """The very dictionary: steps of one plan share it, and records are packed by it."""
    session, actions = Session(), {"a": "recompute"}
    session.arm(actions, None)
    assert session.actions is actions
    assert session.armed


def test_parts_stand_in_for_a_refused_unit() -> None:
    """In this step and in all later ones; what was passed in stays as it was."""
    session = Session(parts={"a": ["a.0", "a.1"]})
    actions = {"a": "recompute", "b": "recompute"}
    session.arm(actions, None)
    session.refuse({"a": WHY})
    assert session.actions == {"a.0": "recompute", "a.1": "recompute", "b": "recompute"}
    assert actions == {"a": "recompute", "b": "recompute"}
    session.arm(actions, None)
    assert "a" not in session.actions


def test_a_unit_that_changes_its_input_is_not_kept_lean_either() -> None:
    """While one that is refused for another reason may be."""
    session = Session()
    session.refuse({"a": CHANGES_INPUT, "b": WHY})
    assert session.standing({"a": "lean", "b": "lean"}) == {"b": "lean"}


def test_a_step_that_only_asked_whether_it_may_has_learnt_nothing() -> None:
    """What is to be learnt in two steps is learnt in the next two that run."""
    session = Session(learning_steps=2)
    left = []
    for ran in (False, True, True, True):
        session.arm({"a": "recompute"}, None)
        session.disarm(ran=ran)
        left.append(session.learning_steps)
    assert left == [2, 1, 0, 0]
    assert not session.armed


def test_changed_inputs_are_told_by_their_versions() -> None:
    """Those that are gone cannot have been changed."""
    session, kept, gone, changed = Session(), torch.ones(2), torch.ones(2), torch.ones(2)
    for name, tensor in (("kept", kept), ("gone", gone), ("changed", changed)):
        session.given.append((name, weakref.ref(tensor), tensor._version))
    gone.add_(1)
    del gone, tensor
    changed.add_(1)
    assert session.changed_inputs() == {"changed": CHANGES_INPUT}


@pytest.mark.parametrize("actions", [{}, {"a": "recompute"}], ids=["nothing to do", "something"])
def test_who_waits_for_a_call_is_told_once(actions: dict[str, str]) -> None:
    """A session that was not armed is not armed afterwards, one that was stays so."""
    session, told = Session(), []
    session.arm(actions, None)
    session.await_call(lambda unit, args, kwargs: told.append((unit, args, kwargs)))
    assert session.armed
    for _ in range(2):
        session.called("a", (1,), {"b": 2})
    assert told == [("a", (1,), {"b": 2})]
    assert session.armed == bool(actions)


def test_a_call_may_be_awaited_again_or_no_more() -> None:
    """As long as one is awaited units report."""
    session, told = Session(), []

    def again(unit: str, args: object, kwargs: object) -> None:
        told.append(unit)
        session.await_call(again)

    session.arm({}, None)
    session.await_call(again)
    session.called("a", (), {})
    session.called("b", (), {})
    assert told == ["a", "b"]
    assert session.armed
    session.await_none()
    assert not session.armed


def test_what_units_do_from_now_on_they_do() -> None:
    """Although a call is awaited in a step that had nothing to do."""
    session = Session()
    session.arm({}, None)
    session.await_call(lambda unit, args, kwargs: None)
    session.act_from_now({"b": "recompute"})
    session.called("a", (), {})
    assert session.armed
    assert session.actions == {"b": "recompute"}
