"""The session by itself: which actions stand, and what came of a step."""

from __future__ import annotations

import weakref

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
