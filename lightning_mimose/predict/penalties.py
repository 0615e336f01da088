"""Steps that run backward in their midst every now and then: a penalty on gradients at every fourth step, say.

Such a step takes far more than others of its size, and nobody knows before. What tells is the first unit's input: a
gradient is taken by a leaf that was made to want one. There are two kinds of steps, then.
"""

from __future__ import annotations

from collections.abc import Mapping

WITHOUT = 3
"""Measured steps of a kind in a row without one, after which none is expected of it."""


class Penalties:
    """Whether steps run backward in their midst, by whether their input wants a gradient.

    Limitations:
        Penalties on gradients by something else than the input of the step's first call (by what a mapping network has
        made, by what a second call is given) are not told.

    Example:
        >>> penalties = Penalties()
        >>> penalties.may_come(True)
        False
        >>> penalties.saw(False, came=False)
        >>> penalties.may_come(False), penalties.may_come(True)
        (False, True)
    """

    def __init__(self) -> None:
        self._without: dict[bool, int] = {}
        """Measured steps of each kind since the last that ran backward in its midst, up to `WITHOUT`."""

    def saw(self, wants_gradient: bool, *, came: bool) -> None:
        """A step was measured.

        Args:
            wants_gradient: Whether its input did.
            came: Whether it ran backward in its midst, or twice.
        """
        without = self._without.get(wants_gradient, WITHOUT)
        self._without[wants_gradient] = 0 if came else min(without + 1, WITHOUT)

    def knows(self, wants_gradient: bool) -> bool:
        """Whether such a step was measured."""
        return wants_gradient in self._without

    def may_come(self, wants_gradient: bool) -> bool:
        """Whether a step may: such ones did of late, or only others were ever measured.

        Of those whose input wants no gradient it is not told by that which do, so that all would wait for one.
        """
        return wants_gradient and self._without.get(True, 0 if self._without else WITHOUT) < WITHOUT

    def state_dict(self) -> dict[str, int]:
        """What was seen, as plain data."""
        return {str(wants): count for wants, count in self._without.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what was seen."""
        self._without = {wants == "True": int(count) for wants, count in state.items()}
