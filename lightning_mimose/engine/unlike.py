"""Steps that are unlike others of their size: told apart by what else is in the batch, or told to the user."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.advise.hints import scatter_hint
from lightning_mimose.sizes import BatchSize

UNLIKE_SHARE = 0.02
"""How far a step is from its prediction where it may be of another sort than the steps it was predicted from."""
MISSED_SHARE = 0.01
"""How far it is from that to have missed it."""
MOST_MISSES = 3
"""How many more steps may be as far from it again than not, before what they were told apart by explains nothing."""
FEWEST_STEPS, MOST_STEPS = 5, 10
"""Planned and measured ones that are looked back at."""


class Unlike:
    """Follows what of steps does not follow from their sizes.

    Args:
        advisor: Who learns.

    Attributes:
        renews: Whether all is to be learnt anew when the running step is over.
    """

    def __init__(self, advisor: Advisor) -> None:
        self._advisor = advisor
        self._missed: deque[bool] = deque(maxlen=MOST_STEPS)
        self._told = False
        self._suspect: str | None = None
        self._misses = 0
        """How many more there were than steps that held, since they are told apart by what was suspected."""
        self.renews = False

    def ran(self, size: BatchSize, what: Hashable) -> None:
        """A step's passes are over.

        Args:
            size: The batch's size.
            what: Stands for what it did with gradients.
        """
        label = self._advisor.tracker.labels.ran(size, size.layout, what)
        if label is not None:
            self._tell_apart(label)

    def compare(self, predicted_bytes: int, reached_bytes: int) -> None:
        """Hold what a planned step has reached against what was predicted."""
        missed_bytes = abs(reached_bytes - predicted_bytes) - self._advisor.scratch_bytes
        if missed_bytes > UNLIKE_SHARE * predicted_bytes:
            self._look_for_reason()
        else:
            self._misses = max(0, self._misses - 1)
        self._missed.append(missed_bytes > MISSED_SHARE * predicted_bytes)
        if len(self._missed) >= FEWEST_STEPS:
            self._advise(scatter_hint(sum(self._missed), len(self._missed)))

    def _look_for_reason(self) -> None:
        labels = self._advisor.tracker.labels
        if self._suspect not in labels.told:
            self._tell_apart(labels.suspect())
            return
        self._misses += 1
        if self._suspect is not None and self._misses == MOST_MISSES:
            labels.drop(self._suspect)
            self._renew(
                f"mimose: steps differ for some other reason than {self._suspect!r} of the batch: what was learnt of "
                "them is learnt anew, for all of its values together"
            )

    def _tell_apart(self, label: str | None) -> None:
        self._suspect, self._misses = label, 0
        if label is not None:
            self._advisor.tracker.labels.tell(label)
            self._renew(
                f"mimose: steps differ by {label!r} of the batch, which is no tensor: what was learnt of them is "
                "learnt anew, for each value by itself"
            )

    def _renew(self, text: str) -> None:
        self._missed.clear()
        self.renews = True
        self._advisor.announce(text)

    def _advise(self, text: str | None) -> None:
        self._advisor.hint("scatter", text)
        if text is not None and not self._told:
            self._told = True
            self._advisor.announce(f"mimose: {text}")
