"""What was learnt apart: while a model's modules were set otherwise, or in steps of another kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from lightning_mimose.predict.estimator import Estimator
from lightning_mimose.predict.kinds import Kinds, Seen

Modes = tuple[int, ...]
"""How modules are set, see `engine.posture`: evaluation mode and dropout's rates."""
KNOWN = 4
"""Modes whose steps are remembered, the present ones included."""
MOST_NEW = 16
"""A model that is set anew in every step would never be planned: after so many, what differs is a size's scatter."""


class Taken(NamedTuple):
    """What a step begins with.

    Attributes:
        changed: Whether modules are set otherwise than in the step before, or another kind is foreseen.
        known: What was learnt of such steps; None for nothing.
    """

    changed: bool
    known: Estimator | None = None


class Postures:
    """Follows how modules are set and which kinds of step come then, and keeps what was learnt apart.

    Attributes:
        now: How modules are set; None before the first step.
        kinds: The kinds of step that come when they are set like that.

    Example:
        >>> postures = Postures()
        >>> postures.take((True, True), 0, Estimator()).changed, postures.take((True, False), 0, Estimator())
        (False, Taken(changed=True, known=None))
    """

    def __init__(self) -> None:
        self.now: Modes | None = None
        self.kinds = Kinds()
        self._kind = 0
        self._told: Modes = ()
        """How they were set when they were told apart last."""
        self._apart: dict[Modes, tuple[Kinds, dict[int, Estimator]]] = {}
        """By modes, the latest last: their kinds, and what was learnt of each but for the present one."""
        self._new = 0
        self._counted = False
        """Whether the latest step has begun in a new one."""
        self._steps = 0

    @property
    def follows(self) -> bool:
        """Whether modes are told apart; no more if every other step has one that was not met."""
        return self._new - self._counted <= MOST_NEW

    def foresee(self, modes: Modes, place: int, *, begins: bool = True) -> int:
        """The kind of a step, see `predict.kinds`; in each mode they are others.

        Args:
            modes: How modules are set.
            place: The step's index in the epoch.
            begins: Whether the step has just begun, and is not looked at again.
        """
        self._steps += begins
        kinds = self.kinds if modes == self.now or not self.follows else self._of(modes)[0]
        return kinds.foresee(self._steps, place)

    def take(self, modes: Modes, kind: int, learnt: Estimator, *, begins: bool = True) -> Taken:
        """A step begins, or turns out to be another.

        Args:
            modes: How modules are set.
            kind: Of which kind it is, as far as is foreseen.
            learnt: What was learnt of the steps before it.
            begins: Whether it begins; if not, it was never in the modes that it was taken to be in.
        """
        self._new -= self._counted and not begins
        self._counted = False
        before, kind_before = self.now, self._kind
        switched = modes != before and self.follows
        self.now, self._kind = modes, kind
        if not switched and kind == kind_before:
            return Taken(changed=False)
        if before is not None and learnt.knows_anything:
            self._of(self._told)[1][kind_before] = learnt
        if switched:
            self._told = modes
        self.kinds, known = self._of(self._told)
        self._apart[self._told] = self._apart.pop(self._told)
        while len(self._apart) > KNOWN:
            del self._apart[next(iter(self._apart))]
        if before is None:
            return Taken(changed=False)
        found = known.pop(kind, None)
        self._counted = switched and found is None
        self._new += self._counted
        return Taken(True, found)

    def _of(self, modes: Modes) -> tuple[Kinds, dict[int, Estimator]]:
        if modes not in self._apart:
            self._apart[modes] = Kinds(), {}
        return self._apart[modes]

    def saw(self, place: int, size: Hashable, count: Hashable, path: Hashable = None) -> Seen:
        """See `Kinds.saw`."""
        return self.kinds.saw(self._steps, place, size, count, path)

    def usual(self, learnt: Estimator) -> Estimator:
        """What was learnt of the usual steps, with modules set as they are: what a state has room for.

        Args:
            learnt: What was learnt of the present kind.
        """
        if self.now is None or self.kinds.usual == self._kind:
            return learnt
        return self._of(self._told)[1].get(self.kinds.usual, learnt)

    def forget(self) -> None:
        """What was learnt holds in no mode any more, and kinds are others."""
        self.now, self.kinds, self._kind = None, Kinds(), 0
        self._apart.clear()

    def state_dict(self) -> str:
        """How modules are set, as plain data."""
        return "".join("01"[bool(each)] for each in self.now or ())

    def load_state_dict(self, state: str) -> None:
        """They were set like that when what is known was learnt; of an older state nobody knows."""
        self.forget()
        self.now = tuple(each == "1" for each in state) or None
        if self.now is not None:
            self._told, self.kinds = self.now, self._of(self.now)[0]
