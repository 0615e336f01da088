"""What one step will need: a step function over the stretches between its unit boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Claim:
    """The most that a step holds in each of its stretches, resident memory included.

    Stretch `i` runs from boundary `i` to boundary `i + 1`; the last one ends with the step.

    Attributes:
        needs: Bytes, one per stretch.
        ahead: Bytes; the largest need from each stretch on. What a step may still come to need.

    Example:
        >>> claim = Claim.of([30, 50, 40])
        >>> claim.ahead, claim.within(0, 1), claim.within(1, 3)
        ((50, 50, 40), 30, 50)
    """

    needs: tuple[int, ...]
    ahead: tuple[int, ...]

    @classmethod
    def of(cls, needs: Sequence[int]) -> Claim:
        """The claim with these needs, in bytes.

        Raises:
            ValueError: There is no stretch.
        """
        if not needs:
            raise ValueError("A claim has at least one stretch.")
        return cls(tuple(needs), tuple(accumulate(reversed(needs), max))[::-1])

    def __len__(self) -> int:
        """How many stretches there are."""
        return len(self.needs)

    @property
    def peak_bytes(self) -> int:
        """The largest need of all."""
        return self.ahead[0]

    def within(self, at: int, reach: int) -> int:
        """Bytes that a step holds at most from stretch `at` up to, not including, stretch `reach`."""
        return max(self.needs[at:reach])
