"""What is planned for sizes that are not known well yet."""

from __future__ import annotations

from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sizes import BatchSize
from tests.predict.test_estimator import law, learnt, text


def test_a_plan_leaner_than_the_shelter_that_broke_the_budget_is_not_used_again() -> None:
    """Also where the shelter would have taken more: by what it missed for this size."""
    advisor, resident = Advisor(90_000_000), Resident(0, 0, False, 0)
    learnt(text(16, 24, 40), law(), advisor.estimator)
    size, other = (BatchSize(tuple(each.items())) for each in text(48, 47))
    advice = advisor.advise(size, resident, 0)
    assert advice.plan is not None
    assert advice.predicted_peak_bytes is None
    assert advisor.advise(size, resident, 0).plan is advice.plan

    advisor.not_beyond_shelter(size, resident, advice.plan, 91_000_000)
    assert advisor.advise(size, resident, 0).plan is None
    assert advisor.advise(other, resident, 0).plan is not None
