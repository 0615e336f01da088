"""What is kept, and what is not, when all that was learnt is forgotten."""

from __future__ import annotations

from lightning_mimose.advise.advisor import Advisor
from tests.predict.test_estimator import law, learnt


def test_where_kernels_change_is_known_after_everything_was_forgotten() -> None:
    """It goes by the model and the device, not by what was measured."""
    advisor = Advisor(10_000, turns={"batch": (16,)})
    for _ in range(2):
        learnt([{"batch": batch, "ids:1": 8} for batch in (4, 8, 10, 12, 15)], law(), advisor.estimator)
        inside, beyond = (advisor.estimator.predict({"batch": batch, "ids:1": 8}) for batch in (9, 16))
        assert inside is not None
        assert inside.trusted
        assert beyond is not None
        assert not beyond.trusted
        advisor.forget()
