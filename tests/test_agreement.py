"""How ranks come to one plan; what they say is given, no process runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mimose import Mimose
from lightning_mimose.agreement import Agreement, Choices, Judgement, Refusal, Word
from lightning_mimose.errors import BudgetInfeasibleError

A: Choices = (("a", "recompute"),)
B: Choices = (("b", "lean"),)


NOWHERE = object()
"""What a rank says of plans none of which fits there."""


class Told(Agreement):
    """An agreement in which the other rank's words are known."""

    def __init__(self, *others: Any) -> None:
        self.ranks = (2, 5)
        self._others = list(others)

    def tell(self, word: Any) -> list[Any]:
        """This rank comes first."""
        other = self._others.pop(0)
        return [word, [None] * len(word) if other is NOWHERE else other]


def judge(seconds: dict[Choices, float | None]) -> Any:
    """What a plan costs here; None where it does not fit."""
    return lambda choices: Judgement(choices, 10, seconds[choices] or 0.0, seconds[choices] is not None)


@pytest.mark.parametrize(
    ("here", "there", "chosen"),
    [
        ({A: 1.0, B: 2.0}, [3.0, 2.0], B),  # the slowest rank counts
        ({A: 1.0, B: 2.0}, [2.0, 3.0], A),
        ({A: 1.0, B: None}, [9.0, 1.0], A),  # it must fit here
        ({A: 1.0, B: 2.0}, [None, 9.0], B),  # and there
        ({A: 1.0, B: None}, [None, 1.0], None),
        ({A: 1.0, B: 1.0}, [1.0, 1.0], A),  # the same on every rank
    ],
)
def test_the_plan_that_fits_everywhere(
    here: dict[Choices, float | None], there: list[float | None], chosen: Choices | None
) -> None:
    assert Told(there).choose([A, B, A], judge(here)) == chosen


def test_a_plan_that_a_rank_cannot_judge_is_none() -> None:
    assert Told([1.0]).choose([A, A], lambda _: None) is None


def test_one_refusal_is_everybodys() -> None:
    """The rank that refuses raises its own error, the others one that names it."""
    own = BudgetInfeasibleError("too small", budget_bytes=3, resident_bytes=1, smallest_feasible_bytes=4)
    with pytest.raises(BudgetInfeasibleError) as raised:
        Told(None).refuse_together(own)
    assert raised.value is own
    with pytest.raises(BudgetInfeasibleError, match=r"Rank 5 refuses its batch.* too small") as told:
        Told(Refusal.of(own)).refuse_together(None)
    assert (told.value.budget_bytes, told.value.smallest_feasible_bytes) == (3, 4)
    Told(None).refuse_together(None)


@pytest.mark.parametrize("fits_there", [True, False])
def test_sheltered_where_no_plan_fits_everywhere(fits_there: bool) -> None:
    """A step that every rank could run sheltered is not refused for want of a common plan."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    with Mimose(model, budget=700_000, loss_fn=lambda module, x: module(x).pow(2).mean()) as mimose:
        for rows in (64, 48, 32, 56, 40, 64):
            mimose.step(torch.randn(rows, 32))
        assert not mimose.records[-1].sheltered
        engine = mimose._engine
        assert engine is not None
        engine._decisions.agreement = Told(Word({}, A), NOWHERE, (None, fits_there), NOWHERE, None, None)
        try:
            if fits_there:
                mimose.step(torch.randn(64, 32))
                assert mimose.records[-1].sheltered
            else:
                with pytest.raises(BudgetInfeasibleError, match="all ranks share"):
                    mimose.step(torch.randn(64, 32))
        finally:
            engine._decisions.agreement = None


def test_a_rank_that_only_has_a_bound_is_sheltered_with_the_others() -> None:
    """It could not judge what another one proposes: that ended in a refusal, for want of a common plan."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    with Mimose(model, budget="1GB", loss_fn=lambda module, x: module(x).pow(2).mean()) as mimose:
        decisions = mimose._engine._decisions
        for step in range(14):
            last = step == 13
            decisions.agreement = Told(Word({}, (("0", "recompute"),) if last else None), None, None, None)
            mimose.step(torch.randn(5 if last else 8, 10, 32))  # the batch's length never varied
        decisions.agreement = None
        assert mimose.records[-1].sheltered
        mimose.step(torch.randn(5, 10, 32))
        assert not mimose.records[-1].sheltered  # alone, it keeps everything
