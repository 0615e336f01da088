"""One plan for all ranks that gather a model's parameters together (FSDP2).

Every rank has its own sizes, budget and knowledge, and so its own advice; it tells the others before each step.
Ranks wait for each other at every gathered block, so what one recomputes alone costs all of them its time, and nothing
is gained by plans that differ. The rule, the same on every rank because it looks at the same words:

- If a rank learnt that a unit cannot be repeated, all leave it alone; in that step all are sheltered.
- If one rank refuses its batch, all refuse.
- If one rank is sheltered, all are.
- Otherwise each rank judges every plan that another proposes, for its own batch and budget. Of those that fit
  everywhere the one that adds the least time to the slowest rank is taken.
- If none does, the ranks' most saving plans are judged too, and no rank keeps anything of its budget free.
- If none fits then either, all are sheltered where every rank's budget allows that, and else all refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lightning_mimose.errors import BudgetInfeasibleError

NO_RETRY = "a sharded model gathers parameters from the other ranks from its first layer on"
"""Why a failed step of one rank cannot run again."""

Choices = tuple[tuple[str, str], ...]
"""A plan as (unit, action) pairs in order."""


@dataclass(frozen=True)
class Word:
    """What a rank tells the others before a step.

    Attributes:
        refused: Unit -> why it is never recomputed.
        choices: The plan that it would take; None to be sheltered.
        refusal: Why it refuses its batch, if it does.
    """

    refused: Mapping[str, str]
    choices: Choices | None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Refusal:
    """A `BudgetInfeasibleError` in plain data.

    Attributes:
        text: What it says.
        budget_bytes: The budget that cannot be kept.
        resident_bytes: What is resident there.
        smallest_feasible_bytes: What would do there.
    """

    text: str
    budget_bytes: int
    resident_bytes: int
    smallest_feasible_bytes: int | None

    @classmethod
    def of(cls, error: BudgetInfeasibleError | None) -> Refusal | None:
        """What to tell the others of an error."""
        if error is None:
            return None
        return cls(str(error), error.budget_bytes, error.resident_bytes, error.smallest_feasible_bytes)

    def error(self, rank: int) -> BudgetInfeasibleError:
        """The error for the other ranks."""
        return BudgetInfeasibleError(
            f"Rank {rank} refuses its batch, and all ranks of a sharded model step together. It says: {self.text}",
            budget_bytes=self.budget_bytes,
            resident_bytes=self.resident_bytes,
            smallest_feasible_bytes=self.smallest_feasible_bytes,
        )


@dataclass(frozen=True)
class Judgement:
    """A plan on one rank.

    Attributes:
        choices: What it comes to there: what would spare next to nothing is no option for a small batch.
        peak_bytes: Its peak for that rank's batch.
        added_seconds: What it adds to the step.
        fits: Whether that rank's budget allows it, with what it keeps free.
    """

    choices: Choices
    peak_bytes: int
    added_seconds: float
    fits: bool


class Agreement:
    """The ranks of one sharded model, and how they come to one plan.

    They talk over a process group of their own, on the host: nothing waits for an accelerator, and nothing comes
    between the collectives of FSDP.

    Args:
        ranks: Global ranks, this one among them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        whole = len(self.ranks) == torch.distributed.get_world_size()
        self._group: Any = torch.distributed.new_group(
            list(self.ranks), backend="gloo", use_local_synchronization=not whole
        )

    def close(self) -> None:
        """Close the group; ranks that wait in it fail."""
        group, self._group = self._group, None
        if group is not None and torch.distributed.is_initialized():
            with suppress(RuntimeError, ValueError):  # all groups may be closed already
                torch.distributed.destroy_process_group(group)

    def tell(self, word: Any) -> list[Any]:
        """Every rank's word, in the order of `ranks`. All ranks have to call it."""
        words: list[Any] = [None] * len(self.ranks)
        torch.distributed.all_gather_object(words, word, group=self._group)
        return words

    def refuse_together(self, error: BudgetInfeasibleError | None) -> None:
        """Raise on every rank if one of them has an error.

        Raises:
            BudgetInfeasibleError: This rank's own, or that of the first rank that has one.
        """
        self.raise_first(self.tell(Refusal.of(error)), error)

    def raise_first(self, refusals: Sequence[Refusal | None], error: BudgetInfeasibleError | None) -> None:
        """The same, with what was told already."""
        if error is not None:
            raise error
        for rank, refusal in zip(self.ranks, refusals, strict=True):
            if refusal is not None:
                raise refusal.error(rank)

    def choose(self, plans: Sequence[Choices], judge: Callable[[Choices], Judgement | None]) -> Choices | None:
        """The plan that fits on every rank and adds the least time to the slowest one.

        Args:
            plans: What the ranks propose, the same on every rank.
            judge: This rank's judgement of one; None where it has no such option.

        Returns:
            None if no plan fits everywhere.
        """
        candidates = list(dict.fromkeys(plans))
        found = [judge(choices) for choices in candidates]
        costs = self.tell([each.added_seconds if each is not None and each.fits else None for each in found])
        best: tuple[float, Choices] | None = None
        for choices, seconds in zip(candidates, zip(*costs, strict=True), strict=True):
            if None not in seconds:
                best = min(best or (float("inf"), choices), (max(seconds), choices))
        return None if best is None else best[1]
