"""Steps that run backward in their midst every now and then: a penalty on gradients at every fourth step, say.

Such a step takes far more than others of its size, and nobody knows before. What tells is the first unit's input: a
gradient is taken by a leaf that was made to want one.
"""

from __future__ import annotations

from collections.abc import Mapping


class Penalties:
    """Whether steps run backward in their midst, by whether their input wants a gradient.

    Limitations:
        Penalties on gradients by something else than an input (by what a mapping network has made) are not told.

    Example:
        >>> penalties = Penalties()
        >>> penalties.may_come(True)
        False
        >>> penalties.saw(False, came=False)
        >>> penalties.may_come(False), penalties.may_come(True)
        (False, True)
    """

    def __init__(self) -> None:
        self._came: dict[bool, bool] = {}

    def saw(self, wants_gradient: bool, *, came: bool) -> None:
        """A step was measured.

        Args:
            wants_gradient: Whether its input did.
            came: Whether it ran backward in its midst, or twice.
        """
        self._came[wants_gradient] = came or self._came.get(wants_gradient, False)

    def knows(self, wants_gradient: bool) -> bool:
        """Whether such a step was measured."""
        return wants_gradient in self._came

    def may_come(self, wants_gradient: bool) -> bool:
        """Whether a step may: such were seen to, or only others were seen."""
        return self._came.get(wants_gradient, bool(self._came))

    def state_dict(self) -> dict[str, bool]:
        """What was seen, as plain data."""
        return {str(wants): came for wants, came in self._came.items()}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Take over what was seen."""
        self._came = {wants == "True": came for wants, came in state.items()}
