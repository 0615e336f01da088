"""What was learnt while a model's modules were set otherwise: in evaluation mode, or without dropout."""

from __future__ import annotations

from typing import NamedTuple

from lightning_mimose.predict.estimator import Estimator

Posture = tuple[int, ...]
KNOWN = 4
"""Postures whose steps are remembered, the present one included."""
MOST_NEW = 16
"""A model that is set anew in every step would never be planned: after so many, what differs is a size's scatter."""


class Taken(NamedTuple):
    """What a step begins with.

    Attributes:
        changed: Whether modules are set otherwise than in the step before.
        known: What was learnt when they were set like that; None for nothing.
    """

    changed: bool
    known: Estimator | None = None


class Postures:
    """Follows how modules are set, and keeps what was learnt apart.

    Attributes:
        now: How they are set; None before the first step.

    Example:
        >>> postures = Postures()
        >>> postures.take((True, True), Estimator()).changed, postures.take((True, False), Estimator())
        (False, Taken(changed=True, known=None))
    """

    def __init__(self) -> None:
        self.now: Posture | None = None
        self._others: dict[Posture, Estimator] = {}
        self._new = 0
        self._steps: dict[Posture, int] = {}
        self._steps_now = 0

    @property
    def follows(self) -> bool:
        """Whether they are told apart; no more if every other step has one that was not met."""
        return self._new <= MOST_NEW

    def take(self, posture: Posture, learnt: Estimator) -> Taken:
        """A step begins.

        Args:
            posture: How modules are set.
            learnt: What was learnt in the posture before.
        """
        before, self.now = self.now, posture
        self._steps_now += 1
        if before is posture or before is None or before == posture or not self.follows:
            return Taken(changed=False)
        if len(self._steps) > MOST_NEW:
            self._steps.clear()
        self._steps[before] = self._steps.get(before, 0) + self._steps_now - 1
        self._steps_now = 1
        if len(learnt):
            self._others[before] = learnt
        known = self._others.pop(posture, None)
        self._new += posture not in self._steps
        if len(self._others) >= KNOWN:
            del self._others[next(iter(self._others))]
        return Taken(True, known)

    def forget(self) -> None:
        """What was learnt holds in no posture any more."""
        self.now = None
        self._others.clear()
        self._steps.clear()
        self._steps_now = 0

    def usual(self, learnt: Estimator) -> tuple[str, Estimator]:
        """The posture of most steps, as plain data, and what was learnt in it: what a state has room for.

        Args:
            learnt: What was learnt in the present one.
        """
        now = () if self.now is None else self.now
        steps, known = dict(self._steps), {**self._others, now: learnt}
        steps[now] = steps.get(now, 0) + self._steps_now
        posture = max(known, key=lambda each: steps.get(each, 0))
        return "".join(str(int(each)) for each in posture), known[posture]

    def load_state_dict(self, state: str) -> None:
        """They were set like that when what is known was learnt; of an older state nobody knows."""
        self.now = tuple(int(each) for each in state) or None
        self._others.clear()
