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


def test_a_size_that_missed_its_prediction_is_measured_when_it_comes_again() -> None:
    """Once, and not where it was measured: what is predicted then is what was measured itself."""
    advisor, resident = Advisor(10**9), Resident(0, 0, False, 0)
    learnt(text(16, 24, 40, 56, 64), law(), advisor.estimator)
    missed, known, other = (BatchSize(tuple(each.items())) for each in text(48, 40, 36))
    for size in (missed, known):
        advice = advisor.advise(size, resident, 0)
        assert advice.plan is not None
        assert advice.predicted_peak_bytes is not None
        advisor.verify(
            size, resident, advice.plan, advice.predicted_peak_bytes, int(1.03 * advice.predicted_peak_bytes)
        )
        learnt(text(*(30 + 2 * len(advisor.estimator) + each for each in (0, 1))), law(), advisor.estimator)
    plans = [advisor.advise(size, resident, 0).plan for size in (other, known, missed, missed)]
    assert [plan is None for plan in plans] == [False, False, True, False]
