"""Steps that run backward in their midst, told by their input."""

from __future__ import annotations

from lightning_mimose.predict.penalties import Penalties


def test_what_was_never_measured_may_come_only_beside_what_was() -> None:
    """A run that goes on from a checkpoint of an older version knows of neither kind."""
    penalties = Penalties()
    assert not penalties.may_come(True)
    assert not penalties.may_come(False)
    penalties.saw(True, came=False)  # adapters: what is frozen is told to want gradients, in every step
    assert not penalties.may_come(True)
    assert penalties.may_come(False)
    assert penalties.knows(True)
    assert not penalties.knows(False)


def test_what_came_once_may_come_again_also_after_a_checkpoint() -> None:
    """Whatever others of its kind did since."""
    penalties, other = Penalties(), Penalties()
    penalties.saw(False, came=False)
    penalties.saw(True, came=True)
    penalties.saw(True, came=False)
    other.load_state_dict(penalties.state_dict())
    for each in (penalties, other):
        assert each.may_come(True)
        assert not each.may_come(False)
