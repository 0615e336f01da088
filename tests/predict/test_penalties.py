"""Steps that run backward in their midst, told by their input."""

from __future__ import annotations

from lightning_mimose.predict.penalties import WITHOUT, Penalties


def test_what_was_never_measured_may_come_only_beside_what_was() -> None:
    """A run that goes on from a checkpoint of an older version knows of neither kind."""
    penalties = Penalties()
    assert not penalties.may_come(True)
    penalties.saw(False, came=False)
    assert penalties.may_come(True)
    assert not penalties.knows(True)
    penalties.saw(True, came=False)  # adapters: what is frozen is told to want gradients
    assert not penalties.may_come(True)
    assert penalties.knows(True)


def test_what_came_is_expected_until_it_stays_away_also_after_a_checkpoint() -> None:
    """One backward too many, for a log of the first step, is no reason to shelter all others."""
    penalties, other = Penalties(), Penalties()
    penalties.saw(False, came=False)
    penalties.saw(True, came=True)
    penalties.saw(True, came=False)
    other.load_state_dict(penalties.state_dict())
    for each in (penalties, other):
        assert each.may_come(True)
        for _ in range(WITHOUT - 1):
            each.saw(True, came=False)
        assert not each.may_come(True)
        each.saw(True, came=True)
        assert each.may_come(True)


def test_steps_whose_input_wants_no_gradient_are_not_waited_with() -> None:
    """They are the greater part of all, and which of them has a penalty is told by nothing."""
    penalties = Penalties()
    penalties.saw(False, came=True)
    assert not penalties.may_come(False)
